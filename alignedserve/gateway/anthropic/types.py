"""The body that asks for a message: Anthropic's fields.

A field is honoured, or refused by name, or named as ignored in a header of the answer, as in chats. `cache_control` is
taken everywhere and changes nothing: the beginnings of prompts are cached anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED
from alignedserve.gateway.openai.formats import Schema
from alignedserve.gateway.openai.strict import ListOf, SentBack, Strict, without_unsupported
from alignedserve.gateway.openai.tools import MOST_TOOLS, Name
from alignedserve.gateway.openai.types import MOST_MESSAGES

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
}


class TextBlock(SentBack):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(SentBack):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(SentBack):
    """Thinking of another server, which only that server can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(SentBack):
    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


def kind_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


def _kind_of_content(content: Any) -> str:
    return "blocks" if isinstance(content, list) else "text"


Texts: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[ListOf[TextBlock], Tag("blocks")], Discriminator(_kind_of_content)
]


class ToolResultBlock(SentBack):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None


Block: TypeAlias = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(kind_of),
]
_Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[ListOf[_AnyBlock], Tag("blocks")], Discriminator(_kind_of_content)
]
_KINDS = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class MessageParam(Strict):
    role: Literal["user", "assistant", "system"]
    content: _Content

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _check_kinds(self) -> MessageParam:
        for block in self.blocks:
            if block.type not in _KINDS[self.role]:
                message = f"a message of the role {self.role} has no block of the type {block.type}"
                raise PydanticCustomError("no_such_block", message, {"field": "content"})
        return self


class ToolParam(Strict):
    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None
    defer_loading: Literal[False] | None = None
    input_examples: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Refuse tools that the server itself would know before their fields are looked at."""
        if isinstance(given, dict) and given.get("type") not in (None, "custom"):
            message = "only tools of the type custom are supported: this server has no tools of its own"
            raise PydanticCustomError(UNSUPPORTED, message, {"field": "type"})
        return given


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            message = "must be there if type is tool, and only then"
            raise PydanticCustomError("name", message, {"field": "name"})
        return self


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    display: Any = None

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"

    @property
    def is_shown(self) -> bool:
        return self.is_on and self.display != "omitted"


class OutputFormat(Strict):
    type: Literal["json_schema"]
    wanted: Schema = Field(alias="schema")


class OutputConfig(Strict):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """The fields of a body that make its prompt."""

    model: str
    messages: ListOf[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Texts | None = None
    tools: ListOf[ToolParam] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    cache_control: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return without_unsupported(given, _UNSUPPORTED)


class MessageRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0, lt=2**63)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Any = None
