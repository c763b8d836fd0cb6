"""Run the requests of one body, some at a time, and read tokens as the owner delivers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias

from alignedserve.core import FinishReason, Request
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.http.records import BodyMeter
from alignedserve.gateway.openai.reading import AnswerPiece, AnswerReader
from alignedserve.owner.client import Delivered, GivenUp, InLine, Overloaded, OwnerClient, Settle
from alignedserve.shell.event_loop import ENDS, end_tasks
from alignedserve.tracing.traces import Follow

# A choice's number and a piece of its answer; before the first piece its place in line may come.
Numbered: TypeAlias = tuple[int, AnswerPiece | InLine]
_Arrived: TypeAlias = "asyncio.Queue[Numbered | BaseException | None]"  # None: a task has no more sources


_BEGIN_AT_ONCE = 8  # requests of a body
QUEUE_BEFORE, QUEUE_WAIT = "x-queue-before", "x-queue-wait-s"  # headers of a chat that had to wait in line
INFEASIBLE = "x-slo-infeasible"  # a header that names the deadline that no server could have kept


class Generation:
    """The running requests of one body. Its maker closes it, which cancels the requests that have not ended."""

    def __init__(
        self,
        client: OwnerClient,
        requests: Sequence[Request],
        readers: Iterable[AnswerReader],
        meter: BodyMeter,
        follow: Follow,
        at_once: int,
    ) -> None:
        """Run at most `at_once` of the requests at a time."""
        self._client, self._meter, self._follow = client, meter, follow
        self._ids = [request.id for request in requests]
        self._arrived: _Arrived = asyncio.Queue()
        self._is_paused, self._may_begin = False, asyncio.Event()
        self._may_begin.set()
        self._is_infeasible = self._is_over = False
        self._ended_by: AlignedServeError | None = None
        sources = (  # made as they begin: a waiting request has nothing else
            self._read(number, request, reader, number >= at_once)
            for number, (request, reader) in enumerate(zip(requests, readers, strict=True))
        )
        self._pieces = next(sources) if len(requests) == 1 else self._merge(sources, min(at_once, len(requests)))
        self._first: Numbered | None = None
        self._place: InLine | None = None  # that the first choice was told first

    async def begin(self) -> None:
        """Wait for the first delivery, or a place in line: until then a refusal can be answered by an HTTP status."""
        self._first = await self._pieces.__anext__()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers about the promise and the time that the answer took; to be read after `begin`."""
        found = {INFEASIBLE: "ttft"} if self._is_infeasible else {}
        if self._place is not None:
            found |= {QUEUE_BEFORE: str(self._place.num_before), QUEUE_WAIT: f"{self._place.seconds:.1f}"}
        return {**found, **self._meter.timing_headers(self._is_over)}

    async def pieces(self) -> AsyncIterator[Numbered]:
        """Yield all pieces as they arrive, and places in line before; to be called once, after `begin`."""
        assert self._first is not None
        yield self._first
        self._resume()
        async for numbered in self._pieces:
            yield numbered
            if self._is_paused:
                self._resume()
        self._is_over = True
        self._meter.end()

    def pause(self) -> None:
        """Stop the requests, since the client does not read; they go on when the client has read all that has come."""
        self._is_paused = True
        self._may_begin.clear()
        for id in self._ids:
            self._client.pause(id)

    def _resume(self) -> None:
        if not self._is_paused or not self._arrived.empty() or any(map(self._client.has_unread, self._ids)):
            return
        self._is_paused = False
        self._may_begin.set()
        for id in self._ids:
            self._client.resume(id)

    def end(self, error: AlignedServeError) -> None:
        """End the answer with this error, whatever comes of the requests; the first error counts."""
        if self._ended_by is not None:
            return
        self._ended_by = error
        self._arrived.put_nowait(error)
        for id in self._ids:
            self._client.end(id, error)

    async def close(self) -> None:
        await self._pieces.aclose()

    async def _read(
        self, number: int, request: Request, reader: AnswerReader, waits: bool
    ) -> AsyncGenerator[Numbered, None]:
        """Yield a request's pieces up to the piece with a finish; then cancel a request that would deliver more.

        If the request `waits` for others of the body, deadlines count from its begin."""
        meter = self._meter
        if waits:
            await self._may_begin.wait()
            request = replace(request, arrival_at=self._client.now())
        if self._ended_by is not None:
            raise self._ended_by
        with meter.meter(number, request) as of_choice, self._follow(request) as trace:
            settle = of_choice.use.charge
            opened = self._until_admitted(request, settle) if waits else self._client.open(request, settle)
            async with aclosing(opened) as deliveries:
                async for delivered in deliveries:
                    if delivered.place is not None:
                        self._place = self._place or delivered.place
                        if len(self._ids) == 1:  # another choice may still be refused, by an HTTP status
                            yield number, delivered.place
                        continue
                    self._is_infeasible |= delivered.is_infeasible
                    if not meter.count_delivery(number, delivered) and delivered.finish is None:
                        delivered = replace(delivered, finish=FinishReason.LENGTH)
                    piece = reader.read(delivered)
                    piece.charged = of_choice.use.charged
                    trace.deliver(delivered)
                    if piece.finish:
                        meter.finish_choice(number, piece.finish.value)
                        trace.finish(piece.finish.value)
                    yield number, piece
                    if piece.finish:
                        return
            raise RuntimeError("a request's deliveries ended without a finish")

    async def _until_admitted(self, request: Request, settle: Settle) -> AsyncGenerator[Delivered, None]:
        """Open a request of a body that was admitted: where there is no room now, it waits."""
        while True:
            has_begun = False
            try:
                async with aclosing(self._client.open(request, settle)) as deliveries:
                    async for delivered in deliveries:
                        has_begun = True
                        yield delivered
                return
            except Overloaded as error:
                if has_begun or isinstance(error, GivenUp):
                    raise
                await asyncio.sleep(error.retry_after_s)
                request = replace(request, arrival_at=self._client.now())

    async def _merge(
        self, sources: Iterable[AsyncGenerator[Numbered, None]], at_once: int
    ) -> AsyncGenerator[Numbered, None]:
        """Yield the pieces of all sources as they arrive, at most `at_once` sources at a time."""
        tasks: list[asyncio.Task[None]] = []
        try:
            while len(tasks) < at_once:
                tasks.append(asyncio.create_task(self._forward(sources)))
                if len(tasks) % _BEGIN_AT_ONCE == 0:
                    await asyncio.sleep(0)  # the event loop looks for others' bytes
            num_open = len(tasks)
            while num_open:
                item = await self._arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            await end_tasks(*tasks)

    async def _forward(self, sources: Iterable[AsyncGenerator[Numbered, None]]) -> None:
        """Put the pieces of one source after the other into the queue, as long as others leave any, and at the end
        None, or the error that ended one."""
        ended: BaseException | None = None
        try:
            for source in sources:
                async with aclosing(source) as pieces:
                    async for numbered in pieces:
                        self._arrived.put_nowait(numbered)
        except ENDS:
            raise
        except BaseException as error:
            ended = error
        self._arrived.put_nowait(ended)
