"""The memory and the seats that a step may take: what is free, and what best-effort requests have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.core import units_for
from alignedserve.worker.step.blocks import Blocks, add_blocks
from alignedserve.worker.step.device_pages import NO_NEXT_PAGES, NOTHING_SHARED, DevicePages, NextPages
from alignedserve.worker.step.request import WorkerRequest


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Seating:
    """The blocks of a device, and the seats for prompts that wait, that a step may take."""

    blocks: Blocks
    total: int  # blocks of the device
    block_size: int  # tokens of a block
    seats: int  # requests that may be seated
    by_chunk: bool  # whether a prompt gets blocks chunk by chunk, else all blocks at once
    room_for: Callable[[WorkerRequest], int]  # tokens that a request which is seated as a whole gets memory for
    pages: DevicePages = NOTHING_SHARED  # what requests share
    next_pages: NextPages = NO_NEXT_PAGES  # that seated prompts compute
    admitted: list[WorkerRequest] = field(default_factory=list)  # by this choice
    displaced: list[WorkerRequest] = field(default_factory=list)  # gave up blocks for `admitted`, and wait again
    displaces: bool = True  # whether seated requests may give up blocks: not while a step runs
    # Tells whether the step has time to make K and V of this many tokens again; set by the step.
    has_time_to_project: Callable[[int], bool] = field(default=lambda _tokens: True)

    def left_for(self, _running: WorkerRequest) -> int:
        """Return how many tokens of a request there is memory for."""
        return self.blocks.num_free * self.block_size

    def has_seat(self, _waiting: WorkerRequest) -> bool:
        return self.seats > 0

    def may_seat(self, waiting: WorkerRequest) -> bool:
        """Return whether a prompt may be seated now, given memory. `False` lets later prompts overtake this one."""
        return not self.next_pages.holds_up(waiting)

    def demand(self, running: WorkerRequest, size: int) -> int:
        """Return the memory that `size` more tokens of a request need, in tokens rounded up to blocks.

        Memory that the request has already, or shares with seated requests, is not counted. For example, a prompt
        with 20 tokens in two blocks of 16 needs 16 more for a chunk of 20 tokens.
        """
        if running.blocks and not self.by_chunk:  # most requests
            return 0
        return max(0, self._blocks_for(running, size) - self._num_held(running)) * self.block_size

    def _blocks_for(self, running: WorkerRequest, size: int) -> int:
        """Return how many blocks a request has with `size` more tokens."""
        tokens = running.num_held + size if self._grows(running) else self.room_for(running)
        return units_for(tokens, self.in_block(running))

    def _num_held(self, running: WorkerRequest) -> int:
        return len(running.blocks) or self.pages.num_shared(running)

    def in_block(self, _running: WorkerRequest) -> int:
        """Return how many tokens of a request a block holds."""
        return self.block_size

    def _grows(self, running: WorkerRequest) -> bool:
        """Return whether a request gets blocks chunk by chunk.

        KV that the pool has is copied as soon as the request is seated, and needs all its blocks at once.
        """
        return self.by_chunk and bool(running.blocks or not self.pages.has_to_fetch(running))

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return how many of these tokens of a request there is memory for."""
        if not running.blocks and not self.has_seat(running):
            return 0
        left = self.left_for(running)
        if self.demand(running, size) <= left:
            return size
        if not self._grows(running):
            return 0
        return max(0, self._num_held(running) * self.block_size + left - running.num_held)

    def take(self, running: WorkerRequest, size: int) -> None:
        """Take memory for `size` more tokens of a request, which `most` has found; seat a waiting request."""
        wanted = self._blocks_for(running, size)
        if not running.blocks:
            self.seats -= 1
            self.admitted.append(running)
            add_blocks(running, self.pages.share(running))
        elif not self.by_chunk:
            return
        add_blocks(running, self._taken(max(0, wanted - len(running.blocks))))
        self.next_pages.add(running)

    def _taken(self, count: int) -> tuple[int, ...]:
        blocks = self.blocks.take(count)
        assert blocks is not None, "a choice took more than there was"
        return blocks


RECALL_S = 30.0  # after which a past need counts half: to recompute others costs more than memory that stays free


class RecentNeed:
    """The memory that real-time requests needed lately: more such requests will come.

    Gain: long prompts beside documents, colocated +0.5 points and +8.8 %; else next to none on 17 loads."""

    def __init__(self) -> None:
        self._blocks, self._at = 0.0, 0.0

    def spare_blocks(self, held: int, now: float, more_expected: bool = True) -> int:
        """Return how many free blocks to hold back from best-effort requests: the recent real-time peak, less `held`.

        Where no more real-time requests are expected, there are none: what was needed before is forgotten.
        """
        self._blocks = max(held, self._blocks * 0.5 ** ((now - self._at) / RECALL_S)) if more_expected else held
        self._at = now
        return int(self._blocks) - held


@dataclass(slots=True)
class PackedSeating(Seating):
    """Offers real-time requests also the memory and the seats of best-effort requests."""

    best_effort: Sequence[WorkerRequest] = ()  # that are seated
    spare: int = 0  # free blocks to hold back from best-effort requests
    is_open: bool = True  # to real-time requests, however many are seated
    as_they_leave: Callable[[Sequence[WorkerRequest]], list[WorkerRequest]] = field(kw_only=True)  # the first one last
    _yielding: list[WorkerRequest] | None = None  # best-effort requests that have not left, the first to leave last
    _can_yield: int | None = None  # blocks

    def left_for(self, running: WorkerRequest) -> int:
        blocks = self.blocks.num_free
        if running.promise.is_rt:
            if self._can_yield is None:
                self._can_yield = sum(self.blocks.num_freed(seat.blocks) for seat in self._left())
            blocks += max(0, self._can_yield - self.pages.num_read_once(running))
        elif not running.blocks and self.best_effort:
            blocks = max(0, blocks - self.spare)
        return blocks * self.block_size

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return for how many of these tokens of a request there is memory.

        There is none for a displaced request: others have its blocks, and the request would lose more.
        """
        if self.by_chunk and any(left is running for left in self.displaced):
            return 0
        return Seating.most(self, running, size)

    def take(self, running: WorkerRequest, size: int) -> None:
        Seating.take(self, running, size)
        self._can_yield = None  # the request may now share blocks with requests that would leave

    def _left(self) -> Sequence[WorkerRequest]:
        if not self.displaces:
            return ()
        return self.best_effort if self._yielding is None else self._yielding

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free:
            if self._yielding is None:
                self._yielding = self.as_they_leave(self.best_effort)
            leaving, self._can_yield = self._yielding.pop(), None
            self.blocks.give(leaving.blocks)  # `leaving.blocks` still says where to copy the KV from
            self.displaced.append(leaving)
        return Seating._taken(self, count)
