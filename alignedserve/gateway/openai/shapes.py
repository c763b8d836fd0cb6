"""The JSON of an answer: chat or text completion, whole or in chunks.

Of an answer's choices, those of the first prompt come first. What was streamed so far is counted as it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.core import FinishReason, Logprob, Request
from alignedserve.gateway.openai.logprob_shapes import CompletionLogprobs, chat_logprobs
from alignedserve.gateway.openai.reading import Piece, Reader
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import Delivered
from alignedserve.text.calls import CallPart
from alignedserve.text.text_model import TextModel


def answer_of(
    body: ChatRequest | CompletionRequest,
    requests: Sequence[Request],
    tier: str,
    text: TextModel,
    delivered: Sequence[Delivered],
) -> dict[str, Any]:
    """The whole answer, of all that was delivered of each request: for those who have no client that waits."""
    return shape_of(body, requests, tier, text).whole([Reader.of(body, text).read(one) for one in delivered])


def shape_of(body: ChatRequest | CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel) -> Shape:
    if isinstance(body, ChatRequest):
        return ChatShape(body, requests, tier, text)
    return CompletionShape(body, requests, tier, text, echo=bool(body.echo))


@dataclass
class _Counts:
    """Of an answer: its usage."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(ABC):
    """What chat and text completions have in common. Of one answer: pieces are told in their order."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, body: ChatRequest | CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel
    ) -> None:
        self.id = self.id_prefix + requests[0].id.removeprefix("req-")
        self.created = int(time.time())
        self.model = body.model
        self.tier = tier  # that is used, whatever was asked for
        self.requests = requests
        self.num_per_prompt = body.n or 1
        self.with_usage = body.with_usage
        self.usage_goes_on = body.usage_goes_on
        self.with_ids = bool(body.return_token_ids)
        self.with_logprobs = requests[0].sampling.logprobs is not None
        self._may_fill = body.most_tokens is None and body.usual_tokens is None  # all that fits
        self.text = text
        self.headers = {"x-ignored-fields": ", ".join(body.ignored)} if body.ignored else {}
        self._counts = _Counts(sum(len(request.prompt) for request in requests[:: self.num_per_prompt]))
        self._begun: set[int] = set()  # choices that have had a chunk

    @property
    def prompt_tokens(self) -> int:
        return self._counts.prompt_tokens

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a client that does not stream: one piece for each of the requests."""
        for number, piece in enumerate(pieces):
            self.count(number, piece)
        choices = [self._whole_choice(number, piece) for number, piece in enumerate(pieces)]
        return {**self._head(self.whole_object), "choices": choices, "usage": self._counts.usage}

    @abstractmethod
    def openings(self) -> Iterator[dict[str, Any]]:
        """The chunks before the first piece."""

    def chunk(self, number: int, piece: Piece) -> dict[str, Any] | None:
        """Of a piece; none where it says nothing by itself: its text is held back, or was a special token's."""
        self.count(number, piece)
        first = number not in self._begun
        if not self._worth_a_chunk(piece, first):
            return None
        self._begun.add(number)
        return self._chunk(self._chunk_choice(number, piece, first))

    def chunk_of_text(self, number: int, text: str) -> dict[str, Any] | None:
        """Of a piece that is text alone, after the choice's first; none where chunks differ in more than their text."""
        if self.with_ids or self.with_logprobs or self.usage_goes_on:
            return None
        return self._chunk(self._chunk_choice(number, Piece(text, (), None), first=False))

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": self._counts.usage}

    @abstractmethod
    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, number: int, piece: Piece, first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        """Of a piece; asked for in the order of the pieces."""

    def _worth_a_chunk(self, piece: Piece, first: bool) -> bool:
        return bool(piece.text or piece.finish or self.with_ids or self.with_logprobs)

    def count(self, number: int, piece: Piece) -> None:
        self._counts.output_tokens += len(piece.tokens)
        if number % self.num_per_prompt == 0:  # a prompt counts once, however many choices it has
            self._counts.cached_tokens += piece.num_cached

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": self._counts.usage if self.usage_goes_on else None} if self.with_usage else {}
        return {**self._head(self.chunk_object), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "service_tier": self.tier}

    def _choice(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        ids = {"token_ids": list(piece.tokens)} if self.with_ids else {}
        logprobs = self._logprobs(number, piece, first) if self.with_logprobs else None
        finish = {"finish_reason": self._finish(number, piece), **self._outgrown(number, piece)}
        return {"index": number, "logprobs": logprobs, **finish, **ids}

    def _outgrown(self, number: int, piece: Piece) -> dict[str, str]:
        """Why an output ended whose client has set it no limit."""
        if piece.finish is not FinishReason.LENGTH or not self._may_fill:
            return {}
        request = self.requests[number]
        longest, prompt = request.most_tokens, len(request.prompt)
        said = f"this model's maximum context length is {longest} tokens: the prompt has {prompt}, the output the rest"
        return {"finish_message": said}

    def _finish(self, number: int, piece: Piece) -> str | None:
        return piece.finish and piece.finish.value

    def _prompt_ids(self, number: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.requests[number].prompt)} if self.with_ids else {}


class ChatShape(Shape):
    """The prompt's ids beside the choices, as vLLM has them here."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, requests: Sequence[Request], tier: str, text: TextModel) -> None:
        super().__init__(body, requests, tier, text)
        self._calling: set[int] = set()  # choices that have called a tool

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {**super().whole(pieces), **self._prompt_ids(0)}

    def openings(self) -> Iterator[dict[str, Any]]:
        ids: dict[str, Any] = {"token_ids": []} if self.with_ids else {}
        for number in range(len(self.requests)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": number, "logprobs": None, "finish_reason": None, **ids, "delta": delta}
            yield {**self._chunk(choice), **(self._prompt_ids(0) if number == 0 else {})}

    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [_call(part) for part in piece.calls]}
        return {**self._choice(number, piece, first=True), "message": message}

    def _chunk_choice(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in piece.calls]
        return {**self._choice(number, piece, first), "delta": delta}

    def _worth_a_chunk(self, piece: Piece, first: bool) -> bool:
        return super()._worth_a_chunk(piece, first) or bool(piece.calls)

    def _finish(self, number: int, piece: Piece) -> str | None:
        """Of an answer that calls tools, that it does."""
        if piece.calls:
            self._calling.add(number)
        calls = piece.finish is FinishReason.STOP and number in self._calling
        return "tool_calls" if calls else super()._finish(number, piece)

    def _logprobs(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        return chat_logprobs(piece.tokens, piece.logprobs, self.text.token_bytes)


def _call(part: CallPart) -> dict[str, Any]:
    if part.id is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


class CompletionShape(Shape):
    """The prompt's ids within the choice, as vLLM has them here; its text before the answer's where it is echoed."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionRequest, requests: Sequence[Request], tier: str, text: TextModel, *, echo: bool
    ) -> None:
        super().__init__(body, requests, tier, text)
        self._echo = echo
        self._tables = [CompletionLogprobs(text.token_bytes, text.special_ids) for _ in requests]

    def openings(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def _whole_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        return self._chunk_choice(number, piece, first=True)

    def _chunk_choice(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        echoed = self.text.decode(self.requests[number].prompt) if first and self._echo else ""
        ids = self._prompt_ids(number) if first else {}
        return {**self._choice(number, piece, first), "text": echoed + piece.text, **ids}

    def _worth_a_chunk(self, piece: Piece, first: bool) -> bool:
        return super()._worth_a_chunk(piece, first) or (first and self._echo)

    def _logprobs(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        tokens, logprobs = piece.tokens, list[Logprob | None](piece.logprobs)
        if first and self._echo:
            tokens, logprobs = (*self.requests[number].prompt, *tokens), [None, *piece.prompt_logprobs, *logprobs]
        return self._tables[number].table(tokens, logprobs)
