"""What clients may send: OpenAI's fields, and vLLM's beside them.

A field is either honoured, or refused by name; none is ignored in silence. Three have no effect on an
answer and are taken as they are: `user`, `metadata`, and any field below set to its default. Deadlines, tiers and
priorities decide who runs first (docs/deadlines.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from alignedserve.gateway.errors import UNSUPPORTED, from_validation, invalid

_INT64 = 2**63

# Known, but not supported yet: field -> the values beside null that ask for nothing special.
_UNSUPPORTED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "ec_transfer_params": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
_UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_ANYWHERE,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "return_prompt_text": (False,),
    "safety_identifier": (),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_ANYWHERE,
    "add_special_tokens": (True,),
    "logprobs": (),
    "prompt_embeds": (),
    "suffix": ("",),
}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_UNSUPPORTED_IN_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def _without_unsupported(given: Any, unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> Any:
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if name in unsupported and value is not None and not any(_same(value, usual) for usual in unsupported[name]):
            message = f"{where}{name} is not supported yet: leave it out"
            raise PydanticCustomError(UNSUPPORTED, message, {"field": name})
    return {name: value for name, value in given.items() if name not in unsupported}


def _same(value: Any, usual: Any) -> bool:
    """1.0 is 1, but true is not."""
    return isinstance(value, bool) == isinstance(usual, bool) and bool(value == usual)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


def _kind_of_content(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_kind_of_content)
]


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return _without_unsupported(given, _UNSUPPORTED_IN_MESSAGES, "in a message, ")

    @property
    def text(self) -> str:
        """The parts of a content one below the other, as vLLM has them."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class StreamOptions(_Strict):
    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return _without_unsupported(given, _UNSUPPORTED_IN_STREAM_OPTIONS, "stream_options.")


class SloFields(_Strict):
    """Deadlines of this request, in milliseconds."""

    MOST_MS: ClassVar[float] = 30 * 86_400_000.0

    ttft_ms: float | None = Field(None, gt=0, le=MOST_MS)
    tbt_ms: float | None = Field(None, gt=0, le=MOST_MS)
    jct_ms: float | None = Field(None, gt=0, le=MOST_MS)


class _AnyRequest(_Strict):
    """What chat and text completions have in common. None is as if it were not there."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    slo: SloFields | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64)
    user: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise PydanticCustomError(UNSUPPORTED, "n: only 1 choice is supported yet")
        return n

    @model_validator(mode="after")
    def _streamed_if_so_optioned(self) -> _AnyRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("needs_stream", "only where stream is true", {"field": "stream_options"})
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def most_tokens_field(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def usual_tokens(self) -> int | None:
        """Most output where the client names no limit; None is all that is left."""
        return None

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_AnyRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return _without_unsupported(given, _UNSUPPORTED_IN_CHAT)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        named = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(named) > 1:
            raise PydanticCustomError("two_limits", "max_completion_tokens says otherwise", {"field": "max_tokens"})
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def most_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def role_messages(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.text} for message in self.messages]


def _kind_of_prompt(prompt: Any) -> str:
    return "ids" if isinstance(prompt, list) else "text"


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Annotated[int, Field(ge=0)]], Tag("ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(_AnyRequest):
    prompt: Prompt

    @property
    def usual_tokens(self) -> int | None:
        return 16  # OpenAI's and vLLM's: what a text goes on with has no natural end

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return _without_unsupported(given, _UNSUPPORTED_IN_COMPLETIONS)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """A list of one prompt is that prompt."""
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
            return prompt
        if len(prompt) > 1:
            raise PydanticCustomError(UNSUPPORTED, "prompt: only one prompt in a request is supported yet")
        return prompt[0]


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parsed(kind: type[Body], body: bytes) -> Body:
    """The request in a body, or an ApiError that names what is wrong with it."""
    try:
        given = from_json(body.decode("utf-8"), allow_inf_nan=False)
    except UnicodeDecodeError as error:
        raise invalid("the body is not UTF-8", code="invalid_json") from error
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise from_validation(error, given) from error
