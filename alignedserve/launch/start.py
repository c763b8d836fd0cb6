"""Start one part in this process: build the core, the shell and the hands of its role, and run them.

`main` is a process of this machine: it was forked (fork_server.py), or runs this module. Its launcher writes the part's
spec to its standard input, and once more when settings change. It keeps that open: when the launcher ends, however it
ends, the part sees the end of its input and ends too, unless another launcher comes (succession.py). A part prints one
thing on its standard output: why it cannot run at all.

`PartActor` is an actor of Ray, which ends with its launcher, and with its node. Neither imports anything that only a
launcher needs.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from alignedserve.architectures.model_source import fetched_bytes, is_fetched
from alignedserve.config.config import parse
from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError, CastOut, DeviceLost, RankLost
from alignedserve.launch.succession import inputs
from alignedserve.machine.shared_files import remove_stale
from alignedserve.shell.links import PREFIX, remove_dead_sockets
from alignedserve.shell.logs import never_fail_to_print, set_up
from alignedserve.shell.part import LiveSettings, OnStart, Part, PartSpec, Place, Stoppable
from alignedserve.shell.signs import SignSender
from alignedserve.signs import ExitCode, Stage, growing

log = logging.getLogger("alignedserve.parts")

EMBED_NICE = 10  # of an embedding model's worker: chats, on the same cores, come first
_STARTS_AGAIN = {CastOut: ExitCode.CAST_OUT, RankLost: ExitCode.RANK_LOST, DeviceLost: ExitCode.DEVICE_LOST}


def start(spec: PartSpec, on_start: OnStart, live: LiveSettings) -> None:
    """Build the part of this role and run it until it is stopped."""
    live.on_change(lambda config: set_up(config.log, spec.name))
    _wait_calmly()
    if spec.of_embed and spec.role in WORKERS:
        os.nice(EMBED_NICE)  # the threads that it starts have the same
    assert spec.keys is not None, f"{spec.name} has no keys for its links"
    signs = SignSender(spec.name, spec.incarnation, spec.signs_at, spec.keys)
    _fetch_model(Place(spec, signs))
    with growing(signs, lambda: len(sys.modules)):
        run = _code_of(spec.acts_as)
    if spec.rank:
        from alignedserve.executor.worker_process import run_rank

        run_rank(Place(spec, signs))
    else:
        run(Part(spec, signs, live), on_start)


def load(roles: Collection[Role]) -> None:
    """Import what parts of these roles run, in a process that forks them."""
    _wait_calmly()
    for role in roles:
        _code_of(role)
    for module in ("llguidance",) if WORKERS[0] in roles else ("uvloop",):
        with suppress(ImportError):  # the part says what it does without it
            import_module(module)


def _code_of(role: Role) -> Callable[[Part, OnStart], None]:
    """Return the code of a role. Only processes of the role import what it needs: torch and FastAPI are heavy."""
    if role is Role.ROUTER:
        from alignedserve.router.actor import run
    elif role is Role.POOL:
        from alignedserve.kvpool.actor import run
    elif role is Role.PREFILL:
        from alignedserve.prefill_worker.actor import run
    elif role is Role.DECODE:
        from alignedserve.decode_worker.actor import run
    elif role is Role.JOBS:
        from alignedserve.jobs.actor import run
    else:
        from alignedserve.gateway.actor import run
    return run


def _fetch_model(place: Place) -> None:
    """Fetch a model to this node of a cluster: that may take longer than all else."""
    model = place.config.model
    if not is_fetched(model):
        return
    place.signs.stage(Stage.MODEL)
    with growing(place.signs, partial(fetched_bytes, model, place.config.cache_directory)):
        _ = place.folder
    place.signs.stage(Stage.LIBRARIES)


def _wait_calmly() -> None:
    """Let torch's threads sleep soon while they wait, since other parts share their cores (docs/how/kernels.md).

    This must run before torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


# --- As a process of this machine


def _follow_launcher(spec: PartSpec, live: LiveSettings) -> None:
    """Take new settings from the launcher, and end this process when no launcher is there."""

    def follow() -> None:
        for given in inputs(spec):
            for line in given:
                try:
                    live.change(parse(PartSpec.from_json(line.decode()).config))
                except Exception:  # half a line of a launcher that was killed
                    log.exception("new settings are not taken")
        log.warning("the launcher has gone: this process ends")
        os._exit(ExitCode.LAUNCHER_GONE)

    threading.Thread(target=follow, name="launcher-watch", daemon=True).start()


class _OnSigterm:
    """Stop the part that this was given, or end a process that has no part yet.

    A thread waits for the signal, since a handler runs only between two lines of Python: it would come too
    late for a main thread that zmq_poll, busy with a command of its own as the signal came, puts back to sleep.
    """

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in every thread that starts after this line
        self._part: Stoppable | None = None
        threading.Thread(target=self._wait, name="sigterm", daemon=True).start()

    def __call__(self, part: Stoppable) -> None:
        self._part = part

    def _wait(self) -> None:
        signal.sigwait({signal.SIGTERM})
        if self._part is None:
            os._exit(ExitCode.STOPPED)
        self._part.stop()


def main() -> ExitCode:
    stdout = os.dup(1)  # for this process alone: what libraries print goes to standard error
    os.dup2(2, 1)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as given:  # unbuffered: what follows is read later
        line = given.readline()
    if not line:  # it has gone before it could say anything
        return ExitCode.LAUNCHER_GONE
    spec = PartSpec.from_json(line.decode())
    never_fail_to_print()
    set_up(parse(spec.config).log, spec.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles it
    on_sigterm = _OnSigterm()
    _follow_launcher(spec, live := LiveSettings())
    try:
        start(spec, on_sigterm, live)
    except AlignedServeError as error:
        for kind, code in _STARTS_AGAIN.items():
            if isinstance(error, kind):
                log.error("%s", error)
                return code
        os.write(stdout, str(error).encode())
        return ExitCode.USER_ERROR
    return ExitCode.STOPPED


# --- As an actor


class PartActor:
    """A part as an actor: its call `run` takes as long as the part lives."""

    def __init__(self, spec: str) -> None:
        end_with_parent()
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
        except tuple(_STARTS_AGAIN) as error:
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


def end_with_parent() -> None:
    """End this process, however it stands, when its parent ends: of an actor that is Ray's server on the node. Ray has
    it end by the wall clock. Where that had stepped back, parts of lost nodes stayed, and held the lock that the next
    life of the part needs."""
    try:
        parent = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # another system, or a parent that is not to be seen from here
        return
    ends = select.poll()
    ends.register(parent, select.POLLIN)

    def wait() -> None:
        ends.poll()
        os._exit(ExitCode.BROKEN)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _here(spec: PartSpec) -> PartSpec:
    """Return the spec with this node filled in, if Ray has chosen the node."""
    if spec.node:
        return spec
    import ray

    return replace(spec, node=ray.get_runtime_context().get_node_id()[-12:], host=ray.util.get_node_ip_address())


if __name__ == "__main__":
    sys.exit(main())
