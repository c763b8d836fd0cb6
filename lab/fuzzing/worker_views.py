"""What a worker's core has, as the fuzzer and tests look at it."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.protocol.messages import Attempt


def blocks_of(core: DecodeCore) -> list[int]:
    """Return each block of the device once, as long as all is well."""
    return [*core.memory.blocks_with(core.here.occupants()), *core.elsewhere.blocks]


def kept_blocks(core: DecodeCore) -> Collection[int]:
    """Return the blocks of full pages: nothing is written to them any more."""
    return core.memory.blocks.kept


def holds_of(core: DecodeCore) -> set[Attempt]:
    """Return the attempts for which the pool keeps pages."""
    return core.pool_link.holds.attempts


def num_preemptions(core: DecodeCore) -> int:
    """Return how many requests have left for others."""
    return sum(preempted.number for preempted in core.log.counts.preempted)


def num_evictions(core: DecodeCore) -> int:
    """Return how many requests have left for others with KV."""
    return sum(preempted.number for preempted in core.log.counts.preempted if preempted.keeps_kv)
