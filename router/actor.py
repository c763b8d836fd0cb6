"""The router as a process."""

from __future__ import annotations

from alignedserve.parts import OnStart, Part
from alignedserve.router.state import RouterCore, RouterLimits


def run(part: Part, on_start: OnStart) -> None:
    config = part.config
    limits = RouterLimits(
        config.server.max_open, config.wire.heartbeat_s, config.wire.death_s, config.policy, config.engine.block_size
    )
    core = RouterCore(part.member, limits, part.clock.now())
    shell = part.shell(core)
    on_start(shell)
    part.run(shell, core.start())
