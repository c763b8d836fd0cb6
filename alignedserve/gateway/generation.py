"""Run the requests of one body and read their tokens as their owner delivers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.core import Request
from alignedserve.gateway.http.records import BodyMeter
from alignedserve.gateway.openai.reading import AnswerPiece, AnswerReader
from alignedserve.owner.client import OwnerClient
from alignedserve.tracing.traces import Follow

Numbered: TypeAlias = tuple[int, AnswerPiece]  # with the number of its choice, in the order of the requests


INFEASIBLE = "x-slo-infeasible"  # a header that names the deadline that no server could have kept


@dataclass(slots=True)
class _Findings:
    """The findings about the requests of one body, as far as they have begun."""

    is_infeasible: bool = False


class Generation:
    """The running requests of one body. Its maker closes it, which cancels the requests that have not ended."""

    def __init__(
        self,
        client: OwnerClient,
        requests: Sequence[Request],
        readers: Sequence[AnswerReader],
        meter: BodyMeter,
        follow: Follow,
    ) -> None:
        findings = _Findings()
        numbered = enumerate(zip(requests, readers, strict=True))
        self._pieces = _merge(
            [_read(client, request, number, reader, meter, follow, findings) for number, (request, reader) in numbered]
        )
        self._first: Numbered | None = None
        self._is_over = False
        self._findings, self._meter = findings, meter

    async def begin(self) -> None:
        """Wait for the first delivery: until then a refusal can still be answered by an HTTP status."""
        self._first = await self._pieces.__anext__()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers about the promise and the time that the answer took; to be read after `begin`."""
        found = {INFEASIBLE: "ttft"} if self._findings.is_infeasible else {}
        return {**found, **self._meter.timing(self._is_over).headers}

    async def pieces(self) -> AsyncIterator[Numbered]:
        """Yield all pieces as they arrive; to be called once, after `begin`."""
        assert self._first is not None
        yield self._first
        async for numbered in self._pieces:
            yield numbered
        self._is_over = True
        self._meter.end()

    async def close(self) -> None:
        await self._pieces.aclose()


async def _read(
    client: OwnerClient,
    request: Request,
    number: int,
    reader: AnswerReader,
    meter: BodyMeter,
    follow: Follow,
    findings: _Findings,
) -> AsyncGenerator[Numbered, None]:
    """Yield a request's pieces up to the piece with a finish; the request is cancelled if it would deliver more."""
    with meter.meter(number, request), follow(request) as trace:
        async with aclosing(client.open(request)) as deliveries:
            async for delivered in deliveries:
                findings.is_infeasible |= delivered.is_infeasible
                piece = reader.read(delivered)
                meter.count_delivery(number, delivered)
                trace.deliver(delivered)
                if piece.finish:
                    meter.finish_choice(number, piece.finish.value)
                    trace.finish(piece.finish.value)
                yield number, piece
                if piece.finish:
                    return
        raise RuntimeError("a request's deliveries ended without a finish")


async def _merge(sources: Sequence[AsyncGenerator[Numbered, None]]) -> AsyncGenerator[Numbered, None]:
    """Yield the pieces of all sources as they arrive. A single source, the usual case, needs no task of its own."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for numbered in source:
                yield numbered
        return
    arrived: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(source, arrived)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    source: AsyncGenerator[Numbered, None], queue: asyncio.Queue[Numbered | BaseException | None]
) -> None:
    """Put the source's pieces into the queue, and at its end None, or the error that ended it."""
    ended: BaseException | None = None
    try:
        async with aclosing(source) as pieces:
            async for numbered in pieces:
                queue.put_nowait(numbered)
    except Exception as error:
        ended = error
    queue.put_nowait(ended)
