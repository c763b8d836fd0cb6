"""Make the JSON of an answer: chat or text completion, whole or in chunks.

The choices of the first prompt come first. The usage counts what has been shaped so far.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from alignedserve.config.prices import Charged
from alignedserve.core import FinishReason, Logprob, Request
from alignedserve.gateway.openai.reading import AnswerPiece, cost_of, join_pieces
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest, FimRequest, StreamOptions
from alignedserve.gateway.openai.writing import encoded, encoded_runs
from alignedserve.text.calls.scanning import CallPart
from alignedserve.text.text_model import TextModel, TokenBytes

LEAST = -9999.0  # OpenAI's value for next to impossible, since JSON has no infinity

_Table: TypeAlias = "dict[str, Any] | None"  # log-probabilities: columns by name


@dataclass(frozen=True)
class TokenNames:
    """Names the tokens of log-probabilities by their text, or by their ids, since several may have the same text."""

    bytes_of: TokenBytes
    by_ids: bool

    def of(self, token: int) -> str:
        return self.shown(token)[0]

    def shown(self, token: int) -> tuple[str, list[int]]:
        """Return the token's name and its bytes."""
        shown = self.bytes_of.shown(token)
        return (f"token_id:{token}", shown[1]) if self.by_ids else shown


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[Logprob], names: TokenNames) -> Iterator[dict[str, Any]]:
    """Yield the log-probabilities of each token."""
    for token, logprob in zip(tokens, logprobs, strict=True):
        top = [_entry(other, value, names) for other, value in logprob.top]
        yield {**_entry(token, logprob.value, names), "top_logprobs": top}


def _entry(token: int, value: float, names: TokenNames) -> dict[str, Any]:
    name, its_bytes = names.shown(token)
    return {"token": name, "logprob": max(value, LEAST), "bytes": its_bytes}


class CompletionLogprobs:
    """Makes the tables of one answer, in order: a token's offset counts the characters of all tokens before it."""

    def __init__(self, names: TokenNames, special_ids: frozenset[int]) -> None:
        self._names, self._special_ids = names, special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def table(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, Iterator[Any]]:
        """Return the columns of these tokens; a token that nothing comes before has the log-probability None."""
        pairs = zip(tokens, logprobs, strict=True)
        return {
            "tokens": (self._names.of(token) for token in tokens),
            "token_logprobs": (logprob and max(logprob.value, LEAST) for logprob in logprobs),
            "top_logprobs": (logprob and self._likeliest(token, logprob) for token, logprob in pairs),
            "text_offset": (self._advance(token) for token in tokens),
        }

    def _likeliest(self, token: int, logprob: Logprob) -> dict[str, float]:
        """Return the likeliest tokens and the token itself; of tokens with the same text, the likeliest counts."""
        likeliest: dict[str, float] = {}
        for other, value in (*logprob.top, (token, logprob.value)):
            likeliest.setdefault(self._names.of(other), max(value, LEAST))
        return likeliest

    def _advance(self, token: int) -> int:
        """Return the token's offset and count its characters; a special token has none in the text."""
        offset = self._offset
        if token not in self._special_ids:
            self._offset += len(self._decoder.decode(self._names.bytes_of(token)))
        return offset


def make_shape(
    body: ChatRequest | CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel
) -> AnswerShape:
    if isinstance(body, ChatRequest):
        return ChatShape(body, requests, tier, text)
    kind = FimShape if isinstance(body, FimRequest) else CompletionShape
    return kind(body, requests, tier, text)


class AnswerShape(ABC):
    """Makes the JSON of one answer of its pieces, in order: what chat and text completions have in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, body: ChatRequest | CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel
    ) -> None:
        self.id = self.id_prefix + requests[0].id.removeprefix("req-")
        self.created = int(time.time())
        self.model = body.model
        self.tier = tier  # the tier that is used, not the tier that was asked for
        self.requests = requests
        self.num_per_prompt = body.n or 1
        self.options = body.stream_options or StreamOptions()
        self.with_ids = bool(body.return_token_ids)
        self.with_logprobs = requests[0].sampling.logprobs is not None
        self._tokens_asked = body.tokens_asked  # None: the output may fill the context
        self.text = text
        self._names = TokenNames(text.token_bytes, bool(body.return_tokens_as_token_ids))
        self.ignored = body.ignored + (body.unread_by(text) if isinstance(body, ChatRequest) else [])
        self._reasons = isinstance(body, ChatRequest) and text.reasoning is not None
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: self.num_per_prompt])
        self._output_tokens = self._cached_tokens = self._reasoning_tokens = 0
        self._charged: dict[int, Charged] = {}  # by choice
        self._begun: set[int] = set()  # choices that have had a chunk
        self._pieces: list[list[AnswerPiece]] = [[] for _ in requests]  # that were added
        self._tables: list[dict[str, Any] | None] = [None for _ in requests]  # their log-probabilities, as JSON

    def add(self, number: int, piece: AnswerPiece) -> Iterator[None]:
        """Count a piece of an answer that is not streamed, and keep it until `whole`; yield now and then meanwhile.

        Its log-probabilities are kept as they will be written. As objects those of a large answer would be a million,
        through which Python looks for cycles of garbage again and again while every thread waits."""
        self.count(number, piece)
        if self.with_logprobs:
            table = self._logprobs(number, piece, first=self._tables[number] is None)
            kept = self._tables[number] = self._tables[number] or {
                name: [] if isinstance(column, Iterator) else column for name, column in table.items()
            }
            for name, column in table.items():
                if isinstance(column, Iterator):
                    for run in encoded_runs(column):
                        kept[name].append(run)
                        yield
            piece = replace(piece, logprobs=(), prompt_logprobs=())
        self._pieces[number].append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the answer for a client that does not stream.

        Iterators stand for its choices and their log-probabilities: a choice is made when it is written, and its
        pieces are dropped then (writing.py)."""
        return {**self._head(self.whole_object), "choices": self._whole_choices(), "usage": self._usage}

    def _whole_choices(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self.requests)):
            piece, self._pieces[number] = join_pieces(self._pieces[number]), []
            table, self._tables[number] = self._tables[number], None
            yield self._whole_choice(number, piece, _with_columns(table, iter))

    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first piece."""
        yield from ()

    def chunk(self, number: int, piece: AnswerPiece) -> dict[str, Any] | None:
        """Return the chunk of a piece; None if it needs none: its text is held back, or was a special token's.

        Where the piece has the log-probabilities of the prompt, iterators stand for lists (writing.py)."""
        self.count(number, piece)
        first = number not in self._begun
        if not self._needs_chunk(piece, first):
            return None
        self._begun.add(number)
        columns = encoded if piece.prompt_logprobs else list  # a prompt may have any length
        table = _with_columns(self._logprobs(number, piece, first), columns) if self.with_logprobs else None
        return self._chunk(self._chunk_choice(number, piece, first, table))

    def chunk_like(self, number: int, piece: AnswerPiece) -> dict[str, Any] | None:
        """Return the chunk of a piece that has text or reasoning alone, after the choice's first piece; the ids of its
        tokens, if there are any, come before the text.

        Return None if the chunks of such pieces differ in more than their text and their ids."""
        if self.with_logprobs or self.options.continuous_usage_stats:
            return None
        return self._chunk(self._chunk_choice(number, piece, False, None))

    def usage_chunk(self, timing: Mapping[str, float]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": {**self._usage, **timing}}

    @abstractmethod
    def _whole_choice(self, number: int, piece: AnswerPiece, logprobs: _Table) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, number: int, piece: AnswerPiece, first: bool, logprobs: _Table) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, number: int, piece: AnswerPiece, first: bool) -> dict[str, Any]:
        """Return a piece's log-probabilities, as iterators; to be called once for each piece, in order."""

    def _needs_chunk(self, piece: AnswerPiece, first: bool) -> bool:
        return bool(piece.text or piece.finish or self.with_ids or self.with_logprobs)

    def count(self, number: int, piece: AnswerPiece) -> None:
        self._output_tokens += len(piece.tokens)
        self._reasoning_tokens += piece.num_reasoning
        self._charged[number] = piece.charged
        if number % self.num_per_prompt == 0:  # a prompt counts once, for any number of choices
            self._cached_tokens += piece.num_cached

    @property
    def _usage(self) -> dict[str, Any]:
        reasoning = {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}} if self._reasons else {}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            **reasoning,
            **cost_of(self._charged.values()),
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self.options.include_usage:
            chunk["usage"] = self._usage if self.options.continuous_usage_stats else None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "service_tier": self.tier}

    def _choice(self, number: int, piece: AnswerPiece, logprobs: _Table) -> dict[str, Any]:
        choice = {"index": number, "logprobs": logprobs, "finish_reason": self._finish(number, piece)}
        request, asked = self.requests[number], self._tokens_asked
        if piece.finish is FinishReason.LENGTH and (asked is None or asked > request.max_tokens):
            longest, prompt = request.most_tokens, len(request.prompt)
            message = f"this model's maximum context length is {longest} tokens: "
            choice["finish_message"] = message + f"the prompt has {prompt}, the output the rest"
        return {**choice, "token_ids": list(piece.tokens)} if self.with_ids else choice

    def _finish(self, number: int, piece: AnswerPiece) -> str | None:
        return piece.finish and piece.finish.value

    def _prompt_ids(self, number: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.requests[number].prompt)} if self.with_ids else {}


def _with_columns(table: _Table, make: Callable[[Any], Iterable[Any]]) -> _Table:
    """Return a table of log-probabilities with what `make` makes of each of its columns."""
    return table and {name: column and make(column) for name, column in table.items()}


class ChatShape(AnswerShape):
    """Makes chat completions; the prompt's ids stand beside the choices, as in vLLM."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, requests: Sequence[Request], tier: str, text: TextModel) -> None:
        super().__init__(body, requests, tier, text)
        self._calling: set[int] = set()  # choices that have called a tool
        self._is_legacy = body.is_legacy  # the client knows one call of a function, and no tools

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), **self._prompt_ids(0)}

    def openings(self) -> Iterator[dict[str, Any]]:
        ids: dict[str, Any] = {"token_ids": []} if self.with_ids else {}
        for number in range(len(self.requests)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": number, "logprobs": None, "finish_reason": None, **ids, "delta": delta}
            yield {**self._chunk(choice), **(self._prompt_ids(0) if number == 0 else {})}

    def _whole_choice(self, number: int, piece: AnswerPiece, logprobs: _Table) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None} | _reasoning(piece)
        if piece.calls:
            message |= self._calls(piece.calls, with_places=False)
        if piece.reasoning or piece.calls:
            message["content"] = piece.text or None
        return {**self._choice(number, piece, logprobs), "message": message}

    def _chunk_choice(self, number: int, piece: AnswerPiece, first: bool, logprobs: _Table) -> dict[str, Any]:
        delta: dict[str, Any] = _reasoning(piece) | ({"content": piece.text} if piece.text else {})
        if piece.calls:
            delta |= self._calls(piece.calls, with_places=True)
        return {**self._choice(number, piece, logprobs), "delta": delta}

    def _calls(self, parts: Sequence[CallPart], with_places: bool) -> dict[str, Any]:
        """Return the field of a message or a delta that has these calls; a delta says the place of each."""
        if self._is_legacy:
            return {"function_call": _call(parts[0])["function"]}
        return {"tool_calls": [{**({"index": part.index} if with_places else {}), **_call(part)} for part in parts]}

    def _needs_chunk(self, piece: AnswerPiece, first: bool) -> bool:
        return super()._needs_chunk(piece, first) or bool(piece.calls or piece.reasoning)

    def _finish(self, number: int, piece: AnswerPiece) -> str | None:
        """Return the finish; an answer that stops after calling tools finishes with their word."""
        if piece.calls:
            self._calling.add(number)
        calls = piece.finish is FinishReason.STOP and number in self._calling
        return ("function_call" if self._is_legacy else "tool_calls") if calls else super()._finish(number, piece)

    def _logprobs(self, number: int, piece: AnswerPiece, first: bool) -> dict[str, Any]:
        return {"content": chat_logprobs(piece.tokens, piece.logprobs, self._names), "refusal": None}


def _reasoning(piece: AnswerPiece) -> dict[str, str]:
    """Return the fields of a reasoning, for which there are two names."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def _call(part: CallPart) -> dict[str, Any]:
    if part.id is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


class CompletionShape(AnswerShape):
    """Makes text completions; the prompt's ids stand in the choice, as in vLLM, and its text too if it is echoed."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel) -> None:
        super().__init__(body, requests, tier, text)
        self._echo = bool(body.echo)
        self._columns = [CompletionLogprobs(self._names, text.special_ids) for _ in requests]

    def _whole_choice(self, number: int, piece: AnswerPiece, logprobs: _Table) -> dict[str, Any]:
        return self._chunk_choice(number, piece, True, logprobs)

    def _chunk_choice(self, number: int, piece: AnswerPiece, first: bool, logprobs: _Table) -> dict[str, Any]:
        echoed = self.text.decode(self.requests[number].prompt) if first and self._echo else ""
        ids = self._prompt_ids(number) if first else {}
        return {**self._choice(number, piece, logprobs), "text": echoed + piece.text, **ids}

    def _needs_chunk(self, piece: AnswerPiece, first: bool) -> bool:
        return super()._needs_chunk(piece, first) or (first and self._echo)

    def _logprobs(self, number: int, piece: AnswerPiece, first: bool) -> dict[str, Any]:
        tokens, logprobs = piece.tokens, list[Logprob | None](piece.logprobs)
        if first and self._echo:
            tokens, logprobs = (*self.requests[number].prompt, *tokens), [None, *piece.prompt_logprobs, *logprobs]
        return self._columns[number].table(tokens, logprobs)


class FimShape(CompletionShape):
    """Makes text completions in the form of chats, as Mistral's clients read them."""

    whole_object, chunk_object = ChatShape.whole_object, ChatShape.chunk_object

    def _whole_choice(self, number: int, piece: AnswerPiece, logprobs: _Table) -> dict[str, Any]:
        choice = super()._chunk_choice(number, piece, True, logprobs)
        message = {"role": "assistant", "content": choice.pop("text")}
        return {**choice, "message": message}

    def _chunk_choice(self, number: int, piece: AnswerPiece, first: bool, logprobs: _Table) -> dict[str, Any]:
        choice = super()._chunk_choice(number, piece, first, logprobs)
        delta = {**({"role": "assistant"} if first else {}), "content": choice.pop("text")}
        return {**choice, "delta": delta}
