"""Show tools and calls to a model as its chat template can take them.

A template that knows no tools has them in the system message, and calls and results in plain messages of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

from alignedserve.text.calls.formats import SHORT_ID, CallFormat

Message: TypeAlias = Mapping[str, Any]
_MANUAL = """# Tools

These functions can be called:
{tools}

To call one, write:
{example}

Write nothing after a call: its result is sent to you. Where no function is needed, answer in words."""


def described(
    messages: Sequence[Message], tools: Sequence[Message], form: CallFormat, apart: bool = True
) -> list[Message]:
    """Return the messages with the tools described in them, and with calls and results as text.

    `apart`: the description is a system message; otherwise it stands in the first message of the user."""
    plain = list(_plain(messages, form))
    if not tools:
        return plain
    role = "system" if apart else "user"
    manual = _MANUAL.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        example=form.write([("NAME", {"ARGUMENT": "VALUE"})]),
    )
    at = next((place for place, message in enumerate(plain) if message["role"] == role), None)
    if at is None or (apart and at != 0):
        return [{"role": role, "content": manual}, *plain]
    said = plain[at]["content"]
    text = f"{said}\n\n{manual}" if apart else f"{manual}\n\n{said}"
    return [*plain[:at], {**plain[at], "content": text}, *plain[at + 1 :]]


def _plain(messages: Sequence[Message], form: CallFormat) -> Iterator[Message]:
    """Yield the messages with calls in the text of the assistant, and results in texts of the user."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if not message.get("tool_calls"):
            yield message
            continue
        functions = [call["function"] for call in message["tool_calls"]]
        calls = form.write([(function["name"], _object(function["arguments"])) for function in functions])
        shown = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**shown, "content": f"{message['content']}\n{calls}" if message["content"] else calls}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return the arguments, or an object around their text where the model wrote none."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with short ids of calls in place of those that come from elsewhere."""
    shown = [dict(message) for message in messages]
    for message in shown:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
        if (answered := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = _short(answered)
    return shown


def _short(id: str) -> str:
    """Return the id, or a short one that is always the same for it."""
    return id if len(id) == SHORT_ID and id.isalnum() else sha256(id.encode()).hexdigest()[:SHORT_ID]
