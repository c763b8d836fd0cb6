"""The body that creates a response: OpenAI's fields, and our own for sampling and promises.

A field is honoured, or refused by name, or named as ignored in a header of the answer, as in chats. What clients send
by default is never refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED
from alignedserve.gateway.openai.formats import Schema
from alignedserve.gateway.openai.strict import Ignored, ListOf, Ruled, Strict, TextOr, Usual, fault, type_of
from alignedserve.gateway.openai.tools import MOST_TOOLS, Name, Typed
from alignedserve.gateway.openai.types import MOST_LOGPROBS, MOST_MESSAGES, SampledRequest
from alignedserve.gateway.responses.items import InputItem

_LOGPROBS = "message.output_text.logprobs"
_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512  # of metadata: pairs, characters of a key, of a value


class FunctionTool(Typed, Ruled):
    NO_OTHERS = "are supported: this server runs no tools of its own"

    name: Name | None = None
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: ListOf[Literal["direct"]] | None = None
    output_schema: Any = None

    def faults(self) -> Iterator[PydanticCustomError]:
        if self.name is None:
            yield fault("name", "is missing", "missing")

    @property
    def chat_tree(self) -> dict[str, Any]:
        fields = ("name", "description", "parameters", "strict")
        return {"type": "function", "function": self.model_dump(include=set(fields), exclude_none=True)}

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as a response shows it."""
        shown = {"type": "function", "name": self.name, "description": self.description}
        return {**shown, "parameters": self.parameters, "strict": bool(self.strict)}


class NamedResponseTool(Strict):
    type: Literal["function"]
    name: Name


class AllowedResponseTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[NamedResponseTool] = Field(min_length=1, max_length=MOST_TOOLS)


def _kind_of_choice(choice: Any) -> Any:
    kind = type_of(choice)
    return "auto" if kind is None else kind


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("auto")]
    | Annotated[NamedResponseTool, Tag("function")]
    | Annotated[AllowedResponseTools, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]


class TextFormat(Ruled):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    wanted: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        for field, value in (("name", self.name), ("schema", self.wanted)):
            if (self.type == "json_schema") != (value is not None):
                yield fault(field, "must be there if type is json_schema, and only then")

    @property
    def shown(self) -> dict[str, Any]:
        """The format as a response shows it."""
        if self.type != "json_schema":
            return {"type": self.type}
        tree = self.model_dump(by_alias=True, exclude_none=True)
        return {**tree, "strict": bool(self.strict)}

    @property
    def chat_tree(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.type, "json_schema": schema}


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None


class ReasoningOptions(Strict):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name
    context: Any = None
    mode: Any = None

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary) is not None


class ResponseStreamOptions(Strict):
    UNSUPPORTED: ClassVar[Usual] = {"include_obfuscation": (False,)}
    WHERE = "stream_options."


class BackgroundOptions(Strict):
    completion_window: Literal["soonest", "2h", "8h"] = "soonest"


class ResponseRequest(SampledRequest):
    UNSUPPORTED: ClassVar[Usual] = {
        "access_programs": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    }

    input: TextOr[Annotated[ListOf[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)  # of tools that run on the server: there are none
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    include: ListOf[str] | None = Field(None, max_length=32)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: ListOf[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=_MOST_PAIRS)
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    # Our own, as in chats
    chat_template_kwargs: dict[str, Any] | None = None
    max_reasoning_tokens: int | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        for key, value in (self.metadata or {}).items():
            if len(key) > _MOST_KEY or len(value) > _MOST_VALUE:
                yield fault("metadata", f"a key may have {_MOST_KEY} characters, a value {_MOST_VALUE}")
        if self.background and self.store is False:
            yield fault("store", "must not be false if background is true: the response is fetched from the store")
        if self.background and self.stream:
            yield fault("stream", "a response in the background is not streamed: fetch it", UNSUPPORTED)

    @property
    def shows_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing; a header names them to the client."""
        included = [name for name in self.include or () if name == "reasoning.encrypted_content"]
        options = self.reasoning or ReasoningOptions()
        reasoning = [f"reasoning.{name}" for name in ("context", "mode") if getattr(options, name) is not None]
        return [*super().ignored, *(f"include.{name}" for name in included), *reasoning]
