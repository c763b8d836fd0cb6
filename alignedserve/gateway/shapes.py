"""The JSON of an answer: chat or text completion, whole or in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from alignedserve.core import Logprob, Request
from alignedserve.gateway.generation import Piece
from alignedserve.gateway.logprob_shapes import CompletionLogprobs, chat_logprobs
from alignedserve.gateway.openai_types import ChatRequest, CompletionRequest
from alignedserve.gateway.text import TextModel


def shape_of(body: ChatRequest | CompletionRequest, request: Request, tier: str, text: TextModel) -> Shape:
    if isinstance(body, ChatRequest):
        return ChatShape(body, request, tier, text)
    return CompletionShape(body, request, tier, text, echo=bool(body.echo))


class Shape(ABC):
    """What chat and text completions have in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: ChatRequest | CompletionRequest, request: Request, tier: str, text: TextModel) -> None:
        self.id = self.id_prefix + request.id.removeprefix("req-")
        self.created = int(time.time())
        self.model = body.model
        self.tier = tier  # that is used, whatever was asked for
        self.prompt = request.prompt
        self.with_usage = body.with_usage
        self.with_ids = bool(body.return_token_ids)
        self.with_logprobs = request.sampling.logprobs is not None
        self.text = text

    @abstractmethod
    def whole(self, piece: Piece) -> dict[str, Any]:
        """The answer to a client that does not stream: all of it in one piece."""

    @abstractmethod
    def logprobs(self, piece: Piece, first: bool) -> dict[str, Any]:
        """Of a piece; asked for in the order of the pieces."""

    def worth_a_chunk(self, piece: Piece, first: bool) -> bool:
        """A piece whose text is held back, or was a special token's, says nothing by itself."""
        return bool(piece.text or piece.finish or self.with_ids or self.with_logprobs)

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first piece."""

    @abstractmethod
    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        """The chunk of a piece."""

    def usage_chunk(self, output_tokens: int, num_cached: int) -> dict[str, Any]:
        usage = self._usage(output_tokens, num_cached)
        return {**self._head(self.chunk_object), "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.with_usage else {}
        return {**self._head(self.chunk_object), "choices": [choice], **usage}

    def _whole(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        usage = self._usage(len(piece.tokens), piece.num_cached)
        return {**self._head(self.whole_object), "choices": [choice], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "service_tier": self.tier}

    def _usage(self, output_tokens: int, num_cached: int) -> dict[str, Any]:
        prompt_tokens = len(self.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        ids = {"token_ids": list(piece.tokens)} if self.with_ids else {}
        logprobs = self.logprobs(piece, first) if self.with_logprobs else None
        return {"index": 0, "logprobs": logprobs, "finish_reason": piece.finish and piece.finish.value, **ids}

    @property
    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.prompt)} if self.with_ids else {}


class ChatShape(Shape):
    """The prompt's ids beside the choices, as vLLM has them here."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        whole = self._whole({**self._choice(piece, first=True), "message": message}, piece)
        return {**whole, **self._prompt_ids}

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        ids: dict[str, Any] = {"token_ids": []} if self.with_ids else {}
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **ids, "delta": delta}
        return {**self._chunk(choice), **self._prompt_ids}

    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk({**self._choice(piece, first), "delta": delta})

    def logprobs(self, piece: Piece, first: bool) -> dict[str, Any]:
        return chat_logprobs(piece.tokens, piece.logprobs, self.text.token_bytes)


class CompletionShape(Shape):
    """The prompt's ids within the choice, as vLLM has them here; its text before the answer's where it is echoed."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, request: Request, tier: str, text: TextModel, *, echo: bool) -> None:
        super().__init__(body, request, tier, text)
        self._echo = echo
        self._logprobs = CompletionLogprobs(text.token_bytes, text.special_ids)

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self._whole(self._text_choice(piece, first=True), piece)

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        return self._chunk(self._text_choice(piece, first))

    def worth_a_chunk(self, piece: Piece, first: bool) -> bool:
        return super().worth_a_chunk(piece, first) or (first and self._echo)

    def logprobs(self, piece: Piece, first: bool) -> dict[str, Any]:
        tokens, logprobs = piece.tokens, list[Logprob | None](piece.logprobs)
        if first and self._echo:
            tokens, logprobs = (*self.prompt, *tokens), [None, *piece.prompt_logprobs, *logprobs]
        return self._logprobs.table(tokens, logprobs)

    def _text_choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        echoed = self.text.decode(self.prompt) if first and self._echo else ""
        ids = self._prompt_ids if first else {}
        return {**self._choice(piece, first), "text": echoed + piece.text, **ids}
