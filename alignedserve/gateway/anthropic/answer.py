"""Build a message from the pieces of its answer, and the events of its stream.

message_start ─▶ content_block_start ─▶ deltas ─▶ content_block_stop ─▶ ... ─▶ message_delta ─▶ message_stop
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.http.error_responses import message_error
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.itemised import Event, ItemAnswer, Kind, OpenItem
from alignedserve.gateway.openai.reading import AnswerPiece, cost_of
from alignedserve.text.calls.scanning import CallPart

_TIERS = {"default": "standard", "priority": "priority", "flex": "batch"}
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
            "service_tier": _TIERS[tier],
        }
        head = {"id": id, "type": "message", "role": "assistant", "model": model}
        super().__init__({**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})
        self._has_begun = False

    def begin(self) -> list[Event]:
        return []  # the first event shows how much of the prompt was cached, which the first piece knows

    async def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece; the first has those of the message's beginning, the last those of its end."""
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
            self._end(piece)
        return self._take()

    def fail(self, error: ApiError) -> list[Event]:
        return [message_error(error)]

    def _make(self, kind: Kind, _: int, part: CallPart | None) -> dict[str, Any]:
        if part is not None:
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}

    def _tell(self, kind: str, item: OpenItem, **fields: Any) -> None:
        self._events.append({"type": f"content_block_{kind}", "index": item.number, **fields})

    def _tell_beginning(self, item: OpenItem) -> None:
        self.tree["content"].append(item.tree)
        self._tell("start", item, content_block=dict(item.tree))

    def _tell_delta(self, item: OpenItem, text: str) -> None:
        kind, field = _DELTAS[item.kind]
        delta = {"type": kind, field: text}
        self._events.append({"type": "content_block_delta", "index": item.number, "delta": delta})

    def _tell_end(self, item: OpenItem, _: str) -> None:
        if item.kind == "call":
            item.tree["input"] = _object(item.text)
        else:
            item.tree[item.tree["type"]] = item.text
        if item.kind == "reasoning":  # clients send it back as it is, and here nobody looks at it
            item.tree["signature"] = sha256(item.text.encode()).hexdigest()
            self._tell("delta", item, delta={"type": "signature_delta", "signature": item.tree["signature"]})
        self._tell("stop", item)

    def _end(self, piece: AnswerPiece) -> None:
        self._close()
        calls = any(block["type"] == "tool_use" for block in self.tree["content"])
        reason = self._limit if piece.finish is FinishReason.LENGTH else "tool_use" if calls else "end_turn"
        end = {"stop_reason": reason if piece.stop is None else "stop_sequence", "stop_sequence": piece.stop}
        self.tree |= end
        self.tree["usage"] |= cost_of([piece.spent])
        usage = {name: count for name, count in self.tree["usage"].items() if name != "service_tier"}
        self._events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]


def _object(arguments: str) -> dict[str, Any]:
    """Return the input of a call; empty, if the output ended inside of it."""
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
