"""Turn the delivered tokens of a request into pieces of its answer. Nothing here waits or knows of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import FinishReason, Logprob
from alignedserve.gateway.openai.errors import no_token
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import Delivered
from alignedserve.text.calls.formats import LLAMA3_JSON, CallFormat
from alignedserve.text.calls.parts import CallPart, CallText, join_parts
from alignedserve.text.calls.reading import CallReader
from alignedserve.text.decoding import IncrementalDecoder
from alignedserve.text.stopping import StopStrings
from alignedserve.text.text_model import TextModel


@dataclass(frozen=True)
class AnswerPiece:
    """A new part of an answer.

    `text` may lag behind `tokens`, if they end inside a character or a stop string; the last piece has all the rest."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token, if the request asks for them
    prompt_logprobs: tuple[Logprob, ...] = ()  # in the first piece
    num_cached: int = 0  # prompt tokens whose KV the pool had, in the first piece
    calls: tuple[CallPart, ...] = ()  # parts of tool calls that were found in the output
    stop: str | None = None  # the stop string that has ended the answer

    @property
    def is_text_alone(self) -> bool:
        return self.text != "" and self.finish is None


def join_pieces(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    return AnswerPiece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish,
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
        pieces[0].num_cached,
        join_parts([part for piece in pieces for part in piece.calls]),
        pieces[-1].stop,
    )


@dataclass(frozen=True)
class Ending:
    """The rules for the end of an answer that the engine does not know."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # before so many tokens no stop string counts
    is_empty: bool = False  # whether the answer shows the prompt only


def _call_format(body: ChatRequest, text: TextModel) -> CallFormat | None:
    """Return the format of the answer's calls; demanded calls have Llama 3's, whatever the model's own format is."""
    if not body.may_call:
        return None
    return text.call_format if body.demanded_calls is None else LLAMA3_JSON


class AnswerReader:
    """Reads the deliveries of one request, in order, up to the piece that has a finish.

    A stop string is such a finish: the engine itself would continue the output."""

    def __init__(self, decoder: IncrementalDecoder, ending: Ending, calls: CallReader | None = None) -> None:
        self._decoder, self._ending, self._calls = decoder, ending, calls
        self._stops = StopStrings(ending.stops, ending.include_stop)
        self._num_tokens = 0

    @classmethod
    def from_body(cls, body: ChatRequest | CompletionRequest, text: TextModel) -> AnswerReader:
        include = bool(body.include_stop_str_in_output)
        ending = Ending(tuple(body.stop or ()), include, body.min_tokens or 0, body.most_tokens == 0)
        skip_special = body.skip_special_tokens is not False
        form = _call_format(body, text) if isinstance(body, ChatRequest) else None
        if form is None or not isinstance(body, ChatRequest):
            return cls(text.decoder(skip_special), ending)
        return cls(text.decoder(skip_special, form.markers), ending, form.make_reader(body.most_calls))

    def read(self, delivered: Delivered) -> AnswerPiece:
        if delivered.finish is FinishReason.ERROR:
            raise no_token()
        text, num_used, finish = self._read(delivered)
        found = self._find_calls(text, bool(finish))
        return AnswerPiece(
            found.text,
            delivered.tokens[:num_used],
            finish,
            delivered.logprobs[:num_used],
            delivered.opening.logprobs,
            delivered.opening.num_cached,
            found.parts,
            self._stops.found or None,
        )

    def _find_calls(self, text: str, is_last: bool) -> CallText:
        if self._calls is None:
            return CallText(text)
        found = self._calls.feed(text)
        return found + self._calls.flush() if is_last else found

    def _read(self, delivered: Delivered) -> tuple[str, int, FinishReason | None]:
        """Return the new text, how many of the tokens it shows, and the answer's finish, if it ends here.

        With stop strings the tokens are read one by one, so that the answer ends at the same token however tokens are
        delivered together.
        """
        tokens, finish = delivered.tokens, delivered.finish
        if self._ending.is_empty:
            return "", 0, finish and FinishReason.LENGTH
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
        """Return the tokens that become text: a stop token does so only if the answer includes its stop."""
        hides_last = finish is FinishReason.STOP and not self._ending.include_stop
        return tokens[:-1] if hides_last else tokens

    def _rest(self, finish: FinishReason | None) -> str:
        return self._decoder.flush() if finish else ""
