"""A caller chooses sampling and deadlines of a request here; names are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


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
