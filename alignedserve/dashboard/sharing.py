"""The requests of all owners for the live page, whichever gateway shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from alignedserve.metrics.recent import RecentRequests, RequestLog, together
from alignedserve.owner.siblings import Siblings, siblings
from alignedserve.shell.part import Part

TICK_S = 1.0
_ANSWER_S = 0.5  # an owner that does not answer so soon is left out: pictures come each second


def request_pictures(part: Part, log: RequestLog, now: Callable[[], float]) -> RequestPictures:
    """Return the pictures of all owners of this part's deployment, its own among them."""

    async def say(slot_s: bytes) -> bytes:
        # one that gave up before it asked says nothing
        return msgspec.json.encode(log.recent(now(), float(slot_s))) if slot_s else b""

    return RequestPictures(log, now, siblings(part, say, "-page", _ANSWER_S))


class RequestPictures:
    def __init__(self, log: RequestLog, now: Callable[[], float], siblings: Siblings) -> None:
        self._log, self._now, self._siblings = log, now, siblings

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Count tokens each second, and answer gateways that ask meanwhile."""
        async with self._siblings.listening():
            ticking = asyncio.create_task(self._tick())
            try:
                yield
            finally:
                ticking.cancel()

    async def of_all(self, slot_s: float) -> RecentRequests:
        """Return the requests of all owners that answer, in slots of this length."""
        said = await self._siblings.ask_all(str(slot_s).encode())
        return together(msgspec.json.decode(picture, type=RecentRequests) for picture in said)

    async def _tick(self) -> None:
        while True:
            self._log.tick(self._now())
            await asyncio.sleep(TICK_S)
