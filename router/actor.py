"""The router as a process."""

from __future__ import annotations

import logging
from pathlib import Path

from alignedserve.architectures.model_source import cache_directory
from alignedserve.cost.profile import fingerprint
from alignedserve.protocol.commands import Command, Scale
from alignedserve.protocol.events import Event
from alignedserve.router.placing.admission import Queues
from alignedserve.router.side.hands import SideProcess
from alignedserve.router.sizing import Sizes
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.scheduling.policy import Predictor
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
    is_learnt = part.config.policy.predictor is Predictor.HASH
    side = SideProcess(_file_of_lengths(part)) if is_learnt else None
    shell = part.shell(core, _RouterHands(side, part.spec.door))
    if side is not None:
        side.start(shell.post)
    on_start(shell)
    try:
        part.run(shell, core.start())
    finally:
        if side is not None:
            side.stop()


class _RouterHands(NoHands):
    """Send predictions to the side process, and wishes for more or fewer workers to the launcher."""

    def __init__(self, side: SideProcess | None, door: str) -> None:
        self._side, self._door = side, door

    def perform(self, command: Command) -> Event | None:
        if isinstance(command, Scale):
            try:
                tell(self._door, LauncherOrder(prefill=command.prefill, decode=command.decode, why=command.why))
            except OSError as error:
                log.error("the launcher did not receive the order to scale (%s): %s", command.why, error)
            return None
        return super().perform(command) if self._side is None else self._side.perform(command)


def _file_of_lengths(part: Part) -> Path:
    """Return the file that keeps what was learnt of one model."""
    folder = cache_directory(part.config.cache_directory)
    return folder / f"lengths-{part.config.policy.predictor.value}-{fingerprint(part.folder)}.npz"
