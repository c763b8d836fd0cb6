"""The router as a process."""

from __future__ import annotations

from pathlib import Path

from alignedserve.cost_profile import cache_directory, fingerprint
from alignedserve.parts import OnStart, Part
from alignedserve.policy import Predictor
from alignedserve.router.admission import queues_of
from alignedserve.router.length import LEARNT
from alignedserve.router.predicting import SideProcess
from alignedserve.router.state import RouterCore, RouterLimits


def run(part: Part, on_start: OnStart) -> None:
    config = part.config
    _, capacity = part.capacity()
    server, wire = config.server, config.wire
    limits = RouterLimits(
        server.max_open,
        wire.heartbeat_s,
        wire.death_s,
        config.policy,
        config.engine.block_size,
        capacity.limits.num_tokens,
        queues_of(server),
    )
    core = RouterCore(part.member, limits, part.clock.now())
    side = _side_process(part)
    shell = part.shell(core, side)
    if side is not None:
        side.start(shell.post)
    on_start(shell)
    try:
        part.run(shell, core.start())
    finally:
        if side is not None:
            side.stop()


def _side_process(part: Part) -> SideProcess | None:
    predictor = part.config.policy.predictor
    if predictor not in LEARNT:
        return None
    if predictor is Predictor.MINILM:
        from alignedserve.router.minilm import check

        check()
    return SideProcess(predictor, _kept_at(part))


def _kept_at(part: Part) -> Path:
    """What was learnt of one model by one encoder."""
    given = part.config.schedule.predictor_cache
    folder = Path(given) if given else cache_directory()
    return folder / f"lengths-{part.config.policy.predictor.value}-{fingerprint(part.folder)}.npz"
