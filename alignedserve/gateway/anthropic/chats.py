"""Turn the body of a message into the chat that it asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from alignedserve.gateway.anthropic.types import (
    Block,
    CountRequest,
    MessageParam,
    MessageRequest,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from alignedserve.gateway.openai.errors import from_validation
from alignedserve.gateway.openai.types import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TIERS = {"auto": "auto", "standard_only": "default", None: None}
# The fields of a chat that have another name here.
_NAMES = {"enable_thinking": "thinking", "max_reasoning_tokens": "thinking"}
_SAME = ("max_tokens", "stream", "temperature", "top_k", "top_p")


def make_chat(body: CountRequest) -> ChatRequest:
    """Return the chat of a body; raise an ApiError that names what of it cannot be served."""
    tree: dict[str, Any] = {"model": body.model, "messages": _messages(body), **_forms(body)}
    if body.messages[-1].role == "assistant":  # the answer continues what the client has written for the model
        tree |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessageRequest):
        tree |= {name: getattr(body, name) for name in _SAME}
        tree |= {"stop": body.stop_sequences, "service_tier": _TIERS[body.service_tier]}
        tree |= {"include_reasoning": body.thinking is not None and body.thinking.is_shown}
    tree = {name: value for name, value in tree.items() if value is not None}
    try:
        return ChatRequest.model_validate(tree)
    except ValidationError as error:
        raise from_validation(error, tree) from None


def _forms(body: CountRequest) -> dict[str, Any]:
    choice, config = body.tool_choice, body.output_config
    form = body.output_format or (config.format if config is not None else None)
    forms: dict[str, Any] = {"reasoning_effort": config.effort if config is not None else None}
    if body.thinking is not None:
        budget = body.thinking.budget_tokens if body.thinking.is_on else None
        forms |= {"enable_thinking": body.thinking.is_on, "max_reasoning_tokens": budget}
    if body.tools:
        forms["tools"] = [_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools]
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        forms["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        forms["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if form is not None:
        schema = {"name": "output", "schema": form.wanted}
        forms["response_format"] = {"type": "json_schema", "json_schema": schema}
    return forms


def _tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> dict[str, Any]:
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages = [] if body.system is None else [{"role": "system", "content": _text(body.system)}]
    for message in body.messages:
        if message.role == "assistant":
            messages.append(_assistant(message.blocks))
        else:
            messages += _user(message)
    return messages


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _user(message: MessageParam) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: what tools returned are messages of their own."""
    messages: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            content = "" if block.content is None else _text(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            if messages and messages[-1]["role"] == message.role:
                messages[-1]["content"] += f"\n{block.text}"
            else:
                messages.append({"role": message.role, "content": block.text})
    return messages or [{"role": message.role, "content": ""}]


def _text(texts: Texts) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def shown_fields(names: Sequence[str]) -> list[str]:
    """Return a chat's fields by the names that they have here."""
    return list(dict.fromkeys(_NAMES.get(name, name) for name in names))


def ignored_fields(body: MessageRequest) -> list[str]:
    """Return the fields that are set and change nothing; a header names them to the client."""
    blocks = [block for message in body.messages for block in message.blocks]
    unused = ("diagnostics", "inference_geo", "user_profile_id", "workspace_id")
    found = {
        **{name: getattr(body, name) is not None for name in unused},
        "tools.input_examples": any(tool.input_examples for tool in body.tools or ()),
        "messages.content.is_error": any(isinstance(block, ToolResultBlock) and block.is_error for block in blocks),
        "messages.content.redacted_thinking": any(block.type == "redacted_thinking" for block in blocks),
    }
    return [name for name, is_set in found.items() if is_set]
