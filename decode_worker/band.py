"""Which batch runs on a decode worker, and who is about as long as its members (AlignedServe §3.4).

    shortest of its members ──────── width, as the pool put it together ───────▶
                 └─▶ a token a step, as all of them grow

So the band is never wider than its batch was, whoever joins: pinned chats, prompts that are handed on, those that came
since there was room for all. They run beside it, and are of no batch unless they are in its band. Were it as wide as
all that runs, the first such guest would make it so wide that everybody in the pool is in it.

Whom the pool finds in the band is of the batch from then on, though its members grow while it waits for a seat: else
the shortest of them would all be guests, the band would move up and away from those that wait, and nobody be left for
it long before they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.worker.step.running import Running

LEAST_WIDTH = 256  # tokens: a spread that costs a step next to nothing
_GROWN = 64  # tokens by which its members may have grown since the pool heard of the band


class RunningBatch:
    def __init__(self) -> None:
        self.number = 0  # its tag: that of the last batch of which a member has joined
        self._width = 0
        self._widths: dict[int, int] = {}  # of batches that have come, and do not run yet

    def comes(self, number: int, prefixes: Sequence[int]) -> None:
        """As the candidate batch."""
        self._widths[number] = max(prefixes) - min(prefixes)

    def begins(self, number: int) -> None:
        self.number = number
        self._width = max(LEAST_WIDTH, self._widths.get(number, 0))
        self._widths = {one: width for one, width in self._widths.items() if one > number}

    def band(self, seated: Iterable[Running]) -> tuple[int, int] | None:
        """None where none of its members is there any more."""
        prefixes = self._prefixes(seated)
        return (min(prefixes), min(prefixes) + self._width) if prefixes else None

    def old_of(self, some: Sequence[Running]) -> Sequence[Running]:
        """Who leaves first: while this batch takes the place of another, those that are not of it; else all."""
        return [one for one in some if one.batch != self.number] or some

    def tag(self, prefix: int, seated: Iterable[Running]) -> int:
        """Of a candidate request that is so long."""
        prefixes = self._prefixes(seated)
        if not prefixes:
            return 0
        shortest, longest = min(prefixes), max(prefixes)
        spread = max(longest, prefix) - min(shortest, prefix)
        return self.number if spread <= max(longest - shortest, self._width + _GROWN) else 0

    def _prefixes(self, seated: Iterable[Running]) -> list[int]:
        return [one.prefix for one in seated if one.batch == self.number] if self.number else []
