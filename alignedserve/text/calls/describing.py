"""Show tools to a model whose chat template knows none: in its system message, and in plain messages of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from alignedserve.text.calls.formats import CallFormat

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
        yield _with_calls(message, form) if message.get("tool_calls") else message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _with_calls(message: Message, form: CallFormat) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = form.write([(function["name"], function["arguments"]) for function in functions])
    said = message["content"]
    shown = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**shown, "content": f"{said}\n{calls}" if said else calls}
