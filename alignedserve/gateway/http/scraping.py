"""The text of /metrics, which may be asked for as often as one likes.

To write the text takes the event loop some milliseconds, in which no stream gets its token. So it is written block by
block, and after it the loop has nine times as long for others before it is written again: scrapes that come meanwhile
wait, and share the next one. Nobody gets a text that was begun before he asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.series import in_turns, merge, split

_REST = 9.0  # times as long as the last text took
_MOST_REST_S = 1.0  # where an owner was slow to answer


class Scrapes:
    def __init__(self, parts: PartMetrics, owners: Callable[[], Awaitable[Sequence[bytes]]]) -> None:
        """`owners` returns the series of all owners of requests; set it where others own some."""
        self._parts, self.owners = parts, owners
        self._coming: asyncio.Task[bytes] | None = None  # the text that is not begun yet
        self._last: asyncio.Task[bytes] | None = None  # the text that was begun last
        self._rests_until = 0.0

    async def text(self) -> bytes:
        if self._coming is None or self._coming.done():
            self._coming = asyncio.create_task(self._write())
        return await asyncio.shield(self._coming)

    async def _write(self) -> bytes:
        loop = asyncio.get_running_loop()
        if self._last is not None and not self._last.done():
            await asyncio.wait({self._last})
        await asyncio.sleep(max(0.0, self._rests_until - loop.time()))
        self._coming, self._last = None, self._coming
        began_at = loop.time()
        blocks = await in_turns(self._parts.blocks())
        owners = [block for text in await self.owners() for block in split(text.decode())]
        self._rests_until = loop.time() + min(_REST * (loop.time() - began_at), _MOST_REST_S)
        return merge([*owners, *blocks]).encode()
