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
from dataclasses import replace
from typing import TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alignedserve.core import Slo
from alignedserve.dashboard.page import live_page
from alignedserve.dashboard.picture import DeploymentView, JobPicture, JobsPicture, Picture
from alignedserve.errors import StoreError
from alignedserve.gateway.batches import counted
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.middleware import PAGE
from alignedserve.gateway.openai.errors import invalid, overloaded
from alignedserve.gateway.openai.streaming import WatchedStream
from alignedserve.gateway.pages import page_answer
from alignedserve.metrics.recent import SLOT_S, SLOTS_S, RecentRequests, RequestLog
from alignedserve.owner.client import DeploymentClient
from alignedserve.protocol.messages import Figures
from alignedserve.shell.process import own_process
from alignedserve.store.job import Forecast, Job, JobStatus, LineCounts
from alignedserve.store.storage import OpenStorage
from alignedserve.store.store import Store

PICTURE_S = 1.0  # between two pictures
MOST_PAGES = 32  # that are open at once

log = logging.getLogger("alignedserve.gateway")


GatewayHead: TypeAlias = tuple[str, tuple[str, ...], Slo]  # the state, the models and the promise of a gateway


class Dashboard:
    def __init__(
        self, client: DeploymentClient, requests: RequestLog, head: Callable[[], GatewayHead], stalled_page_s: float
    ) -> None:
        """`stalled_page_s` is the time after which a page that reads nothing is cut off."""
        self._client, self._requests, self._head = client, requests, head
        self._stalled_page_s = stalled_page_s
        self._view = DeploymentView()
        self._pages: set[_NewestPicture] = set()
        self._making: asyncio.Task[None] | None = None
        self.jobs: OpenJobs | None = None  # set where the deployment takes jobs
        self.all_requests: Callable[[float], Awaitable[RecentRequests]] = self._own_requests  # set: others own some

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

    async def page(self, http: HttpRequest) -> Response:
        return page_answer(live_page(), http)

    async def events(self, http: HttpRequest) -> Response:
        asked = http.query_params.get("slot_s", f"{SLOT_S:g}")
        slot_s = next((slot_s for slot_s in SLOTS_S if asked == f"{slot_s:g}"), None)
        if slot_s is None:
            raise invalid(
                f"slot_s must be one of {', '.join(f'{slot_s:g}' for slot_s in SLOTS_S)}, not {asked!r:.40}", "slot_s"
            )
        if len(self._pages) >= MOST_PAGES:
            raise overloaded("as many live pages are open as the server serves: close one")
        self.begin()
        page = _NewestPicture(slot_s)
        http.state.end = lambda _: page.put(None)  # where its key counts no more, it connects again and is refused
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        events, kind = self._events(page), "text/event-stream"
        return WatchedStream(events, self._stalled_page_s, media_type=kind, headers=headers)

    async def _events(self, page: _NewestPicture) -> AsyncGenerator[bytes, None]:
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
        self._view.hear(Figures(process=own_process(), member=self._client.name), now)
        self._requests.tick(now)
        asked = {page.slot_s for page in self._pages}
        pictures = dict(zip(asked, await asyncio.gather(*map(self._picture, asked)), strict=True))
        events = {slot_s: b"data: %b\n\n" % picture.to_json() for slot_s, picture in pictures.items()}
        for page in self._pages:
            if page.slot_s in events:  # a page that came meanwhile waits for the next picture
                page.put(events[page.slot_s])

    async def _picture(self, slot_s: float) -> Picture:
        requests, (state, models, promise) = await self.all_requests(slot_s), self._head()
        jobs = None if self.jobs is None else self.jobs.picture()
        return self._view.picture(self._client.now(), state, models, requests, jobs, promise, slot_s)

    async def _own_requests(self, slot_s: float) -> RecentRequests:
        return self._requests.recent(self._client.now(), slot_s)


class _NewestPicture:
    """The newest event for a page. A page that does not take an event in time gets the next one in its place. None ends
    the stream, whatever comes after it."""

    def __init__(self, slot_s: float) -> None:
        """`slot_s` is the length of the slots that the page asked for."""
        self.slot_s = slot_s
        self._event: bytes | None = None
        self._is_over = False
        self._is_new = asyncio.Event()

    def put(self, event: bytes | None) -> None:
        self._is_over |= event is None
        self._event = event
        self._is_new.set()

    async def take(self) -> bytes | None:
        await self._is_new.wait()
        self._is_new.clear()
        event, self._event = self._event, None
        return None if self._is_over else event


_MOST_JOBS = 20  # in a picture, of those that are open and of those that have ended
_SILENT_STORE_S = 5.0


class OpenJobs:
    """The open jobs as they were read last. They are read aside: no picture waits for a store that hangs."""

    def __init__(self, open_storage: OpenStorage, now: Callable[[], float]) -> None:
        self._open_storage, self._now = open_storage, now
        self.known = JobsPicture(trouble="The jobs have not been read yet.")
        self._reading: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def picture(self) -> JobsPicture:
        """Return what is known now, and begin to read again."""
        if self._reading is None or self._reading.done():
            self._reading, self._asked_at = asyncio.create_task(self._read()), self._now()
        silent_s = self._now() - self._asked_at
        if silent_s > _SILENT_STORE_S:
            return replace(self.known, trouble=f"The store has not answered for {silent_s:.0f} s.")
        return self.known

    def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        try:
            storage = await self._open_storage()
            self.known = await recent_jobs(storage.store)
        except StoreError as error:
            self.known = JobsPicture(trouble=f"The store of jobs does not answer: {error}")


async def recent_jobs(store: Store) -> JobsPicture:
    """Return the open jobs whose deadlines are next, and those that ended last. What ends meanwhile is shown once."""
    jobs = sorted(await store.open_jobs(), key=lambda job: job.expires_at)
    pictures = []
    for job in jobs[:_MOST_JOBS]:
        forecast = await store.forecast(job.id)
        pictures.append(_picture(*await counted(store, job), forecast))
    ended = tuple(_picture(job, job.counts) for job in await store.ended_jobs(_MOST_JOBS))
    have_ended = {job.id for job in ended}
    are_open = tuple(job for job in pictures if job.ended_at is None and job.id not in have_ended)
    return JobsPicture(are_open, max(0, len(jobs) - _MOST_JOBS), ended)


def _picture(job: Job, counts: LineCounts, forecast: Forecast | None = None) -> JobPicture:
    is_running = forecast is not None and job.status is JobStatus.IN_PROGRESS
    times = (job.completed_at, job.failed_at, job.expired_at, job.cancelled_at)
    return JobPicture(
        id=job.id,
        owner=job.owner,
        status=job.status.value,
        done=counts.done,
        failed=counts.failed,
        total=job.total,
        created_at=job.created_at,
        deadline=job.expires_at,
        finish_at=forecast.finish_at if forecast is not None and is_running else None,
        is_late=forecast is not None and is_running and forecast.is_late,
        ended_at=None if job.is_open else next((at for at in times if at is not None), None),
    )
