"""The items of a conversation: messages, calls of functions, what they returned, reasoning.

Clients send back the items of earlier responses as they got them, so fields that only describe an item, such as its
status, are taken and change nothing. The id of an item names the response that it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag

from alignedserve.gateway.openai.strict import ListOf, SentBack, TextOr, type_of

_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[io][0-9]{1,5}")
PREFIX = "resp_"  # of the ids of responses
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


_TextType = Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]


class TextContent(SentBack):
    type: _TextType
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


def _kind_of_part(part: Any) -> Any:
    kind = type_of(part)
    return "text" if kind in get_args(_TextType) else kind


Part = Annotated[
    Annotated[TextContent, Tag("text")] | Annotated[RefusalContent, Tag("refusal")], Discriminator(_kind_of_part)
]


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
