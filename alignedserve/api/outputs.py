"""What a caller chooses of a request, and the outputs of a prompt. Names are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True)
class SamplingParams:
    """How an output is sampled; None leaves a value to the server, as a field that a body does not have."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = 16  # as in vLLM; None: as many as the context holds
    min_tokens: int | None = None
    logprobs: int | None = None  # of each token, and of this number of the likeliest ones
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None  # json, regex, choice or grammar, as in a body

    def body(self) -> dict[str, Any]:
        """Return the fields of a request's body, for text completions."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        body = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return body


@dataclass(frozen=True)
class Slo:
    """Deadlines of a request in milliseconds; None leaves them to the server."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    jct_ms: float | None = None
    strict: bool | None = None  # whether a prompt that alone takes longer than ttft_ms is refused

    def body(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
