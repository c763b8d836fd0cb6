"""The outputs of a prompt, whole or in pieces; names are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    """An output of a prompt; `n` asks for several."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # stop, length, or tool_calls
    logprobs: list[dict[int, Logprob]] | None = None  # for each token, itself and the likeliest
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None  # of a chat, where the model reasons before its answer

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(of[token].logprob for token, of in zip(self.token_ids, self.logprobs, strict=True))

    @classmethod
    def from_choice(cls, choice: Mapping[str, Any], index: int) -> CompletionOutput:
        message = choice.get("message", {})
        text = message.get("content") or "" if message else choice["text"]
        tokens, found = choice["token_ids"], choice["logprobs"]
        return cls(
            index,
            text,
            tokens,
            choice["finish_reason"],
            None if found is None else _logprobs(found),
            message.get("tool_calls"),
            message.get("reasoning"),
        )


@dataclass(frozen=True)
class RequestOutput:
    """All outputs of one prompt."""

    request_id: str
    prompt: str | None  # None where it was given as token ids or as messages
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int

    @property
    def finished(self) -> bool:
        return True

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], prompt: str | None) -> RequestOutput:
        """Return the outputs of a whole answer of the server, of one prompt."""
        choices = answer["choices"]
        ids = answer.get("prompt_token_ids") or choices[0]["prompt_token_ids"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        outputs = [CompletionOutput.from_choice(choice, index) for index, choice in enumerate(choices)]
        return cls(answer["id"], prompt, ids, outputs, cached)


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed output."""

    index: int  # of the output
    text: str
    token_ids: list[int]
    finish_reason: str | None
    reasoning: str = ""  # of a chat

    @classmethod
    def from_choice(cls, choice: Mapping[str, Any]) -> Piece:
        delta = choice.get("delta", {})
        text = delta.get("content") or "" if "delta" in choice else choice["text"]
        return cls(choice["index"], text, choice["token_ids"], choice["finish_reason"], delta.get("reasoning") or "")


def _logprobs(found: Mapping[str, Any]) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of a chat's or a text's answer, with tokens written as ids."""
    if "content" in found:
        tables = [{each["token"]: each["logprob"] for each in [*of["top_logprobs"], of]} for of in found["content"]]
    else:
        tables = found["top_logprobs"]
    return [{int(name.removeprefix("token_id:")): Logprob(value) for name, value in table.items()} for table in tables]
