"""From delivered tokens to pieces of an answer, for one request: nothing here waits, and nothing knows of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import FinishReason, Logprob
from alignedserve.gateway.openai.errors import no_token
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import Delivered
from alignedserve.text.calls import READERS, CallFormat, CallPart, CallReader, CallText, join_parts
from alignedserve.text.decoding import IncrementalDecoder
from alignedserve.text.stopping import StopStrings
from alignedserve.text.text_model import TextModel


@dataclass(frozen=True)
class Piece:
    """`text` may lag behind `tokens`, where they end within a character or a stop string; the last piece has all."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token, where they are asked for
    prompt_logprobs: tuple[Logprob, ...] = ()  # with the first piece
    num_cached: int = 0  # tokens of the prompt that the pool had: with the first piece
    calls: tuple[CallPart, ...] = ()  # of tools, found in what the model wrote

    @property
    def is_text_alone(self) -> bool:
        return self.text != "" and self.finish is None


def joined(pieces: Sequence[Piece]) -> Piece:
    """All of them as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish,
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
        pieces[0].num_cached,
        join_parts([part for piece in pieces for part in piece.calls]),
    )


@dataclass(frozen=True)
class Ending:
    """What of the tokens an answer shows, beside what the engine already minds."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # before which no stop string counts
    is_empty: bool = False  # only the prompt is asked for


def call_reader(body: ChatRequest, text: TextModel) -> CallReader | None:
    """Calls that are demanded have Llama 3's form, whatever the model's own is."""
    if not body.may_call:
        return None
    form = text.call_format if body.demanded_calls is None else CallFormat.LLAMA3
    return READERS[form](body.most_calls) if form is not None else None


class Reader:
    """Of one request's deliveries, in their order. Once a piece has a finish, what is delivered after it is not read:
    a stop string ends an output that the engine would go on with."""

    def __init__(self, decoder: IncrementalDecoder, ending: Ending, calls: CallReader | None = None) -> None:
        self._decoder, self._ending, self._calls = decoder, ending, calls
        self._stops = StopStrings(ending.stops, ending.include_stop)
        self._num_tokens = 0

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest, text: TextModel) -> Reader:
        include = bool(body.include_stop_str_in_output)
        ending = Ending(tuple(body.stop or ()), include, body.min_tokens or 0, body.most_tokens == 0)
        calls = call_reader(body, text) if isinstance(body, ChatRequest) else None
        return cls(text.decoder(body.skip_special_tokens is not False), ending, calls)

    def read(self, delivered: Delivered) -> Piece:
        if delivered.finish is FinishReason.ERROR:
            raise no_token()
        text, num_used, finish = self._nothing(delivered) if self._ending.is_empty else self._read(delivered)
        tokens, logprobs = delivered.tokens[:num_used], delivered.logprobs[:num_used]
        found = self._found(text, bool(finish))
        return Piece(found.text, tokens, finish, logprobs, delivered.prompt_logprobs, delivered.num_cached, found.parts)

    def _found(self, text: str, is_last: bool) -> CallText:
        if self._calls is None:
            return CallText(text)
        found = self._calls.feed(text)
        return found + self._calls.flush() if is_last else found

    def _nothing(self, delivered: Delivered) -> tuple[str, int, FinishReason | None]:
        return "", 0, delivered.finish and FinishReason.LENGTH

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
