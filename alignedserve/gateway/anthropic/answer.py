"""Build a message from the pieces of its answer, and the events of its stream.

    message_start ─▶ content_block_start ─▶ deltas ─▶ content_block_stop ─▶ ... ─▶ message_delta ─▶ message_stop

A message has one block open at a time. A piece that goes on with another block closes the open one.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, TypeAlias

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.text.calls.parts import CallPart

Event: TypeAlias = dict[str, Any]

_TIERS = {"default": "standard", "priority": "priority", "flex": "batch"}


class MessageAnswer:
    """Build one message from its head to its last event; `tree` holds the message so far."""

    def __init__(self, id: str, model: str, tier: str, request: Request, fills_context: bool = False) -> None:
        """`fills_context`: the model's context limits the answer, not the client."""
        self._limit = "model_context_window_exceeded" if fills_context else "max_tokens"
        usage = {
            "input_tokens": len(request.prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": _TIERS[tier],
        }
        self.tree: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        self._has_begun = False
        self._open: dict[str, Any] | None = None  # the block that pieces are added to
        self._arguments = ""  # of the open block, if it is a call

    def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece; the first has those of the message's beginning, the last those of its end."""
        usage, events = self.tree["usage"], list[Event]()
        usage["output_tokens"] += len(piece.tokens)
        if not self._has_begun:
            self._has_begun = True
            usage["cache_read_input_tokens"] = piece.num_cached
            usage["input_tokens"] -= piece.num_cached
            events.append({"type": "message_start", "message": {**self.tree, "content": [], "usage": dict(usage)}})
        if piece.reasoning:
            events += self._text("thinking", "thinking_delta", piece.reasoning, signature="")
        if piece.text:
            events += self._text("text", "text_delta", piece.text)
        for part in piece.calls:
            events += self._call(part)
        if piece.finish:
            events += self._end(piece)
        return events

    def _text(self, kind: str, delta: str, text: str, **more: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events += self._close()
            events += self._begin({"type": kind, kind: "", **more})
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": delta, kind: text})]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.id is not None:
            events += self._close()
            events += self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        self._arguments += part.arguments
        if part.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._open, self._arguments = block, ""
        self.tree["content"].append(block)
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.tree["content"]) - 1

    def _close(self) -> list[Event]:
        """Return the events that end the open block, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        if opened["type"] == "thinking":  # clients send it back as it is, and here nobody looks at it
            opened["signature"] = sha256(opened["thinking"].encode()).hexdigest()
            signed = self._delta({"type": "signature_delta", "signature": opened["signature"]})
            return [signed, {"type": "content_block_stop", "index": self._index}]
        if opened["type"] == "tool_use":
            opened["input"] = _object(self._arguments)
        return [{"type": "content_block_stop", "index": self._index}]

    def _end(self, piece: AnswerPiece) -> list[Event]:
        events, calls = self._close(), any(block["type"] == "tool_use" for block in self.tree["content"])
        reason = self._limit if piece.finish is FinishReason.LENGTH else "tool_use" if calls else "end_turn"
        if piece.stop is not None:
            reason = "stop_sequence"
        end = {"stop_reason": reason, "stop_sequence": piece.stop}
        self.tree |= end
        return [*events, {"type": "message_delta", "delta": end, "usage": self._end_usage}, {"type": "message_stop"}]

    @property
    def _end_usage(self) -> dict[str, Any]:
        return {name: count for name, count in self.tree["usage"].items() if name != "service_tier"}


def _object(arguments: str) -> dict[str, Any]:
    """Return the input of a call; empty, if the output ended inside of it."""
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
