"""What a choice may take of a device: block pairs, and seats for requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.running import Blocks, Running, units_for


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Seating:
    blocks: Blocks
    total: int  # pairs of the device
    block_size: int
    seats: int  # requests that may be seated
    by_chunk: bool  # whether a prompt gets pairs for the chunk that runs, or at once what it will need
    room_for: Callable[[Running], int]  # tokens of a request that is seated as a whole
    has_long: Callable[[], bool]  # whether a long prompt is unfinished here
    seated: list[Running] = field(default_factory=list)  # by this choice

    @property
    def left(self) -> int:
        """Tokens."""
        return self.blocks.num_free * self.block_size

    def demand(self, running: Running, size: int) -> int:
        """Tokens, rounded to blocks, that so many more of its own need, beside the blocks that it has."""
        by_chunk = self._grows(running)
        if running.pairs and not by_chunk:
            return 0
        tokens = running.prefix + size if by_chunk else self.room_for(running)
        return max(0, units_for(tokens, self.block_size) - len(running.pairs)) * self.block_size

    def _grows(self, running: Running) -> bool:
        return self.by_chunk and not running.known  # what the pool knows of it is copied to its pairs at once

    def most(self, running: Running, size: int) -> int:
        """As many of these tokens as there is memory for."""
        if not running.pairs and not self.seats:
            return 0
        if self.demand(running, size) <= self.left:
            return size
        return len(running.pairs) * self.block_size + self.left - running.prefix if self._grows(running) else 0

    def take(self, running: Running, size: int) -> None:
        """What `most` has said that there is."""
        more = self.blocks.take(self.demand(running, size) // self.block_size)
        assert more is not None, "a choice took more than there was"
        if not running.pairs:
            self.seats -= 1
            self.seated.append(running)
        running.pairs += more
