"""The JSON of an answer: chat or text completion, whole or in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.generation import Piece
from alignedserve.gateway.openai_types import ChatRequest, CompletionRequest


def shape_of(body: ChatRequest | CompletionRequest, request: Request, tier: str) -> Shape:
    kind = ChatShape if isinstance(body, ChatRequest) else CompletionShape
    return kind(body, request, tier)


class Shape(ABC):
    """What chat and text completions have in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: ChatRequest | CompletionRequest, request: Request, tier: str) -> None:
        self.id = self.id_prefix + request.id.removeprefix("req-")
        self.created = int(time.time())
        self.model = body.model
        self.tier = tier  # that is used, whatever was asked for
        self.prompt = request.prompt
        self.with_usage = body.with_usage
        self.with_ids = bool(body.return_token_ids)

    @abstractmethod
    def whole(self, text: str, tokens: list[int], finish: FinishReason) -> dict[str, Any]:
        """The answer to a client that does not stream."""

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first piece."""

    @abstractmethod
    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        """The chunk of a piece."""

    def usage_chunk(self, output_tokens: int) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": self._usage(output_tokens)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.with_usage else {}
        return {**self._head(self.chunk_object), "choices": [choice], **usage}

    def _whole(self, choice: dict[str, Any], output_tokens: int) -> dict[str, Any]:
        return {**self._head(self.whole_object), "choices": [choice], "usage": self._usage(output_tokens)}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "service_tier": self.tier}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }

    def _choice(self, finish: FinishReason | None, tokens: tuple[int, ...] | list[int]) -> dict[str, Any]:
        ids = {"token_ids": list(tokens)} if self.with_ids else {}
        return {"index": 0, "logprobs": None, "finish_reason": finish and finish.value, **ids}

    @property
    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.prompt)} if self.with_ids else {}


class ChatShape(Shape):
    """The prompt's ids beside the choices, as vLLM has them here."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, tokens: list[int], finish: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        whole = self._whole({**self._choice(finish, tokens), "message": message}, len(tokens))
        return {**whole, **self._prompt_ids}

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {**self._chunk({**self._choice(None, ()), "delta": delta}), **self._prompt_ids}

    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk({**self._choice(piece.finish, piece.tokens), "delta": delta})


class CompletionShape(Shape):
    """The prompt's ids within the choice, as vLLM has them here."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str, tokens: list[int], finish: FinishReason) -> dict[str, Any]:
        choice = {**self._choice(finish, tokens), "text": text, **self._prompt_ids}
        return self._whole(choice, len(tokens))

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, piece: Piece, first: bool) -> dict[str, Any]:
        ids = self._prompt_ids if first else {}
        return self._chunk({**self._choice(piece.finish, piece.tokens), "text": piece.text, **ids})
