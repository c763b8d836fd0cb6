"""Turn the body of a response into the chat that it asks for: the conversation so far, then its own input.

Chats say how many messages a turn of the assistant is: its reasoning, its text and its calls are one message, while
the items of a response stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.tools import as_function
from alignedserve.gateway.openai.types import ChatRequest, SampledRequest, text_of
from alignedserve.gateway.responses.types import (
    AllowedResponseTools,
    CallItem,
    Item,
    ItemReference,
    MessageItem,
    NamedResponseTool,
    OutputItem,
    ReasoningItem,
    ResponseRequest,
)

_SAME = (*SampledRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs", "max_reasoning_tokens")
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
    same = {name: getattr(body, name) for name in _SAME}
    try:
        return ChatRequest.of({**same, "messages": make_messages(body.instructions, items), **_forms(body)})
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
    for field in (name for name, is_there in names.items() if is_there):
        message = f"{field}: a line of a batch stands alone: send all items of its conversation"
        raise invalid(message, field, "unsupported_parameter")
    return make_chat(body, items)


def _forms(body: ResponseRequest) -> dict[str, Any]:
    text, reasoning = body.text, body.reasoning
    choice: Any = body.tool_choice
    if isinstance(choice, NamedResponseTool):
        choice = as_function(name=choice.name)
    elif isinstance(choice, AllowedResponseTools):
        named = [as_function(name=tool.name) for tool in choice.tools]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return {
        "max_completion_tokens": body.max_output_tokens,
        "tools": [tool.chat_tree for tool in body.tools or ()] or None,
        "tool_choice": choice,
        "response_format": text.format.chat_tree if text is not None and text.format is not None else None,
        "verbosity": text.verbosity if text is not None else None,
        "reasoning_effort": reasoning.effort if reasoning is not None else None,
        "logprobs": body.shows_logprobs or None,
        "top_logprobs": body.top_logprobs,
    }


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
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def shown_fields(names: Sequence[str]) -> list[str]:
    """Return a chat's fields by the names that they have here."""
    return [_NAMES.get(name, name) for name in names]
