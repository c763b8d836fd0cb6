"""What a worker's core has, as the fuzzer and tests look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.papers.memory.block_ends import TwoEndedBlocks
from alignedserve.papers.memory.hybrid import WeighedMemory
from alignedserve.papers.memory.two_ended import TwoEndedMemory
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.step.blocks import NamedBlocks
from alignedserve.worker.step.states import State


def blocks_of(core: DecodeCore) -> list[int]:
    """Return free blocks, taken blocks, and blocks that a step may still write to: each block once, if all is well.

    A block with several readers counts as taken by the first reader."""
    memory, here, of_forms = core.memory, core.here, core.elsewhere.blocks
    if (slots := slots_of(memory)) is not None:
        return [*slots.free, *{*slots.left, *slots.right}, *of_forms]
    copied_to = [running for running in here.copies.values() if running.state is State.ABANDONED]
    taken = [*memory.steps.left, *(running.blocks for running in (*here.occupants(), *copied_to))]
    blocks = [*memory.blocks.free, *chain.from_iterable(taken)]
    if isinstance(memory.blocks, NamedBlocks) and (more_readers := memory.blocks.more_readers):
        blocks = list((Counter(blocks) - Counter(more_readers)).elements())
    return [*blocks, *of_forms]


def kept_blocks(core: DecodeCore) -> Collection[int]:
    """Return the blocks of full pages: nothing is written to them any more."""
    blocks = core.memory.blocks
    return blocks.kept if isinstance(blocks, NamedBlocks) else ()


def holds_of(core: DecodeCore) -> set[Attempt]:
    """Return the attempts for which the pool keeps pages."""
    return core.pool_link.holds.attempts


def num_preemptions(core: DecodeCore) -> int:
    """Return how many requests have left for others."""
    return sum(preempted.number for preempted in core.log.counts.preempted)


def num_evictions(core: DecodeCore) -> int:
    """Return how many requests have left for others with KV."""
    return sum(preempted.number for preempted in core.log.counts.preempted if preempted.keeps_kv)


def slots_of(memory: PlainMemory) -> TwoEndedBlocks | None:
    """Return the blocks of this memory, where two requests may share a block."""
    return memory.slots if isinstance(memory, TwoEndedMemory) else None


def weighed(memory: PlainMemory) -> WeighedMemory | None:
    """Return this memory, where it weighs the forms of requests."""
    return memory if isinstance(memory, WeighedMemory) else None
