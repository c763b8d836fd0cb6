"""The router as a process."""

from __future__ import annotations

import logging

from alignedserve.protocol.commands import Command, Scale
from alignedserve.protocol.events import Event
from alignedserve.router.placing.admission import Queues
from alignedserve.router.sizing import Sizes
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.shell.control import LauncherOrder, tell
from alignedserve.shell.part import OnStart, Part
from alignedserve.shell.turn import NoHands

log = logging.getLogger("alignedserve.router")


def run(part: Part, on_start: OnStart) -> None:
    config = part.config
    _, capacity = part.capacity()
    server, wire = config.server, config.wire
    limits = RouterLimits(
        server.max_open,
        wire.heartbeat_s,
        wire.death_s,
        part.policy,
        config.engine.block_size,
        capacity.limits.num_tokens,
        Queues.of_chats(server.max_queue, server.max_queue_tokens),
        Sizes(config.scale.ranges, shrink_after_s=config.scale.shrink_after_s),
        config.topology.prompts_on,
        capacity.limits.retention,
        config.lends,
        server.patience_s,
    )
    core = RouterCore(part.member, limits, part.clock.now(), part.at_work)
    shell = part.shell(core, _RouterHands(part.spec.door))
    on_start(shell)
    part.run(shell, core.start())


class _RouterHands(NoHands):
    """Send wishes for more or fewer workers to the launcher."""

    def __init__(self, door: str) -> None:
        self._door = door

    def perform(self, command: Command) -> Event | None:
        assert isinstance(command, Scale), f"a router cannot perform {command}"
        try:
            tell(self._door, LauncherOrder(prefill=command.prefill, decode=command.decode, why=command.why))
        except OSError as error:
            log.error("the launcher did not receive the order to scale (%s): %s", command.why, error)
        return None
