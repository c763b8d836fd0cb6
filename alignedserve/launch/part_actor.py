"""A part as an actor of Ray: its process imports nothing of the launcher."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from alignedserve.config.config import parse
from alignedserve.errors import AlignedServeError, CastOut, DeviceLost, RankLost
from alignedserve.kvpool.arena.shared_files import remove_stale
from alignedserve.launch.start import start
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.inboxes import PREFIX, remove_dead_sockets
from alignedserve.shell.logs import never_fail_to_print, set_up
from alignedserve.shell.part import LiveSettings, PartSpec, Stoppable

log = logging.getLogger("alignedserve.parts")


class PartActor:
    """A part as an actor: its call `run` takes as long as the part lives."""

    def __init__(self, spec: str) -> None:
        self._spec = _here(PartSpec.from_json(spec))
        self._part: Stoppable | None = None
        self._live = LiveSettings()

    def run(self) -> str:
        """Run the part. Return in one line why it cannot run at all, or nothing if another start may help."""
        try:
            never_fail_to_print()
            config = parse(self._spec.config)
            set_up(config.log, self._spec.name)
            # A deployment whose Ray has lost its head ends without cleaning up, and a launcher that starts cleans only
            # the nodes that are there then. So each part cleans its own node.
            remove_stale(Path(config.kvpool.directory), PREFIX, living=self._spec.deployment)
            remove_dead_sockets()
            start(self._spec, self._on_start, self._live)
        except (CastOut, DeviceLost, RankLost) as error:
            log.error("%s", error)
        except AlignedServeError as error:
            return str(error)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(ExitCode.BROKEN)  # frees all that the process still holds
        return ""

    def stop(self) -> bool:
        """Have the part stop by itself. Return False where it cannot: it is not set up yet."""
        if self._part is None:
            return False
        self._part.stop()
        return True

    def reload(self, spec: str) -> None:
        """Take the settings of this spec."""
        self._live.change(parse(PartSpec.from_json(spec).config))

    def _on_start(self, part: Stoppable) -> None:
        self._part = part


def _here(spec: PartSpec) -> PartSpec:
    """Return the spec with this node filled in, if Ray has chosen the node."""
    if spec.node:
        return spec
    import ray

    return replace(spec, node=ray.get_runtime_context().get_node_id()[-12:], host=ray.util.get_node_ip_address())
