"""What a choice may take of a device: block pairs, and seats for requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.core import units_for
from alignedserve.worker.step.running import Blocks, Running


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Seating:
    blocks: Blocks
    total: int  # pairs of the device
    block_size: int  # tokens of a pair
    seats: int  # requests that may be seated
    by_chunk: bool  # whether a prompt gets pairs for the chunk that runs, or at once what it will need
    room_for: Callable[[Running], int]  # tokens of a request that is seated as a whole
    has_long: Callable[[], bool]  # whether a long prompt is unfinished here
    seated: list[Running] = field(default_factory=list)  # by this choice
    unseated: list[Running] = field(default_factory=list)  # for them: it gives them back to who waits
    # Whether the step has time to make K and V of so many tokens anew: who chooses says that.
    has_time_to_project: Callable[[int], bool] = field(default=lambda _tokens: True)

    def left_for(self, _running: Running) -> int:
        """Tokens."""
        return self.blocks.num_free * self.block_size

    def has_seat(self, _waiting: Running) -> bool:
        return self.seats > 0

    def may_seat(self, _waiting: Running) -> bool:
        """Whether it is to be seated at all now, memory apart. Who may not holds up nobody."""
        return True

    @property
    def takes_best_effort(self) -> bool:
        """Whether there may be a best-effort one that is to be seated."""
        return True

    def demand(self, running: Running, size: int) -> int:
        """Tokens, rounded to blocks, that so many more of its own need, beside the blocks that it has."""
        if running.pairs and not self.by_chunk:  # most that are asked about
            return 0
        by_chunk = self._grows(running)
        tokens = running.prefix + size if by_chunk else self.room_for(running)
        return max(0, units_for(tokens, self.in_pair(running)) - len(running.pairs)) * self.block_size

    def in_pair(self, _running: Running) -> int:
        """Tokens of it that a pair holds."""
        return self.block_size

    def _grows(self, running: Running) -> bool:
        """What the pool knows of it when it is seated is copied to its pairs at once; what it says later is not."""
        return self.by_chunk and bool(running.pairs or not running.known)

    def most(self, running: Running, size: int) -> int:
        """As many of these tokens as there is memory for."""
        if not running.pairs and not self.has_seat(running):
            return 0
        left = self.left_for(running)
        if self.demand(running, size) <= left:
            return size
        return len(running.pairs) * self.block_size + left - running.prefix if self._grows(running) else 0

    def take(self, running: Running, size: int) -> None:
        """What `most` has said that there is."""
        more = self._taken(self.demand(running, size) // self.block_size)
        if not running.pairs:
            self.seats -= 1
            self.seated.append(running)
        running.add_pairs(more)

    def _taken(self, count: int) -> tuple[int, ...]:
        pairs = self.blocks.take(count)
        assert pairs is not None, "a choice took more than there was"
        return pairs
