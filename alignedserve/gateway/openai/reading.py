"""Turn the delivered tokens of a request into pieces of its answer. Nothing here waits or knows of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from alignedserve.config.prices import NOTHING_CHARGED, Charged, price_field
from alignedserve.core import NOTHING_SPENT, FinishReason, Logprob, Request, Spent
from alignedserve.gateway.openai.errors import no_token
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import Delivered
from alignedserve.text.calls.scanning import CallPart, CallReader, join_parts
from alignedserve.text.decoding import StopStrings
from alignedserve.text.reasoning.splitting import ReasoningPhase, Splitter
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


# The fields of a text completion that rule how its answers are read.
_OF_READING = ("stop", "include_stop_str_in_output", "min_tokens", "max_tokens", "skip_special_tokens")


class AnswerReader:
    """Reads the deliveries of one request, in order, up to the piece that has a finish.

    A stop string is such a finish: the engine itself would continue the output. Only the answer is searched for stop
    strings and calls, not the reasoning before it."""

    def __init__(self, body: ChatRequest | CompletionRequest, text: TextModel, prompt: Sequence[int] = ()) -> None:
        """`prompt` shows whether the output begins within a reasoning. The reader holds nothing of the body."""
        self._calls: CallReader | None = None
        self._is_all_calls = False  # whether calls are demanded, and nothing else
        self._splitter: Splitter | None = None
        self._includes_stop, self._shows_reasoning = bool(body.include_stop_str_in_output), True
        skip_special = body.skip_special_tokens is not False
        markers: list[str] = []  # that must be seen, even if they are special tokens
        if isinstance(body, ChatRequest):
            self._shows_reasoning = body.include_reasoning is not False
            if body.may_call:
                form = (body.format and body.format.call_format(text)) or text.call_format.without_marker
                hidden = tuple(text.special_markers(form.markers)) if skip_special else ()
                self._calls = CallReader(form, body.schemas, body.most_calls, hidden)
                self._is_all_calls = body.demanded_calls is not None
                markers += form.markers
            if (family := text.reasoning) is not None:
                hidden = tuple(text.special_markers(family.markers)) if skip_special else ()
                inside = body.begins_inside(prompt, text)
                self._splitter = family.make_splitter(inside, body.decides_to_call, hidden)
                markers += [*family.markers, *(family.calls if body.decides_to_call else ())]
        self._decoder = text.decoder(skip_special, markers)
        self._stops = StopStrings(tuple(body.stop or ()), self._includes_stop)
        self._min_tokens = body.min_tokens or 0  # before this number of tokens no stop string counts
        self._is_empty = body.most_tokens == 0  # whether the answer shows the prompt only
        self._reads_singly = bool(body.stop) or self._splitter is not None or self._calls is not None
        self._num_tokens = 0
        self._num_open = 0  # tokens that may be the beginning of a reasoning

    @classmethod
    def each(
        cls, body: ChatRequest | CompletionRequest, text: TextModel, requests: Sequence[Request]
    ) -> Iterator[AnswerReader]:
        """Yield the reader of each request of a body, and hold nothing of the body meanwhile."""
        if isinstance(body, ChatRequest):
            return iter([cls(body, text, request.prompt) for request in requests])
        # Up to a thousand of them may wait: a reader is made for each when its turn comes.
        rules = CompletionRequest.model_construct(**{name: getattr(body, name) for name in _OF_READING})
        return (cls(rules, text) for _ in range(len(requests)))

    def read(self, delivered: Delivered) -> AnswerPiece:
        if delivered.finish is FinishReason.ERROR:
            raise no_token()
        tokens, finish, opening = delivered.tokens, delivered.finish, delivered.opening
        piece = AnswerPiece("", tokens, finish, delivered.logprobs, opening.logprobs, opening.num_cached)
        if self._is_empty:
            piece.tokens, piece.logprobs, piece.finish = (), (), finish and FinishReason.LENGTH
        elif self._reads_singly:
            self._read_singly(piece)
        else:
            self._add(piece, self._decode(tokens, finish), bool(finish))
        return piece

    def _read_singly(self, piece: AnswerPiece) -> None:
        """Read the tokens of a piece one by one, and leave it those up to the end of the answer.

        So the answer ends at the same token, and as many count as reasoning, however tokens are delivered together."""
        tokens, finish, stops = piece.tokens, piece.finish, self._stops
        for num_used, token in enumerate(tokens, 1):
            last = finish if num_used == len(tokens) else None
            text = self._part(piece, self._decode((token,), last), last)
            self._num_tokens += 1
            if self._num_tokens > self._min_tokens:
                text = stops.feed(text)
            ended = FinishReason.STOP if stops.found else last
            self._add(piece, text + (stops.flush() if ended else ""), bool(ended))
            if ended or (self._calls is not None and self._calls.is_over):
                piece.tokens, piece.logprobs = tokens[:num_used], piece.logprobs[:num_used]
                piece.finish, piece.stop = ended or FinishReason.STOP, stops.found or None
                return
        if finish:
            self._add(piece, stops.flush(), True)

    def _add(self, piece: AnswerPiece, text: str, is_last: bool) -> None:
        """Add a text of the answer to the piece, and the calls in it."""
        if self._calls is None:
            piece.text += text
            return
        for found in [self._calls.feed(text), *([self._calls.flush()] if is_last else [])]:
            if not self._is_all_calls:  # text is then the beginning of a call that the limit of tokens has cut off
                piece.text += found.text
            if found.parts:
                piece.calls = join_parts((*piece.calls, *found.parts))

    def _part(self, piece: AnswerPiece, text: str, finish: FinishReason | None) -> str:
        """Part a token's text: add its reasoning to the piece, with how many tokens count for it; return the rest."""
        if (splitter := self._splitter) is None:
            return text
        before, (reasoning, rest) = splitter.phase, splitter.feed(text)
        after = splitter.phase
        if finish:
            held = splitter.flush()
            reasoning, rest = reasoning + held.reasoning, rest + held.text
        if self._shows_reasoning:
            piece.reasoning += reasoning
        if before is ReasoningPhase.REASONING:
            piece.num_reasoning += 1
        elif before is ReasoningPhase.OPEN:
            self._num_open += 1
            piece.num_reasoning += self._num_open if after is ReasoningPhase.REASONING else 0
        return rest

    def _decode(self, tokens: tuple[int, ...], finish: FinishReason | None) -> str:
        """Return the new text; a stop token becomes text only if the answer includes its stop."""
        hides_last = finish is FinishReason.STOP and not self._includes_stop
        text = self._decoder.feed(tokens[:-1] if hides_last else tokens)
        return text + self._decoder.flush() if finish else text
