"""The batch that runs on a decode worker, and which requests are about as long as its members (AlignedServe §3.4).

    shortest of its members ──────── width, as the pool put it together ───────▶
                 └─▶ a token a step, as all of them grow

The band is never wider than its batch was, whichever requests join: pinned chats, prompts that are handed on, requests
that came while there was room for all. They run beside the batch, and are members only if they are in its band. A band
as wide as all that runs would become so wide with the first such guest that every request in the pool is in it.

A request that the pool finds in the band is a member from then on, though the members grow while it waits for a seat.
Otherwise the shortest of those requests would all be guests, the band would move up and away from the waiting ones, and
no member would be left long before they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.worker.step.running import Running

LEAST_WIDTH = 256  # tokens: a spread that costs a step next to nothing
_GROWN = 64  # tokens by which its members may have grown since the pool heard of the band


class RunningBatch:
    def __init__(self) -> None:
        self.number = 0  # its tag: that of the newest batch of which a member has joined
        self.num_batches = 0  # that have come
        self._width = 0
        self._widths: dict[int, int] = {}  # batch that has come and does not run yet -> its width

    def comes(self, prefixes: Sequence[int]) -> None:
        """Note a candidate batch, with the prefixes of its members."""
        self.num_batches += 1
        self._widths[self.num_batches] = max(prefixes) - min(prefixes)

    def begins(self, number: int) -> None:
        """Let this batch take the place of the one that ran."""
        self.number = number
        self._width = max(LEAST_WIDTH, self._widths.get(number, 0))
        self._widths = {batch: width for batch, width in self._widths.items() if batch > number}

    def band(self, seated: Iterable[Running]) -> tuple[int, int] | None:
        """Return the shortest and the longest prefix of the band, or None when no member is left."""
        prefixes = self._prefixes(seated)
        return (min(prefixes), min(prefixes) + self._width) if prefixes else None

    def old_of(self, requests: Sequence[Running]) -> Sequence[Running]:
        """Return the requests that leave first: those of the old batch while another takes its place, otherwise all."""
        return [running for running in requests if running.batch != self.number] or requests

    def tag(self, prefix: int, seated: Iterable[Running]) -> int:
        """Return the tag of a candidate request with this prefix: the batch's number where it is a member, else 0."""
        prefixes = self._prefixes(seated)
        if not prefixes:
            return 0
        shortest, longest = min(prefixes), max(prefixes)
        spread = max(longest, prefix) - min(shortest, prefix)
        return self.number if spread <= max(longest - shortest, self._width + _GROWN) else 0

    def _prefixes(self, seated: Iterable[Running]) -> list[int]:
        return [running.num_held for running in seated if running.batch == self.number] if self.number else []
