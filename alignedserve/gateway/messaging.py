"""The routes of /v1/messages: Anthropic's Messages API.

body ─▶ MessageRequest ─▶ a chat ─▶ the requests of that chat ─▶ pieces of its answer ─▶ a message and its events

message_start ─▶ content_block_start ─▶ deltas ─▶ content_block_stop ─▶ ... ─▶ message_delta ─▶ message_stop
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.anthropic import CountRequest, MessageRequest, make_chat, shown_fields
from alignedserve.gateway.exchanges import ToldExchange, answer_body
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.error_responses import MESSAGES, message_error
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.itemised import Event, ItemAnswer, Kind, OpenItem
from alignedserve.gateway.openai.reading import AnswerPiece, cost_of
from alignedserve.gateway.openai.requests import prompt_of
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.starting import Starter
from alignedserve.text.calls.scanning import CallPart


class MessageRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (("POST", MESSAGES, self.create), ("POST", f"{MESSAGES}/count_tokens", self.count))

    async def create(self, http: HttpRequest) -> Response:
        return await answer_body(self._starter, MessageRequest, self._begin, http)

    async def count(self, http: HttpRequest) -> Response:
        async with self._starter.read(http) as sent:
            body = parse_body(CountRequest, sent)
            self._starter.check_model(body.model)
            arguments = self._starter.text, self._starter.settings.max_model_len
            prompt = await self._starter.in_thread(http, lambda: prompt_of(make_chat(body), *arguments))
        tab_of(http).convert(len(prompt))
        return JSONResponse({"input_tokens": len(prompt)})

    async def _begin(self, http: HttpRequest, body: MessageRequest) -> ToldExchange:
        chat = await self._starter.in_thread(http, lambda: make_chat(body))
        fills_context = False  # max_tokens may be more than the model has
        try:
            started = await self._starter.start(http, chat)
        except ApiError as error:
            if (error.param, error.code) != ("max_tokens", "context_length_exceeded"):
                raise
            fills_context = True
            started = await self._starter.start(http, chat.model_copy(update={"max_tokens": None}))
        id = "msg_" + record_of(http).id.removeprefix("req-")
        answer = MessageAnswer(id, body.model, started.promise.tier, started.requests[0], fills_context)
        ignored = [*body.ignored, *shown_fields([*chat.ignored, *chat.unread_by(self._starter.text)])]
        return ToldExchange(started, bool(body.stream), ignored, answer)


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
            usage |= cost_of([piece.spent])
            shown = {name: count for name, count in usage.items() if name != "service_tier"}
            self._events += [{"type": "message_delta", "delta": end, "usage": shown}, {"type": "message_stop"}]
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
        self._tell("delta", item, delta={"type": kind, field: text})

    def _tell_end(self, item: OpenItem, _: str) -> None:
        if item.kind == "call":
            item.tree["input"] = _object(item.text)
        else:
            item.tree[item.tree["type"]] = item.text
        if item.kind == "reasoning":  # clients send it back as it is, and here nobody looks at it
            item.tree["signature"] = sha256(item.text.encode()).hexdigest()
            self._tell("delta", item, delta={"type": "signature_delta", "signature": item.tree["signature"]})
        self._tell("stop", item)


def _object(arguments: str) -> dict[str, Any]:
    """Return the input of a call; empty, if the output ended inside of it."""
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
