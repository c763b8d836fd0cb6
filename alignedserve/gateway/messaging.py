"""The routes of /v1/messages: Anthropic's Messages API.

body ─▶ MessageRequest ─▶ a chat ─▶ the requests of that chat ─▶ pieces of its answer ─▶ a message and its events
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.anthropic.answer import MessageAnswer
from alignedserve.gateway.anthropic.chats import ignored_fields, make_chat, shown_fields
from alignedserve.gateway.anthropic.errors import PATH, message_error
from alignedserve.gateway.anthropic.types import CountRequest, MessageRequest
from alignedserve.gateway.exchanges import Event, Exchange
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.parsing import parse_body
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.requests import prompt_of
from alignedserve.gateway.openai.types import ChatRequest
from alignedserve.gateway.starting import Started, Starter


class MessageRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (("POST", PATH, self.create), ("POST", f"{PATH}/count_tokens", self.count))

    async def create(self, http: HttpRequest) -> Response:
        self._starter.check_ready()
        async with self._starter.read(http) as sent:
            body = parse_body(MessageRequest, sent)
            exchange, is_streamed = await self._begin(http, body), bool(body.stream)
            del body  # its memory is free while the request runs
        return await exchange.stream(http) if is_streamed else await exchange.whole(http)

    async def count(self, http: HttpRequest) -> Response:
        async with self._starter.read(http) as sent:
            body = parse_body(CountRequest, sent)
            self._starter.check_model(body.model)
            arguments = self._starter.text, self._starter.settings.max_model_len
            prompt = await self._starter.in_thread(http, lambda: prompt_of(make_chat(body), *arguments))
        tab_of(http).convert(len(prompt))
        return JSONResponse({"input_tokens": len(prompt)})

    async def _begin(self, http: HttpRequest, body: MessageRequest) -> Exchange:
        chat = await self._starter.in_thread(http, lambda: make_chat(body))
        started, fills_context = await self._start(http, chat)
        id = "msg_" + record_of(http).id.removeprefix("req-")
        answer = MessageAnswer(id, body.model, started.promise.tier, started.requests[0], fills_context)
        text = self._starter.text
        ignored = [*ignored_fields(body), *shown_fields([*chat.ignored, *chat.unread_by(text)])]
        headers = {"x-ignored-fields": ", ".join(ignored)} if ignored else {}
        return Exchange(started, _Teller(answer), headers, self._starter.settings.stalled_client_s)

    async def _start(self, http: HttpRequest, chat: ChatRequest) -> tuple[Started, bool]:
        """Start the chat, and return whether it may fill the context: max_tokens may be more than the model has."""
        try:
            return await self._starter.start(http, chat), False
        except ApiError as error:
            if (error.param, error.code) != ("max_tokens", "context_length_exceeded"):
                raise
        return await self._starter.start(http, chat.model_copy(update={"max_tokens": None})), True


class _Teller:
    """Tells of a message."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    @property
    def tree(self) -> dict[str, Any]:
        return self._answer.tree

    def begin(self) -> list[Event]:
        return []  # the first event shows how much of the prompt was cached, which the first piece knows

    async def feed(self, piece: AnswerPiece) -> list[Event]:
        return self._answer.feed(piece)

    def fail(self, error: ApiError) -> list[Event]:
        return [message_error(error)]
