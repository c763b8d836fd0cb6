"""The requests of one body, from their owner to its client: as tokens of any of them are delivered, they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeAlias

from alignedserve.core import Request
from alignedserve.gateway.http.metrics import Meter
from alignedserve.gateway.openai.reading import Piece, Reader
from alignedserve.owner.client import OwnerClient

Numbered: TypeAlias = tuple[int, Piece]  # of which choice, in the order of the requests


class Generation:
    """Whoever makes one closes it; requests whose deliveries have not ended by then are cancelled."""

    def __init__(
        self, client: OwnerClient, requests: Sequence[Request], readers: Sequence[Reader], meter: Meter
    ) -> None:
        numbered = enumerate(zip(requests, readers, strict=True))
        self._pieces = _merged(
            [_read(client, request, number, reader, meter) for number, (request, reader) in numbered]
        )
        self._first: Numbered | None = None

    async def begin(self) -> None:
        """Returns with the first delivery: until then a refusal can still be an HTTP status."""
        self._first = await self._pieces.__anext__()

    async def pieces(self) -> AsyncIterator[Numbered]:
        """After `begin`, once."""
        assert self._first is not None
        yield self._first
        async for numbered in self._pieces:
            yield numbered

    async def close(self) -> None:
        await self._pieces.aclose()


async def _read(
    client: OwnerClient, request: Request, number: int, reader: Reader, meter: Meter
) -> AsyncGenerator[Numbered, None]:
    """To the piece that has a finish; the request is cancelled where there would be more."""
    meter.opened()
    try:
        async with aclosing(client.open(request)) as deliveries:
            async for delivered in deliveries:
                piece = reader.read(delivered)
                meter.delivered(number, len(request.prompt), len(delivered.tokens), delivered.num_cached)
                if piece.finish:
                    meter.ended(piece.finish.value)
                yield number, piece
                if piece.finish:
                    return
    finally:
        meter.closed()
    raise RuntimeError("a request's deliveries ended without a finish")


async def _merged(sources: Sequence[AsyncGenerator[Numbered, None]]) -> AsyncGenerator[Numbered, None]:
    """As they come. One source needs no task of its own, and most bodies have but one."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for numbered in only:
                yield numbered
        return
    arrived: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_into(arrived, source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            came = await arrived.get()
            if isinstance(came, BaseException):
                raise came
            if came is None:
                num_open -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _into(queue: asyncio.Queue[Numbered | BaseException | None], source: AsyncGenerator[Numbered, None]) -> None:
    """None once it has ended, or what it ended of."""
    ended: BaseException | None = None
    try:
        async with aclosing(source) as pieces:
            async for numbered in pieces:
                queue.put_nowait(numbered)
    except Exception as error:
        ended = error
    queue.put_nowait(ended)
