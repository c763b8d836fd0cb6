"""The routes of /v1/messages: Anthropic's Messages API.

body ─▶ MessageRequest ─▶ a chat ─▶ the requests of that chat ─▶ pieces of its answer ─▶ a message and its events
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.anthropic.answer import MessageAnswer
from alignedserve.gateway.anthropic.types import CountRequest, MessageRequest, make_chat, shown_fields
from alignedserve.gateway.exchanges import ToldExchange, answer_body
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.error_responses import MESSAGES
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.requests import prompt_of
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.openai.types import ChatRequest
from alignedserve.gateway.starting import StartedRequests, Starter


class MessageRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (("POST", MESSAGES, self.create), ("POST", f"{MESSAGES}/count_tokens", self.count))

    async def create(self, http: HttpRequest) -> Response:
        return await answer_body(self._starter, http, MessageRequest, self._begin)

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
        started, fills_context = await self._start(http, chat)
        id = "msg_" + record_of(http).id.removeprefix("req-")
        answer = MessageAnswer(id, body.model, started.promise.tier, started.requests[0], fills_context)
        ignored = [*body.ignored, *shown_fields([*chat.ignored, *chat.unread_by(self._starter.text)])]
        return ToldExchange(started, bool(body.stream), ignored, answer)

    async def _start(self, http: HttpRequest, chat: ChatRequest) -> tuple[StartedRequests, bool]:
        """Start the chat, and return whether it may fill the context: max_tokens may be more than the model has."""
        try:
            return await self._starter.start(http, chat), False
        except ApiError as error:
            if (error.param, error.code) != ("max_tokens", "context_length_exceeded"):
                raise
        return await self._starter.start(http, chat.model_copy(update={"max_tokens": None})), True
