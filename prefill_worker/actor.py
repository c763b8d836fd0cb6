"""The prefill worker as a process: its core and the engine."""

from __future__ import annotations

from alignedserve.engine.engine import Engine
from alignedserve.engine_hands import EngineHands, hold_leases, use_threads
from alignedserve.parts import OnStart, Part
from alignedserve.prefill_worker.state import PrefillCore


def run(part: Part, on_start: OnStart) -> None:
    spec, config = part.spec, part.config
    _, capacity = part.capacity()
    limits = capacity.limits
    use_threads(config.engine.threads, config.topology.prefill_workers + config.topology.decode_workers)
    engine = Engine(part.folder, num_pairs=limits.num_pairs, block_size=limits.block_size, dtype=capacity.dtype)
    lock = hold_leases(part.shared_memory, spec.deployment, part.member)
    try:
        hands = EngineHands(engine, part.arena_path, limits.page_size, config.kvpool.verify_pages)
        shell = part.shell(PrefillCore(limits), hands)
        on_start(shell)
        part.run(shell)
    finally:
        lock.release()
