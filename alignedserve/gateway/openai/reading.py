"""Turn the delivered tokens of a request into pieces of its answer. Nothing here waits or knows of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from alignedserve.config.prices import NOTHING_CHARGED, Charged, price_field
from alignedserve.core import NOTHING_SPENT, FinishReason, Logprob, Request, Spent
from alignedserve.gateway.openai.errors import no_token
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import Delivered
from alignedserve.text.calls.scanning import CallPart, CallReader, CallText, join_parts
from alignedserve.text.decoding import IncrementalDecoder, StopStrings
from alignedserve.text.reasoning.splitting import ReasoningPhase, Splitter, SplitText
from alignedserve.text.text_model import TextModel


@dataclass(slots=True)  # made for every delivery, and a frozen one takes three times as long
class AnswerPiece:
    """A new part of an answer.

    `text` may lag behind `tokens`, if they end inside a character or a stop string; the last piece has all the rest."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token, if asked for
    prompt_logprobs: tuple[Logprob, ...] = ()  # in the first piece
    num_cached: int = 0  # prompt tokens with KV in the pool, in the first piece
    calls: tuple[CallPart, ...] = ()  # parts of tool calls that were found in the output
    stop: str | None = None  # the stop string that has ended the answer
    reasoning: str = ""  # what the model says to itself before its answer
    num_reasoning: int = 0  # tokens of it, its markers included
    charged: Charged = NOTHING_CHARGED  # the request, so far


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
        "".join(piece.reasoning for piece in pieces),
        sum(piece.num_reasoning for piece in pieces),
        pieces[-1].charged,
    )


def cost_of(charged: Iterable[Charged]) -> dict[str, Any]:
    """Return what requests are charged with as a field of a usage; nothing where the workers did not say."""
    each = list(charged)
    in_all = reduce(Spent.plus, (charge.spent for charge in each), NOTHING_SPENT)
    if not in_all.seconds:
        return {}
    cost = {"device_seconds": round(in_all.seconds, 6), "joules": round(in_all.joules, 3), "energy": in_all.source}
    return {"cost": cost | price_field(sum(charge.price for charge in each))}


@dataclass(frozen=True)
class AnswerEnding:
    """The rules for the end of an answer that the engine does not know."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # before this number of tokens no stop string counts
    is_empty: bool = False  # whether the answer shows the prompt only


def _ending_of(body: ChatRequest | CompletionRequest) -> AnswerEnding:
    include = bool(body.include_stop_str_in_output)
    return AnswerEnding(tuple(body.stop or ()), include, body.min_tokens or 0, body.most_tokens == 0)


# The new part of an answer: its text and calls, tokens used, finish, reasoning, and how many tokens are of reasoning.
_Found: TypeAlias = tuple[CallText, int, FinishReason | None, str, int]


class AnswerReader:
    """Reads the deliveries of one request, in order, up to the piece that has a finish.

    A stop string is such a finish: the engine itself would continue the output. Only the answer is searched for stop
    strings and calls, not the reasoning before it."""

    def __init__(
        self,
        decoder: IncrementalDecoder,
        ending: AnswerEnding,
        calls: CallReader | None = None,
        splitter: Splitter | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        self._decoder, self._ending, self._calls = decoder, ending, calls
        self._splitter, self._shows_reasoning = splitter, shows_reasoning
        self._stops = StopStrings(ending.stops, ending.include_stop)
        ends_with_calls = calls is not None and calls.ends_answer
        self._reads_singly = bool(ending.stops) or splitter is not None or ends_with_calls
        self._num_tokens = 0
        self._num_open = 0  # tokens that may be the beginning of a reasoning

    @classmethod
    def from_body(
        cls, body: ChatRequest | CompletionRequest, text: TextModel, prompt: Sequence[int] = ()
    ) -> AnswerReader:
        """Return the reader of the answer to a body; `prompt` shows whether the output begins within a reasoning."""
        ending, skip_special = _ending_of(body), body.skip_special_tokens is not False
        if not isinstance(body, ChatRequest):
            return cls(text.decoder(skip_special), ending)
        calls = splitter = None
        markers: list[str] = []  # that must be seen, even if they are special tokens
        if body.may_call:
            form = (body.format and body.format.call_format(text)) or text.call_format
            hidden = tuple(text.special_markers(form.markers)) if skip_special else ()
            calls = CallReader(form, body.functions, body.most_calls, hidden)
            markers += form.markers
        if (family := text.reasoning) is not None:
            hidden = tuple(text.special_markers(family.markers)) if skip_special else ()
            splitter = family.make_splitter(body.begins_inside(prompt, text), body.decides_to_call, hidden)
            markers += [*family.markers, *(family.calls if body.decides_to_call else ())]
        return cls(text.decoder(skip_special, markers), ending, calls, splitter, body.include_reasoning is not False)

    @classmethod
    def each(
        cls, body: ChatRequest | CompletionRequest, text: TextModel, requests: Sequence[Request]
    ) -> Iterator[AnswerReader]:
        """Yield the reader of each request of a body, and hold nothing of the body meanwhile."""
        if isinstance(body, ChatRequest):
            return iter([cls.from_body(body, text, request.prompt) for request in requests])
        ending, skip_special = _ending_of(body), body.skip_special_tokens is not False
        # Up to a thousand of them may wait: a reader is made for each when its turn comes.
        return (cls(text.decoder(skip_special), ending) for _ in range(len(requests)))

    def read(self, delivered: Delivered) -> AnswerPiece:
        if delivered.finish is FinishReason.ERROR:
            raise no_token()
        answer, num_used, finish, reasoning, num_reasoning = self._read(delivered.tokens, delivered.finish)
        return AnswerPiece(
            answer.text,
            delivered.tokens[:num_used],
            finish,
            delivered.logprobs[:num_used],
            delivered.opening.logprobs,
            delivered.opening.num_cached,
            answer.parts,
            self._stops.found or None,
            reasoning if self._shows_reasoning else "",
            num_reasoning,
        )

    def _read(self, tokens: tuple[int, ...], finish: FinishReason | None) -> _Found:
        """Read the tokens.

        With stop strings or a reasoning, or if the answer ends with a call, they are read one by one, so that the
        answer ends at the same token, and as many count as reasoning, however tokens are delivered together.
        """
        if self._ending.is_empty:
            return CallText(), 0, finish and FinishReason.LENGTH, "", 0
        if not self._reads_singly:
            return self._find_calls(self._decode(tokens, finish), bool(finish)), len(tokens), finish, "", 0
        answer, reasoning, num_reasoning = CallText(), "", 0
        for num_used, token in enumerate(tokens, 1):
            last = finish if num_used == len(tokens) else None
            split, num_new = self._split(self._decode((token,), last), last)
            reasoning, num_reasoning = reasoning + split.reasoning, num_reasoning + num_new
            self._num_tokens += 1
            text = split.text if self._num_tokens <= self._ending.min_tokens else self._stops.feed(split.text)
            ended = FinishReason.STOP if self._stops.found else last
            answer += self._find_calls(text + (self._stops.flush() if ended else ""), bool(ended))
            if ended or (self._calls is not None and self._calls.is_over):
                return answer, num_used, ended or FinishReason.STOP, reasoning, num_reasoning
        if finish:
            answer += self._find_calls(self._stops.flush(), True)
        return answer, len(tokens), finish, reasoning, num_reasoning

    def _find_calls(self, text: str, is_last: bool) -> CallText:
        if self._calls is None:
            return CallText(text)
        found = self._calls.feed(text)
        return found + self._calls.flush() if is_last else found

    def _split(self, text: str, finish: FinishReason | None) -> tuple[SplitText, int]:
        """Part a token's text; return it with how many tokens count as reasoning for it."""
        splitter = self._splitter
        if splitter is None:
            return SplitText(text=text), 0
        before, split = splitter.phase, splitter.feed(text)
        after = splitter.phase
        if finish:
            split += splitter.flush()
        if before is ReasoningPhase.REASONING:
            return split, 1
        self._num_open += before is ReasoningPhase.OPEN
        return split, self._num_open if before is ReasoningPhase.OPEN and after is ReasoningPhase.REASONING else 0

    def _decode(self, tokens: tuple[int, ...], finish: FinishReason | None) -> str:
        """Return the new text; a stop token becomes text only if the answer includes its stop."""
        hides_last = finish is FinishReason.STOP and not self._ending.include_stop
        text = self._decoder.feed(tokens[:-1] if hides_last else tokens)
        return text + self._decoder.flush() if finish else text
