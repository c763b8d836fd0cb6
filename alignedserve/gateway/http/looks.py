"""Limit what each caller looks up in a minute: a look takes no request of its key, and a large one costs the event loop
as much as an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from alignedserve.gateway.access.ledger import Bucket
from alignedserve.gateway.openai.errors import rate_limited

# A row of a list costs the event loop about 10 µs. So do LOOK_BYTES of a kept response.
MOST_ROWS = 100_000  # of a caller in a minute, at each gateway
LOOK_BYTES = 4 << 10


class LookPace:
    def __init__(self, most: int, what: str, now: Callable[[], float] = time.monotonic) -> None:
        """A caller may look up `most` of `what` in a minute."""
        self._most, self._what, self._now = most, what, now
        self._left = defaultdict[str, Bucket](Bucket)  # by caller; there are few
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def take(self, caller: str, number: int) -> None:
        """Count a look of this caller; raise if a minute's worth is used up. The last look may go beyond it."""
        left = self._left[caller]
        left.fill(self._most, self._now())
        if wait_s := left.wait_s(1, self._most):
            raise rate_limited(f"{self._most} {self._what} in a minute", wait_s)
        left.left -= number

    @asynccontextmanager
    async def turn(self, caller: str, is_paced: bool = True) -> AsyncIterator[None]:
        """Hold the caller's turn at a look whose cost is taken once it is known: one at a time, since each may be
        large. Raise if a minute's worth is used up, where that counts."""
        async with self._turns[caller]:
            if is_paced:
                self.take(caller, 0)
            yield
