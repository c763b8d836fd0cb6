"""Turns at something that callers share by weight, as many at once as there is room for.

A turn costs 1, and 1 for each KiB of its body. A caller's next turn is due cost / weight after its last one (start-time
fair queueing, a virtual clock): of those that wait, the turn that is due first comes next. For example, with weights 3
and 1 and many equal bodies that wait, of four turns three are of the first caller; where one waits with bodies of 4 MiB
and another with bodies of 9 KiB, the second has 410 turns for one. A caller that comes later starts at the clock, so
that it has neither saved up turns nor any to make up for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from alignedserve.gateway.access.keys import Caller


@dataclass(frozen=True)
class WaitingTurn:
    due: float  # by the clock
    given: asyncio.Future[None]


class FairTurns:
    def __init__(self, most: int, of_one: int | None = None) -> None:
        """Give `most` turns at once, `of_one` of them to a caller."""
        self._num_free, self._of_one = most, of_one or most
        self._held: Counter[str] = Counter()  # by caller
        self._waiting: dict[str, deque[WaitingTurn]] = {}  # by caller
        self._next_due: dict[str, float] = {}
        self._clock = 0.0  # when the last turn that was given was due

    @asynccontextmanager
    async def turn(self, caller: Caller, num_bytes: int = 0) -> AsyncIterator[None]:
        """Hold a turn of the caller's, for a body of this length."""
        own, cost = self._waiting.setdefault(caller.id, deque()), (1 + num_bytes / 1024) / caller.weight
        due = max(self._clock, self._next_due.get(caller.id, 0.0))
        self._next_due[caller.id] = due + cost
        mine = WaitingTurn(due, asyncio.get_running_loop().create_future())
        own.append(mine)
        self._give()
        try:
            await mine.given
            yield
        finally:
            if mine.given.cancelled():
                self._forget(caller.id, mine)
                self._next_due[caller.id] = self._next_due.get(caller.id, 0.0) - cost
            else:
                self._held[caller.id] -= 1
                self._num_free += 1
            self._give()

    def _give(self) -> None:
        """Give the turns that are free."""
        while self._num_free:
            may_have = [
                (own[0].due, caller) for caller, own in self._waiting.items() if self._held[caller] < self._of_one
            ]
            if not may_have:
                break
            due, caller = min(may_have)
            mine = self._waiting[caller][0]
            self._forget(caller, mine)
            if not mine.given.done():  # else its client has left just now
                self._held[caller] += 1
                self._num_free -= 1
                self._clock = max(self._clock, due)
                mine.given.set_result(None)
        if not self._waiting and not +self._held:
            self._held.clear()
            self._next_due.clear()

    def _forget(self, caller: str, turn: WaitingTurn) -> None:
        if (own := self._waiting.get(caller)) is not None and turn in own:
            own.remove(turn)
            if not own:
                del self._waiting[caller]
