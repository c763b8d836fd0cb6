"""The body that creates a response, with OpenAI's fields and our own, and the chat that it becomes.

A field is honoured, or refused by name, or named as ignored in a header of the answer, as in chats. What clients send
by default is never refused.

The items of a conversation are messages, calls of functions, what they returned, and reasoning. Clients send back those
of earlier responses as they got them, so fields that only describe an item, such as its status, are taken and change
nothing. The id of an item names the response that it belongs to.

Chats say how many messages a turn of the assistant is: its reasoning, its text and its calls are one message, while
the items of a response stand side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED, ApiError, invalid
from alignedserve.gateway.openai.formats import Schema
from alignedserve.gateway.openai.strict import Ignored, ListOf, Ruled, SentBack, Strict, TextOr, Usual, fault, type_of
from alignedserve.gateway.openai.tools import MOST_TOOLS, Name, Typed, as_function
from alignedserve.gateway.openai.types import MOST_LOGPROBS, MOST_MESSAGES, ChatRequest, SampledRequest, text_of

_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512  # of metadata: pairs, characters of a key, of a value
_LOGPROBS = "message.output_text.logprobs"


_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[io][0-9]{1,5}")
PREFIX = "resp_"  # of the ids of responses
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class TextContent(SentBack):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Any = None
    logprobs: Annotated[Any, BeforeValidator(lambda _: None)] = None  # models never see them, and they are large
    prompt_cache_breakpoint: Any = None  # changes nothing: the beginnings of prompts are cached anyway


class RefusalContent(SentBack):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextContent | RefusalContent, Field(discriminator="type")]


Content = TextOr[ListOf[Part]]


class _Item(SentBack):
    id: str | None = None
    status: Any = None

    @property
    def tree(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Any = None  # of an answer: whether it was the last word


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    arguments: str
    namespace: Any = None
    caller: Any = None


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: Any = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: ListOf[TextContent] = Field(default_factory=list)
    content: ListOf[TextContent] | None = None
    encrypted_content: Any = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class ItemReference(SentBack):
    """The id of an item of an earlier response, which stands for the item."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind_of_item(item: Any) -> Any:
    if not isinstance(item, dict):
        return getattr(item, "type", None) or "item_reference"
    kind = item.get("type")
    return kind if kind is not None else "message" if "role" in item else "item_reference"


Item: TypeAlias = MessageItem | CallItem | OutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]


def output_id(response: str, kind: str, number: int) -> str:
    """Return the id of an item of a response's output."""
    return f"{_PREFIXES[kind]}_{response.removeprefix(PREFIX)}o{number}"


def kept_item(item: Item, response: str, number: int) -> msgspec.Raw:
    """Return an item of a response's input as it is kept and listed: with an id, and its content as parts."""
    tree = item.tree
    tree["id"] = f"{_PREFIXES[item.type]}_{response.removeprefix(PREFIX)}i{number}"
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = [item.content] if isinstance(item.content, str) else item.content
        tree["content"] = [_kept_part(part, kind) for part in parts]
    tree.setdefault("status", "completed")
    return msgspec.Raw(msgspec.json.encode(tree))


def _kept_part(part: str | TextContent | RefusalContent, kind: str) -> dict[str, Any]:
    if isinstance(part, RefusalContent):
        return part.model_dump()
    text = part if isinstance(part, str) else part.text
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def response_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to, "" if to none."""
    found = _ID.fullmatch(item_id)
    return "" if found is None else PREFIX + found[1]


def call_id(response: str, number: int) -> str:
    """Return the id of a call, item `number` of a response's output: the same whoever reads the output again."""
    return f"call_{response.removeprefix(PREFIX)}{number}"


def own_ids(response: str, output: Sequence[Mapping[str, msgspec.Raw]]) -> list[dict[str, Any]]:
    """Return a response's output, which was made under another id, with ids of its own."""
    items: list[dict[str, Any]] = []
    for number, item in enumerate(output):
        kind = msgspec.json.decode(item["type"], type=str)
        items.append({**item, "id": output_id(response, kind, number)})
        if kind == "function_call":
            items[number]["call_id"] = call_id(response, number)
    return items


# --- The body


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
        return as_function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as a response shows it."""
        shown = {"type": "function", "name": self.name, "description": self.description}
        return {**shown, "parameters": self.parameters, "strict": bool(self.strict)}


class NamedResponseTool(Strict):
    type: Literal["function"]
    name: Name

    @property
    def chat_tree(self) -> dict[str, Any]:
        return as_function(name=self.name)


class AllowedResponseTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[NamedResponseTool] = Field(min_length=1, max_length=MOST_TOOLS)

    @property
    def chat_tree(self) -> dict[str, Any]:
        named = [tool.chat_tree for tool in self.tools]
        return {"type": self.type, self.type: {"mode": self.mode, "tools": named}}


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


class ResponseStreamOptions(Strict):
    UNSUPPORTED: ClassVar[Usual] = {"include_obfuscation": (False,)}
    WHERE = "stream_options."


class BackgroundOptions(Strict):
    completion_window: Literal["soonest", "2h", "8h"] = "soonest"


class ResponseRequest(SampledRequest):
    UNSUPPORTED: ClassVar[Usual] = {
        **dict.fromkeys(("conversation", "moderation", "prompt"), ()),
        **dict.fromkeys(("access_programs", "image"), ({},)),
        "context_management": ([],),
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


# --- The chat

_SAME = (
    *(*SampledRequest.model_fields, "chat_template_kwargs", "max_reasoning_tokens"),
    *("parallel_tool_calls", "top_logprobs"),
)
# The fields of a chat that have another name here.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "tools.function.strict": "tools.strict",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "messages.reasoning": "input.reasoning",
    "messages.annotations": "input.annotations",
}


def make_chat(body: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the chat of a body with these items of conversation; raise an ApiError that names the body's fields."""
    text, choice = body.text or TextOptions(), body.tool_choice
    tree = {name: getattr(body, name) for name in _SAME} | {
        "messages": make_messages(body.instructions, items),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [tool.chat_tree for tool in body.tools or ()] or None,
        "tool_choice": choice if choice is None or isinstance(choice, str) else choice.chat_tree,
        "response_format": text.format and text.format.chat_tree,
        "verbosity": text.verbosity,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "logprobs": body.shows_logprobs or None,
    }
    try:
        return ChatRequest.of(tree)
    except ApiError as error:
        raise renamed(error) from None


def make_lone_chat(body: ResponseRequest) -> ChatRequest:
    """Return the chat of a body that stands alone, as in a batch; raise if it names other responses."""
    own: Sequence[Item | ItemReference] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    items = [item for item in own if not isinstance(item, ItemReference)]
    names = {
        "previous_response_id": body.previous_response_id is not None,
        "input": len(items) < len(own),
        "background": bool(body.background),
    }
    if field := next((name for name, is_there in names.items() if is_there), None):
        message = f"{field}: a line of a batch stands alone: send all items of its conversation"
        raise invalid(message, field, "unsupported_parameter")
    return make_chat(body, items)


def make_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    reasoning = ""  # waits for the message or the call that it led to
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += item.text
        elif isinstance(item, OutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, CallItem):
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append(_assistant("", reasoning))
            call = as_function(name=item.name, arguments=item.arguments)
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, **call})
            reasoning = ""
        elif item.role == "assistant":
            messages.append(_assistant(text_of(item.content), reasoning))
            reasoning = ""
        elif len(messages) == 1 and {item.role, messages[0]["role"]} <= {"system", "developer"}:
            # What the system says at the beginning is one message, since many templates take no more.
            messages[0]["content"] += f"\n\n{text_of(item.content)}"
        else:
            messages.append({"role": item.role, "content": text_of(item.content)})
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: str, reasoning: str) -> dict[str, Any]:
    told = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **told}


def renamed(error: ApiError) -> ApiError:
    """Return an error about a chat with the names that the fields have here.

    Messages are named as the input: their places differ from those of its items."""
    message, param = error.message, error.param
    if param is not None and param.startswith("messages"):
        message, param = message.removeprefix(f"{param}: "), "input"
    for name, shown in _NAMES.items():
        if param is not None and param.startswith(name):
            message, param = message.replace(name, shown), param.replace(name, shown)
    more = {"code": error.code, "headers": error.headers, "logged": error.logged}
    return ApiError(error.status, message, param=param, **more)


def shown_fields(names: Sequence[str]) -> list[str]:
    """Return a chat's fields by the names that they have here."""
    return [_NAMES.get(name, name) for name in names]
