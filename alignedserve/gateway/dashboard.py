"""The live page: its routes, and the pictures that it is sent, one each second.

    figures, members ─▶ DeploymentView ─┐
    requests of this owner ─▶ RequestLog ┼─▶ Picture ─▶ JSON, once ─▶ every open page
    the store ─▶ OpenJobs ──────────────┘

A page that reads slowly, or hangs, costs no token and little memory: the newest picture takes the place of the one that
the page has not taken yet, and a page that takes nothing for a minute is cut off. Without an open page no picture is
made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alignedserve.dashboard.deployment import DeploymentView
from alignedserve.dashboard.page import live_page
from alignedserve.dashboard.picture import Picture, RequestsPicture
from alignedserve.dashboard.requests import RequestLog
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.middleware import PAGE
from alignedserve.gateway.open_jobs import OpenJobs
from alignedserve.gateway.openai.errors import too_many_pages
from alignedserve.gateway.pages.html import html_answer
from alignedserve.gateway.streaming import WatchedStream
from alignedserve.owner.client import OwnerClient
from alignedserve.protocol.messages import Figures

PICTURE_S = 1.0  # between two pictures
MOST_PAGES = 32  # that are open at once

log = logging.getLogger("alignedserve.gateway")


@dataclass(frozen=True)
class Head:
    """The part of a picture in which a gateway describes itself."""

    state: str
    models: tuple[str, ...]


class Dashboard:
    def __init__(
        self, client: OwnerClient, requests: RequestLog, head: Callable[[], Head], stalled_page_s: float
    ) -> None:
        """`stalled_page_s` is the time after which a page that reads nothing is cut off."""
        self._client, self._requests, self._head = client, requests, head
        self._stalled_page_s = stalled_page_s
        self._view = DeploymentView()
        self._pages: set[_NewestPicture] = set()
        self._making: asyncio.Task[None] | None = None
        self.jobs: OpenJobs | None = None  # set where the deployment takes jobs
        self.all_requests: Callable[[], Awaitable[RequestsPicture]] = self._own_requests  # set where others own some

    @property
    def routes(self) -> tuple[HttpRoute, ...]:
        return ("GET", PAGE, self.page), ("GET", f"{PAGE}/events", self.events)

    @property
    def num_open(self) -> int:
        return len(self._pages)

    def hear(self, figures: Figures) -> None:
        """Take figures of other parts; any thread may call this."""
        self._view.hear(figures, self._client.now())

    def begin(self) -> None:
        """Begin to look at the deployment each second, unless that has begun."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._look_each_second())

    def end(self) -> None:
        """End the streams of all open pages: they connect again to the next gateway."""
        if self._making is not None:
            self._making.cancel()
        if self.jobs is not None:
            self.jobs.end()
        for page in self._pages:
            page.put(None)

    async def page(self, _: HttpRequest) -> Response:
        return html_answer(live_page())

    async def events(self, _: HttpRequest) -> Response:
        if len(self._pages) >= MOST_PAGES:
            raise too_many_pages()
        self.begin()
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _PictureStream(self._events(), self._stalled_page_s, headers)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        page = _NewestPicture()
        self._pages.add(page)
        try:
            while (event := await page.take()) is not None:
                yield event
        finally:
            self._pages.discard(page)

    async def _look_each_second(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the live page gets no picture")
            await asyncio.sleep(PICTURE_S)

    async def _look(self) -> None:
        now = self._client.now()
        self._view.look(self._client.members, now)
        self._requests.tick(now)
        if self._pages:
            picture = await self._picture()
            event = b"data: %b\n\n" % picture.to_json()
            for page in self._pages:
                page.put(event)

    async def _picture(self) -> Picture:
        requests, head = await self.all_requests(), self._head()
        jobs = None if self.jobs is None else self.jobs.picture()
        return self._view.picture(self._client.now(), head.state, head.models, requests, jobs)

    async def _own_requests(self) -> RequestsPicture:
        return self._requests.picture(self._client.now())


class _PictureStream(WatchedStream):
    def __init__(self, events: AsyncGenerator[bytes, None], stalled_page_s: float, headers: dict[str, str]) -> None:
        super().__init__(events, stalled_page_s, media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]  # its end is not known


class _NewestPicture:
    """The newest event for a page. A page that does not take an event in time gets the next one in its place."""

    def __init__(self) -> None:
        self._event: bytes | None = None  # None: the stream ends
        self._is_new = asyncio.Event()

    def put(self, event: bytes | None) -> None:
        self._event = event
        self._is_new.set()

    async def take(self) -> bytes | None:
        await self._is_new.wait()
        self._is_new.clear()
        event, self._event = self._event, None
        return event
