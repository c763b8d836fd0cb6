"""One request between its owner and its client: deliveries of tokens become pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.metrics import Meter
from alignedserve.gateway.owner_client import Delivered, OwnerClient
from alignedserve.gateway.text import IncrementalDecoder


@dataclass(frozen=True)
class Piece:
    """`text` may lag behind `tokens`, which may end within a character; the last piece has the rest."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None


class Generation:
    """Whoever makes one closes it; closed before its last piece, the request is cancelled."""

    def __init__(self, client: OwnerClient, request: Request, decoder: IncrementalDecoder, meter: Meter) -> None:
        self._deliveries = client.open(request)
        self._decoder = decoder
        self._meter = meter
        self._first: Delivered | None = None
        meter.opened()

    async def begin(self) -> None:
        """Returns with the first delivery: until then a refusal can still be an HTTP status."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[Piece]:
        """After `begin`, once."""
        delivered = self._first
        while delivered is not None:
            yield self._piece(delivered)
            delivered = None if delivered.finish else await self._next()

    async def close(self) -> None:
        try:
            await self._deliveries.aclose()
        finally:
            self._meter.closed()

    async def _next(self) -> Delivered:
        try:
            delivered = await self._deliveries.__anext__()
        except StopAsyncIteration:
            raise RuntimeError("a request's deliveries ended without a finish") from None
        self._meter.delivered(len(delivered.tokens))
        return delivered

    def _piece(self, delivered: Delivered) -> Piece:
        text = self._decoder.feed(delivered.tokens)
        if delivered.finish:
            text += self._decoder.flush()
            self._meter.ended(delivered.finish.value)
        return Piece(text, delivered.tokens, delivered.finish)
