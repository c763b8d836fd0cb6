"""One request between its owner and its client: deliveries of tokens become pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from alignedserve.core import FinishReason, Logprob, Request
from alignedserve.gateway.errors import no_token
from alignedserve.gateway.metrics import Meter
from alignedserve.gateway.openai_types import ChatRequest, CompletionRequest
from alignedserve.gateway.owner_client import Delivered, OwnerClient
from alignedserve.gateway.stopping import StopStrings
from alignedserve.gateway.text import IncrementalDecoder


@dataclass(frozen=True)
class Piece:
    """`text` may lag behind `tokens`, where they end within a character or a stop string; the last piece has all."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token, where they are asked for
    prompt_logprobs: tuple[Logprob, ...] = ()  # with the first piece
    num_cached: int = 0  # tokens of the prompt that the pool had: with the first piece


def joined(pieces: Sequence[Piece]) -> Piece:
    """All of them as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish,
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
        pieces[0].num_cached,
    )


@dataclass(frozen=True)
class Ending:
    """What of the tokens an answer shows, beside what the engine already minds."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # before which no stop string counts
    is_empty: bool = False  # only the prompt is asked for

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest) -> Ending:
        include = bool(body.include_stop_str_in_output)
        return cls(tuple(body.stop or ()), include, body.min_tokens or 0, body.most_tokens == 0)


class Generation:
    """Whoever makes one closes it; closed before its deliveries have ended, the request is cancelled."""

    def __init__(
        self, client: OwnerClient, request: Request, decoder: IncrementalDecoder, ending: Ending, meter: Meter
    ) -> None:
        self._deliveries = client.open(request)
        self._decoder = decoder
        self._ending = ending
        self._stops = StopStrings(ending.stops, ending.include_stop)
        self._meter = meter
        self._first: Delivered | None = None
        self._num_tokens = 0
        meter.opened()

    async def begin(self) -> None:
        """Returns with the first delivery: until then a refusal can still be an HTTP status."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[Piece]:
        """After `begin`, once."""
        delivered = self._first
        while delivered is not None:
            piece = self._piece(delivered)
            yield piece
            delivered = None if piece.finish else await self._next()

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
        if delivered.finish is FinishReason.ERROR:
            raise no_token()
        self._meter.delivered(len(delivered.tokens), delivered.num_cached)
        return delivered

    def _piece(self, delivered: Delivered) -> Piece:
        if self._ending.is_empty:
            text, num_used, finish = "", 0, delivered.finish and FinishReason.LENGTH
        else:
            text, num_used, finish = self._read(delivered)
        if finish:
            self._meter.ended(finish.value)
        tokens, logprobs = delivered.tokens[:num_used], delivered.logprobs[:num_used]
        return Piece(text, tokens, finish, logprobs, delivered.prompt_logprobs, delivered.num_cached)

    def _read(self, delivered: Delivered) -> tuple[str, int, FinishReason | None]:
        """New text, how many of the tokens came before it ended, and why it did, if it did.

        Token by token where there are stop strings, so that the same token ends it whatever it came together with.
        """
        tokens, finish = delivered.tokens, delivered.finish
        if not self._ending.stops:
            return self._decoder.feed(self._shown(tokens, finish)) + self._rest(finish), len(tokens), finish
        text = ""
        for num_used, token in enumerate(tokens, 1):
            last = finish if num_used == len(tokens) else None
            text += self._until_stop(self._decoder.feed(self._shown((token,), last)) + self._rest(last))
            if self._stops.found:
                return text, num_used, FinishReason.STOP
        return text + (self._stops.flush() if finish else ""), len(tokens), finish

    def _until_stop(self, text: str) -> str:
        self._num_tokens += 1
        return text if self._num_tokens <= self._ending.min_tokens else self._stops.feed(text)

    def _shown(self, tokens: tuple[int, ...], finish: FinishReason | None) -> tuple[int, ...]:
        """A stop token is no text, unless stops are to be included."""
        hides_last = finish is FinishReason.STOP and not self._ending.include_stop
        return tokens[:-1] if hides_last else tokens

    def _rest(self, finish: FinishReason | None) -> str:
        return self._decoder.flush() if finish else ""
