"""Anthropic's Messages API: the bodies that ask for messages, the chats that they become, the routes, and the answers.

body ─▶ MessageRequest ─▶ a chat ─▶ the requests of that chat ─▶ pieces of its answer ─▶ a message and its events

message_start ─▶ content_block_start ─▶ deltas ─▶ content_block_stop ─▶ ... ─▶ message_delta ─▶ message_stop

A field is honoured, or refused by name, or named as ignored in a header of the answer, as in chats. `cache_control` is
taken everywhere and changes nothing: the beginnings of prompts are cached anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.exchanges import NamedEventExchange, answer_body
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.error_responses import MESSAGES, message_error
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.openai.errors import UNSUPPORTED, ApiError
from alignedserve.gateway.openai.formats import Schema
from alignedserve.gateway.openai.itemised import Event, ItemAnswer, Kind, OpenItem
from alignedserve.gateway.openai.reading import AnswerPiece, cost_of
from alignedserve.gateway.openai.requests import prompt_of
from alignedserve.gateway.openai.strict import Ignored, ListOf, Ruled, SentBack, Strict, TextOr, Usual, fault
from alignedserve.gateway.openai.tools import MOST_TOOLS, Name, as_function, object_in
from alignedserve.gateway.openai.types import MOST_MESSAGES, ChatRequest, text_of
from alignedserve.gateway.starting import Starter
from alignedserve.text.calls.scanning import CallPart


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


Texts: TypeAlias = TextOr[ListOf[TextBlock]]


class ToolResultBlock(SentBack):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None


Block: TypeAlias = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
_KINDS = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class MessageParam(Ruled):
    role: Literal["user", "assistant", "system"]
    content: TextOr[ListOf[Annotated[Block, Field(discriminator="type")]]]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def faults(self) -> Iterator[PydanticCustomError]:
        for block in self.blocks:
            if block.type not in _KINDS[self.role]:
                yield fault("content", f"a message of the role {self.role} has no block of the type {block.type}")


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

    @property
    def chat_tree(self) -> dict[str, Any]:
        parameters = self.input_schema
        return as_function(name=self.name, description=self.description, parameters=parameters, strict=self.strict)

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Refuse tools that the server itself would know before their fields are looked at."""
        if isinstance(given, dict) and given.get("type") not in (None, "custom"):
            message = "only tools of the type custom are supported: this server has no tools of its own"
            raise fault("type", message, UNSUPPORTED)
        return given


class ToolChoice(Ruled):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        if (self.type == "tool") != (self.name is not None):
            yield fault("name", "must be there if type is tool, and only then")


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

    UNSUPPORTED: ClassVar[Usual] = {"container": (), "context_management": ({},), "mcp_servers": ([],)}

    model: str
    messages: ListOf[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Texts | None = None
    tools: ListOf[ToolParam] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    cache_control: Any = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    speed: Literal["standard"] | None = None


class MessageRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0, lt=2**63)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Ignored = None

    @property
    def ignored(self) -> list[str]:
        blocks = [block for message in self.messages for block in message.blocks]
        found = {
            "tools.input_examples": any(tool.input_examples for tool in self.tools or ()),
            "messages.content.is_error": any(isinstance(block, ToolResultBlock) and block.is_error for block in blocks),
            "messages.content.redacted_thinking": any(block.type == "redacted_thinking" for block in blocks),
        }
        return [*super().ignored, *(name for name, is_set in found.items() if is_set)]


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TIERS = {"auto": "auto", "standard_only": "default", None: None}
# The fields of a chat that have another name here.
_NAMES = {"enable_thinking": "thinking", "max_reasoning_tokens": "thinking"}
_SAME = ("max_tokens", "stream", "temperature", "top_k", "top_p")


def make_chat(body: CountRequest) -> ChatRequest:
    """Return the chat of a body; raise an ApiError that names what of it cannot be served."""
    choice, thinking, config = body.tool_choice, body.thinking, body.output_config or OutputConfig()
    form, is_tool = body.output_format or config.format, choice is not None and choice.type == "tool"
    messages = [] if body.system is None else [{"role": "system", "content": text_of(body.system)}]
    tree = {
        "model": body.model,
        "messages": messages + [told for message in body.messages for told in _turn(message)],
        "reasoning_effort": config.effort,
        "enable_thinking": thinking and thinking.is_on,
        "max_reasoning_tokens": thinking.budget_tokens if thinking is not None and thinking.is_on else None,
        "tools": [tool.chat_tree for tool in body.tools or ()] or None,
        "tool_choice": choice and (as_function(name=choice.name) if is_tool else _CHOICES[choice.type]),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": form and {"type": form.type, form.type: {"name": "output", "schema": form.wanted}},
    }
    if body.messages[-1].role == "assistant":  # the answer continues what the client has written for the model
        tree |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessageRequest):
        tree |= {name: getattr(body, name) for name in _SAME}
        tree |= {"stop": body.stop_sequences, "service_tier": _TIERS[body.service_tier]}
        tree |= {"include_reasoning": thinking is not None and thinking.is_shown}
    return ChatRequest.of(tree)


def _turn(message: MessageParam) -> list[dict[str, Any]]:
    """Return the messages of a turn: an assistant's is one; of a user's, what tools returned are messages of their
    own."""
    if message.role == "assistant":
        said: dict[str, Any] = {"role": "assistant"}
        said["content"] = "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock))
        if thoughts := [block.thinking for block in message.blocks if isinstance(block, ThinkingBlock)]:
            said["reasoning_content"] = "\n".join(thoughts)
        for block in message.blocks:
            if isinstance(block, ToolUseBlock):
                call = as_function(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                said.setdefault("tool_calls", []).append({"id": block.id, **call})
        return [said]
    turn: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            content = "" if block.content is None else text_of(block.content)
            turn.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock) and turn and turn[-1]["role"] == message.role:
            turn[-1]["content"] += f"\n{block.text}"
        elif isinstance(block, TextBlock):
            turn.append({"role": message.role, "content": block.text})
    return turn or [{"role": message.role, "content": ""}]


# --- Routes and answers


class MessageRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        create = partial(answer_body, self._starter, MessageRequest, self._begin)
        return (("POST", MESSAGES, create), ("POST", f"{MESSAGES}/count_tokens", self.count))

    async def count(self, http: HttpRequest) -> Response:
        async with self._starter.read(http, CountRequest) as body:
            self._starter.check_model(body.model)
            text, most = self._starter.text, self._starter.settings.max_model_len
            prompt = await self._starter.in_thread(http, lambda: prompt_of(make_chat(body), text, most))
        tab_of(http).convert(len(prompt))
        return JSONResponse({"input_tokens": len(prompt)})

    async def _begin(self, http: HttpRequest, body: MessageRequest) -> NamedEventExchange:
        chat = await self._starter.in_thread(http, lambda: make_chat(body))
        started = await self._starter.start(http, chat)
        request, id = started.requests[0], "msg_" + record_of(http).id.removeprefix("req-")
        fills_context = request.max_tokens < body.max_tokens
        answer = MessageAnswer(id, body.model, started.promise.tier, request, fills_context)
        unused = [_NAMES.get(name, name) for name in [*chat.ignored, *chat.unread_by(self._starter.text)]]
        ignored = [*body.ignored, *dict.fromkeys(unused)]
        return NamedEventExchange(started, bool(body.stream), ignored, answer)


_TIERS_USED = {"default": "standard", "priority": "priority", "flex": "batch"}
_DELTAS = {  # the type of a delta, and its field
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer(ItemAnswer):
    """Builds one message from its head to its last event. Its items are called blocks."""

    def __init__(self, id: str, model: str, tier: str, request: Request, fills_context: bool = False) -> None:
        """`fills_context`: the model's context limits the answer, not the client."""
        self._limit = "model_context_window_exceeded" if fills_context else "max_tokens"
        usage = {
            "input_tokens": len(request.prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": _TIERS_USED[tier],
        }
        head = {"id": id, "type": "message", "role": "assistant", "model": model}
        super().__init__({**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})
        self._has_begun = False

    def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece. Those of the first tell of the message's beginning, which shows how much of the
        prompt was cached."""
        usage = self.tree["usage"]
        usage["output_tokens"] += len(piece.tokens)
        if not self._has_begun:
            self._has_begun = True
            usage["cache_read_input_tokens"] = piece.num_cached
            usage["input_tokens"] -= piece.num_cached
            message = {**self.tree, "content": [], "usage": dict(usage)}
            self._events.append({"type": "message_start", "message": message})
        self._read(piece)
        if piece.finish:
            self._close()
            calls = any(block["type"] == "tool_use" for block in self.tree["content"])
            reason = self._limit if piece.finish is FinishReason.LENGTH else "tool_use" if calls else "end_turn"
            end = {"stop_reason": reason if piece.stop is None else "stop_sequence", "stop_sequence": piece.stop}
            self.tree |= end
            usage |= cost_of([piece.charged])
            shown = {name: count for name, count in usage.items() if name != "service_tier"}
            self._events += [{"type": "message_delta", "delta": end, "usage": shown}, {"type": "message_stop"}]
        return self._take()

    def fail(self, error: ApiError) -> list[Event]:
        return [message_error(error)]

    def _make(self, kind: Kind, number: int, part: CallPart | None) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part is not None:
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self.tree["content"].append(block)
        self._tell("start", number, content_block=dict(block))
        return block

    def _tell(self, kind: str, number: int, **fields: Any) -> None:
        self._events.append({"type": f"content_block_{kind}", "index": number, **fields})

    def _tell_delta(self, item: OpenItem, text: str) -> None:
        kind, field = _DELTAS[item.kind]
        self._tell("delta", item.number, delta={"type": kind, field: text})

    def _tell_end(self, item: OpenItem, _: str) -> None:
        if item.kind == "call":
            item.tree["input"] = object_in(item.text) or {}  # none, if the output ended inside of it
        else:
            item.tree[item.tree["type"]] = item.text
        if item.kind == "reasoning":  # clients send it back as it is, and here nobody looks at it
            item.tree["signature"] = sha256(item.text.encode()).hexdigest()
            self._tell("delta", item.number, delta={"type": "signature_delta", "signature": item.tree["signature"]})
        self._tell("stop", item.number)
