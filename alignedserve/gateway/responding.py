"""The routes of /v1/responses: OpenAI's Responses API, whose conversations the server may keep.

body ─▶ ResponseRequest ─▶ a chat, with the conversation that it continues ─▶ the requests of that chat
     ─▶ pieces of its answer ─▶ a response and its events ─▶ the store
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.batches import MOST_LISTED, RUNNER_PATIENCE_S, USUALLY_LISTED
from alignedserve.gateway.exchanges import NamedEventExchange, answer_body, ignored_header
from alignedserve.gateway.files import HttpRoute, list_object, parse_page
from alignedserve.gateway.http.limits import LOOK_BYTES, MOST_ROWS, LookPace
from alignedserve.gateway.http.middleware import caller_of, record_of
from alignedserve.gateway.openai.errors import api_error, invalid, no_runner, rate_limited
from alignedserve.gateway.openai.streaming import parts_response
from alignedserve.gateway.openai.types import ChatRequest
from alignedserve.gateway.openai.writing import json_parts
from alignedserve.gateway.responses.answer import ResponseAnswer, response_head
from alignedserve.gateway.responses.keeping import TIER, KeptItemRoom, ResponseKeeper, kept_id
from alignedserve.gateway.responses.types import (
    PREFIX,
    Item,
    ResponseRequest,
    kept_item,
    make_chat,
    renamed,
    shown_fields,
)
from alignedserve.gateway.starting import Starter, tokens_header
from alignedserve.store.store import StoredResponse

MOST_SENT_BYTES = 128 << 20  # of kept responses that one key has sent to it at once; a single one may have more


class ResponseRoutes:
    def __init__(self, starter: Starter, keeper: ResponseKeeper) -> None:
        self._starter, self._keeper = starter, keeper
        self._looks = LookPace(MOST_ROWS, f"times {LOOK_BYTES // 1024} KiB of kept responses")
        self._sent_bytes = Counter[str]()  # of kept responses that are being sent, by owner

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (
            ("POST", "/v1/responses", partial(answer_body, self._starter, ResponseRequest, self._begin)),
            ("GET", "/v1/responses/{id}", self.get),
            ("DELETE", "/v1/responses/{id}", self.remove),
            ("POST", "/v1/responses/{id}/cancel", self.cancel),
            ("GET", "/v1/responses/{id}/input_items", self.input_items),
        )

    async def get(self, http: HttpRequest) -> Response:
        if http.query_params.get("stream", "false") != "false":
            raise invalid("a response that is kept is not streamed: fetch it whole", "stream", "unsupported_parameter")
        found = await self._find(http)
        return self._answer(found)

    async def remove(self, http: HttpRequest) -> Response:
        found = await self._find(http, is_paced=False)
        if found.job is not None:
            found = await self._keeper.cancel(found)
        await self._keeper.remove(found)
        return JSONResponse({"id": found.id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> Response:
        found = await self._find(http, is_paced=False)
        if found.job is None:
            raise invalid(f"{found.id} does not run in the background: only such responses can be cancelled", "id")
        return self._answer(await self._keeper.cancel(found))

    async def input_items(self, http: HttpRequest) -> Response:
        page = parse_page(http, MOST_LISTED, USUALLY_LISTED)
        found = await self._find(http)
        items, start = found.input[::-1] if page.newest_first else found.input, 0
        ids = [kept_id(item) for item in items]
        if page.after is not None:
            if page.after not in ids:
                raise invalid(f"after: there is no {page.after!r:.80}", "after")
            start = ids.index(page.after) + 1
        shown = slice(start, start + page.limit)
        data = [item.copy() for item in items[shown]]
        listed = list_object(ids[shown], iter(data), len(items) > shown.stop)
        return self._send(found.owner, listed, sum(len(memoryview(item)) for item in data))

    async def _find(self, http: HttpRequest, is_paced: bool = True) -> StoredResponse:
        """Return the response. What frees something is never refused for what was looked up before."""
        owner = caller_of(http).id
        async with self._looks.turn(owner, is_paced):
            found = await self._keeper.find(owner, http.path_params["id"])
            num_bytes = sum(len(memoryview(each)) for each in (*found.input, found.answer))
            if is_paced:
                self._looks.take(owner, num_bytes // LOOK_BYTES)
        return found

    async def _begin(self, http: HttpRequest, body: ResponseRequest) -> NamedEventExchange | Response:
        if body.background:
            return await self._begin_background(http, body)
        own, _, chat = await self._turn(http, body)
        try:
            started = await self._starter.start(http, chat)
        except AlignedServeError as error:
            raise renamed(api_error(error)) from error
        head = self._head(http, body, started.promise.tier)
        keep = None
        if body.store is not False:
            keep = partial(self._keeper.keep, caller_of(http).id, await self._kept_items(http, own, head["id"]))
        answer = ResponseAnswer(body, head, started.requests[0], self._starter.text, keep)
        return NamedEventExchange(started, bool(body.stream), self._ignored(body, chat), answer)

    async def _begin_background(self, http: HttpRequest, body: ResponseRequest) -> Response:
        self._keeper.need_background()
        own, items, chat = await self._turn(http, body)
        if self._keeper.runner_away_s() > RUNNER_PATIENCE_S:
            raise no_runner()
        try:
            _, requests = await self._starter.make(http, chat)
        except AlignedServeError as error:
            raise renamed(api_error(error)) from error
        head, sampling = self._head(http, body, TIER), requests[0].sampling
        head |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        kept = await self._kept_items(http, own, head["id"])
        await self._keeper.begin(caller_of(http), kept, head, body, items)
        cut = tokens_header(requests, chat.most_tokens)
        return JSONResponse(head, headers={**ignored_header(self._ignored(body, chat)), **cut})

    async def _turn(self, http: HttpRequest, body: ResponseRequest) -> tuple[list[Item], list[Item], ChatRequest]:
        """Return the items of a body's own input, those of the whole conversation, and its chat."""
        self._starter.check_model(body.model)
        owner, room = caller_of(http).id, KeptItemRoom(self._starter.settings.body_limit_bytes)
        own = await self._keeper.own_items(owner, body, room)
        items = [*await self._keeper.items_before(owner, body, room), *own]
        return own, items, await self._starter.in_thread(http, partial(make_chat, body, items))

    async def _kept_items(self, http: HttpRequest, own: Sequence[Item], id: str) -> list[msgspec.Raw]:
        """Return the items of an input as they are kept with the response that has this id."""
        return await self._starter.in_thread(http, lambda: [kept_item(item, id, at) for at, item in enumerate(own)])

    def _ignored(self, body: ResponseRequest, chat: ChatRequest) -> list[str]:
        return [*body.ignored, *shown_fields([*chat.ignored, *chat.unread_by(self._starter.text)])]

    def _answer(self, found: StoredResponse) -> Response:
        return self._send(found.owner, answer := found.answer.copy(), len(memoryview(answer)))

    def _send(self, owner: str, kept: Any, num_bytes: int) -> Response:
        """Return an answer of what is kept, as a tree. It is held in memory until its client has read it, so it is
        copied: the record that it is a part of is not held."""
        sent = self._sent_bytes[owner]
        if sent and sent + num_bytes > MOST_SENT_BYTES:
            raise rate_limited(f"{MOST_SENT_BYTES} bytes of kept responses that are being sent", 1.0)
        return parts_response(self._parts(owner, kept, num_bytes), {}, self._starter.settings.stalled_client_s)

    def _parts(self, owner: str, kept: Any, num_bytes: int) -> Iterator[bytes]:
        self._sent_bytes[owner] += num_bytes
        try:
            yield from json_parts(kept)
        finally:
            self._sent_bytes[owner] -= num_bytes

    def _head(self, http: HttpRequest, body: ResponseRequest, tier: str) -> dict[str, Any]:
        id = PREFIX + record_of(http).id.removeprefix("req-")
        head = response_head(body, id, int(time.time()), tier)
        return head | {"store": head["store"] and self._keeper.is_on}
