"""The block pairs of a device, and the seats for waiting requests, that a choice of a step may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.core import ServiceClass, units_for
from alignedserve.worker.step.device_pages import NO_NEXT_PAGES, NOTHING_SHARED, DevicePages, NextPages
from alignedserve.worker.step.running import Blocks, Running


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Seating:
    blocks: Blocks
    total: int  # pairs of the device
    block_size: int  # tokens of a pair
    seats: int  # requests that may be seated
    by_chunk: bool  # whether a prompt gets pairs for the chunk that runs, or at once what it will need
    room_for: Callable[[Running], int]  # tokens that a request which is seated as a whole gets memory for
    long_classes: Callable[[], set[ServiceClass]]  # of the long prompts that are unfinished here
    pages: DevicePages = NOTHING_SHARED  # what requests share
    next_pages: NextPages = NO_NEXT_PAGES  # that seated prompts compute
    seated: list[Running] = field(default_factory=list)  # by this choice
    unseated: list[Running] = field(default_factory=list)  # requests that gave up their pairs for these, and wait again
    # Tells whether the step has time to project the hidden vectors of this many tokens; the step sets it.
    has_time_to_project: Callable[[int], bool] = field(default=lambda _tokens: True)

    def left_for(self, _running: Running) -> int:
        """Return how many tokens of a request there is memory for."""
        return self.blocks.num_free * self.block_size

    def has_seat(self, _waiting: Running) -> bool:
        return self.seats > 0

    def may_seat(self, waiting: Running) -> bool:
        """Return whether a prompt is to be seated at all now, memory apart. A prompt that is not holds up no other."""
        return not self.next_pages.holds_up(waiting)

    @property
    def takes_best_effort(self) -> bool:
        """Return whether there may be a best-effort prompt that is to be seated."""
        return True

    def demand(self, running: Running, size: int) -> int:
        """Return the memory that `size` more tokens of a request need, in tokens rounded up to blocks.

        What the request has already, and what it shares with seated requests, is not counted. For example, a prompt
        with 20 tokens in two blocks of 16 needs 16 more for a chunk of 20 tokens.
        """
        if running.pairs and not self.by_chunk:  # most requests
            return 0
        return max(0, self._pairs_for(running, size) - self._num_held(running)) * self.block_size

    def _pairs_for(self, running: Running, size: int) -> int:
        """Return how many pairs a request has with `size` more tokens."""
        tokens = running.num_held + size if self._grows(running) else self.room_for(running)
        return units_for(tokens, self.in_pair(running))

    def _num_held(self, running: Running) -> int:
        return len(running.pairs) or self.pages.num_read(running)

    def in_pair(self, _running: Running) -> int:
        """Return how many tokens of a request a pair holds."""
        return self.block_size

    def _grows(self, running: Running) -> bool:
        """Return whether a request gets pairs chunk by chunk.

        The KV that the pool has of it when it is seated is copied to its pairs at once; what comes later is not.
        """
        return self.by_chunk and bool(running.pairs or not self.pages.has_to_fetch(running))

    def most(self, running: Running, size: int) -> int:
        """Return how many of these tokens of a request there is memory for."""
        if not running.pairs and not self.has_seat(running):
            return 0
        left = self.left_for(running)
        if self.demand(running, size) <= left:
            return size
        if not self._grows(running):
            return 0
        return max(0, self._num_held(running) * self.block_size + left - running.num_held)

    def take(self, running: Running, size: int) -> None:
        """Take memory for `size` more tokens of a request, which `most` has found; seat it if it waits."""
        wanted = self._pairs_for(running, size)
        if not running.pairs:
            self.seats -= 1
            self.seated.append(running)
            self.pages.share(running)
        elif not self.by_chunk:
            return
        running.add_pairs(self._taken(max(0, wanted - len(running.pairs))))
        self.next_pages.add(running)

    def _taken(self, count: int) -> tuple[int, ...]:
        pairs = self.blocks.take(count)
        assert pairs is not None, "a choice took more than there was"
        return pairs
