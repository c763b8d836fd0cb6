"""The live page over HTTP: who may see it, what it is sent, and what a page that reads slowly costs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core import Rejection
from alignedserve.dashboard.page import live_page
from alignedserve.dashboard.picture import JobsPicture
from alignedserve.errors import StoreError
from alignedserve.gateway import dashboard
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Scope, hash_key
from alignedserve.gateway.dashboard import MOST_PAGES, Dashboard, OpenJobs, recent_jobs
from alignedserve.owner.client import Overloaded
from alignedserve.protocol.figures import DecodeLengths, Lengths, Stages
from alignedserve.protocol.messages import Figures
from alignedserve.store.blobs import Blobs
from alignedserve.store.job import Endpoint, Forecast, Job, JobStatus, LineResult
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.storage import Storage
from alignedserve.store.store import Holder
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import PATIENT_S, Connection, FakeOwner, Gateway
from tests.gateway.test_explaining import remember
from tests.gateway.test_keys import ANN, BOB, bearer
from tests.samples import request

EVENTS = "/dashboard/events"


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}


@pytest.fixture
def keys() -> KeyRing:
    """Return a key that may see the page and a key that may not."""
    return KeyRing([KeyEntry("ann", hash_key(ANN), frozenset({Scope.DASHBOARD})), KeyEntry("bob", hash_key(BOB))])


@pytest.fixture
def closed(text: TextModel, keys: KeyRing) -> Gateway:
    return Gateway(text, FakeOwner((5,), (2,)), keys=keys)


def test_without_keys_the_page_is_open(text: TextModel) -> None:
    answer = Gateway(text, FakeOwner()).get("/dashboard")
    assert (answer.status_code, answer.text) == (200, live_page())
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("path", ["/dashboard", EVENTS])
def test_with_keys_nobody_sees_it_without_one(closed: Gateway, path: str) -> None:
    answer = closed.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic "), "a browser then asks for the key"
    assert closed.get(path, headers=basic("wrong")).status_code == 401


def test_a_key_needs_the_scope(closed: Gateway) -> None:
    for headers in (bearer, basic):
        assert closed.get("/dashboard", headers=headers(ANN)).status_code == 200
        assert closed.get("/dashboard", headers=headers(BOB)).status_code == 403


def test_a_key_of_the_file_has_the_scope_only_if_it_is_named() -> None:
    assert Scope.DASHBOARD not in KeyEntry("bob", hash_key(BOB)).caller.scopes


@pytest.mark.parametrize("path", ["/v1/models", "/status", "/dashboards"])
def test_a_browser_s_password_opens_nothing_else(closed: Gateway, path: str) -> None:
    """Any page can have a browser send it along; it must be good for reading the live page alone."""
    assert closed.get(path, headers=basic(ANN)).status_code == 401


@pytest.mark.parametrize("sent", ["Basic", "Basic !!!", "Basic " + base64.b64encode(b"nocolon").decode()])
def test_a_broken_password_is_no_key(closed: Gateway, sent: str) -> None:
    assert closed.get("/dashboard", headers={"Authorization": sent}).status_code == 401


def pictures_of(sent: Sequence[Any]) -> list[Any]:
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body" and message["body"]]
    assert all(body.startswith(b"data: ") and body.endswith(b"\n\n") for body in bodies)
    return [json.loads(body[6:]) for body in bodies]


async def until(happened: Any) -> None:
    async def wait() -> None:
        while not happened():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), PATIENT_S)


class Page:
    """A page that is open in a browser."""

    def __init__(self, gateway: Gateway, query: bytes = b"", key: str = "") -> None:
        self.connection = Connection(EVENTS, b"")
        self.connection.scope["query_string"] = query
        self.connection.scope["method"] = "GET"
        self.connection.scope["headers"] = [(b"host", b"localhost")]
        if key:
            self.connection.scope["headers"].append((b"authorization", f"Bearer {key}".encode()))
        connection = self.connection
        self.task = asyncio.create_task(gateway.app(connection.scope, connection.receive, connection.send))

    @property
    def pictures(self) -> list[Any]:
        return pictures_of(self.connection.sent)

    async def close(self) -> None:
        self.connection.left.set()
        await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), PATIENT_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PICTURE_S", 0.005)


def live(gateway: Gateway) -> Dashboard:
    made: Dashboard = gateway.app.state.dashboard
    return made


@pytest.mark.usefixtures("quick")
def test_a_page_is_sent_pictures_of_what_happens(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> list[Any]:
        page = Page(gateway)
        await until(lambda: page.pictures)
        live(gateway).hear(Figures(rt=Stages(pool=3), be=Stages(), member="router"))
        lengths = DecodeLengths(batch=Lengths((100,), (), 1, 0), band=(100, 356))
        live(gateway).hear(Figures(lengths=lengths, member="decode-0"))
        await until(lambda: page.pictures[-1]["workers"][0]["lengths"]["batch"]["num_rt"])
        await page.close()
        live(gateway).end()
        return page.pictures

    first, *_, last = asyncio.run(watched())
    assert (first["state"], first["models"], first["queues"], first["jobs"]) == ("ready", ["demo"], None, None)
    assert [(part["name"], part["is_here"]) for part in first["parts"]] == [("decode-0", True)]
    assert last["queues"]["rt"]["pool"] == 3
    assert last["workers"][0]["lengths"]["batch"] == {"rt": [100], "be": [], "num_rt": 1, "num_be": 0}


@pytest.mark.usefixtures("quick")
def test_a_dead_part_shows_in_the_next_picture(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> list[Any]:
        page = Page(gateway)
        await until(lambda: page.pictures)
        gateway.owner.members = ()
        seen = len(page.pictures)
        await until(lambda: len(page.pictures) > seen + 1)
        await page.close()
        live(gateway).end()
        return page.pictures

    assert [part["is_here"] for part in asyncio.run(watched())[-1]["parts"]] == [False]


@pytest.mark.usefixtures("quick")
def test_what_requests_felt_is_in_the_picture(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5,), (2,)))
    assert gateway.complete().status_code == 200
    gateway.owner.steps = (Overloaded("the queue is full", 1.0, Rejection.QUEUED),)
    assert gateway.complete().status_code == 429

    async def watched() -> Any:
        page = Page(gateway)
        await until(lambda: page.pictures)
        await page.close()
        live(gateway).end()
        return page.pictures[-1]["requests"]

    requests = asyncio.run(watched())
    (ended,), (refused,) = requests["slowest"], requests["refused"]
    assert (ended["service"], ended["output_tokens"], ended["missed"]) == ("rt", 2, "")
    assert (refused["reason"], refused["why"]) == ("queue_full", "the queue is full")
    assert ended["id"] != refused["id"]


@pytest.mark.usefixtures("quick")
def test_each_page_gets_the_time_range_that_it_asks_for(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> list[float]:
        pages = [Page(gateway), Page(gateway, b"slot_s=960")]
        await until(lambda: all(page.pictures for page in pages))
        for page in pages:
            await page.close()
        live(gateway).end()
        return [page.pictures[-1]["slot_s"] for page in pages]

    assert asyncio.run(watched()) == [10.0, 960.0]
    refused = gateway.get(f"{EVENTS}?slot_s=7")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slot_s")


@pytest.mark.usefixtures("quick")
def test_a_page_that_does_not_read_gets_the_newest_picture_and_others_all(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> tuple[list[Any], list[Any]]:
        slow, other = Page(gateway), Page(gateway)
        await until(lambda: slow.pictures)
        slow.connection.reads.clear()
        seen, others = len(slow.pictures), len(other.pictures)
        await until(lambda: len(other.pictures) > others + 20)
        slow.connection.reads.set()
        await until(lambda: len(slow.pictures) > seen + 1)
        await slow.close()
        await other.close()
        live(gateway).end()
        return slow.pictures[: seen + 2], other.pictures

    slow, other = asyncio.run(watched())
    missed = [picture for picture in other if slow[-2]["at"] < picture["at"] < slow[-1]["at"]]
    assert len(missed) > 10, "pictures that it did not take are gone"


@pytest.mark.usefixtures("quick")
def test_a_page_that_hangs_is_cut_off(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(), stalled_client_s=0.05)

    async def watched() -> int:
        page = Page(gateway)
        await until(lambda: page.pictures)
        page.connection.reads.clear()
        await asyncio.wait_for(asyncio.gather(page.task, return_exceptions=True), PATIENT_S)
        left = live(gateway).num_open
        live(gateway).end()
        return left

    assert asyncio.run(watched()) == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_revoked", [True, False], ids=["its key is revoked", "the gateway drains"])
def test_a_page_that_reads_slowly_ends_whatever_picture_comes_next(
    closed: Gateway, keys: KeyRing, is_revoked: bool
) -> None:
    """A picture took the place of the end, which the page had not taken yet."""

    async def watched() -> int:
        page = Page(closed, key=ANN)
        await until(lambda: page.pictures)
        page.connection.reads.clear()
        await asyncio.sleep(0.05)  # some pictures
        if is_revoked:
            keys.take(KeyRing([KeyEntry("bob", hash_key(BOB))]))
            closed.app.state.end_revoked()
        else:
            live(closed).end()
            await asyncio.sleep(0)
            live(closed).begin()  # as for a page that opens meanwhile
        await asyncio.sleep(0.05)
        page.connection.reads.set()
        await asyncio.wait_for(page.task, PATIENT_S)
        left = live(closed).num_open
        live(closed).end()
        return left

    assert asyncio.run(watched()) == 0


@pytest.mark.usefixtures("quick")
def test_pages_are_limited_and_places_come_free(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> list[int]:
        pages = [Page(gateway) for _ in range(MOST_PAGES)]
        await until(lambda: all(page.pictures for page in pages))
        async with gateway.client() as client:
            refused = await client.get(EVENTS)
        for page in pages:
            await page.close()
        left = live(gateway).num_open
        live(gateway).end()
        return [refused.status_code, left]

    assert asyncio.run(watched()) == [503, 0]


@pytest.mark.usefixtures("quick")
def test_the_streams_end_with_the_gateway(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner())

    async def watched() -> Any:
        page = Page(gateway)
        await until(lambda: page.pictures)
        live(gateway).end()
        await asyncio.wait_for(page.task, PATIENT_S)
        return page.connection.sent[-1]

    assert asyncio.run(watched()) == {"type": "http.response.body", "body": b"", "more_body": False}


def test_a_key_with_the_scope_reads_the_story_of_any_request(closed: Gateway) -> None:
    path = "/dashboard/requests/req-1"
    assert closed.get(path).status_code == 401
    assert closed.get(path, headers=basic(BOB)).status_code == 403
    assert closed.get(path, headers=basic(ANN)).status_code == 404, "it may ask, and no part remembers this one"
    remember(closed, request("req-1"))
    told = closed.get(path, headers=basic(ANN))
    assert (told.status_code, told.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert told.text.startswith("req-1: ")


JOB = Job("batch_1", "ann", "file-1", Endpoint.CHAT, "24h", 1_000, 87_400, JobStatus.VALIDATING)


def test_open_jobs_come_with_their_progress_the_most_urgent_first(tmp_path: Path) -> None:
    async def shown() -> JobsPicture:
        store = await SqliteStore.open(tmp_path / "jobs.sqlite")
        try:
            later = replace(JOB, id="batch_2", expires_at=90_000)
            failed = replace(JOB, id="batch_3")
            for job in (later, JOB, failed):
                await store.add_job(job)
            await store.save_job(failed.move(JobStatus.FAILED, 1_003, kept_until=9_000))
            running = await store.save_job(JOB.move(JobStatus.IN_PROGRESS, 1_001, total=9))
            fence = await store.lease(Holder("jobs-0", 1), 60.0)
            assert fence is not None
            await store.add_results(running.id, [LineResult(1, True, "{}"), LineResult(2, False, "{}")], fence)
            await store.set_forecasts({running.id: Forecast(1_002.0, 5.0, 99_000.0, True)})
            return await recent_jobs(store)
        finally:
            await store.close()

    jobs = asyncio.run(shown())
    first, second = jobs.open
    assert [(job.id, job.status, job.ended_at) for job in jobs.ended] == [("batch_3", "failed", 1_003)]
    assert (first.id, first.owner, first.status, first.done, first.failed) == ("batch_1", "ann", "in_progress", 2, 1)
    assert (first.total, first.deadline, first.finish_at, first.is_late) == (9, 87_400, 99_000.0, True)
    assert (second.id, second.status, second.total) == ("batch_2", "validating", 0)


@pytest.mark.parametrize("moment", ["counts", "ended_jobs"])
def test_a_job_that_ends_while_it_is_read_is_shown_once_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It was shown as running, without a line done or beside itself as ended."""
    works = getattr(SqliteStore, moment)

    async def shown() -> JobsPicture:
        store = await SqliteStore.open(tmp_path / "jobs.sqlite")
        try:
            await store.add_job(JOB)
            running = await store.save_job(JOB.move(JobStatus.IN_PROGRESS, 1_001, total=1))
            fence = await store.lease(Holder("jobs-0", 1), 60.0)
            assert fence is not None
            await store.add_results(running.id, [LineResult(1, True, "{}")], fence)

            async def late(store: SqliteStore, *given: Any) -> Any:
                monkeypatch.setattr(SqliteStore, moment, works)
                ended = replace(running, counts=await store.counts(running.id))
                ended = ended.move(JobStatus.FINALIZING, 1_002).move(JobStatus.COMPLETED, 1_003, kept_until=9_000)
                await store.save_job(ended)
                return await works(store, *given)

            monkeypatch.setattr(SqliteStore, moment, late)
            return await recent_jobs(store)
        finally:
            await store.close()

    jobs = asyncio.run(shown())
    assert jobs.open == ()
    assert [(job.id, job.status, job.done) for job in jobs.ended] == [("batch_1", "completed", 1)]


def test_a_store_that_hangs_keeps_no_picture_waiting() -> None:
    async def shown() -> list[str]:
        async def hang() -> Storage:
            await asyncio.Event().wait()
            raise AssertionError

        now = 0.0
        jobs = OpenJobs(hang, lambda: now)
        troubles = [jobs.picture().trouble]
        await asyncio.sleep(0)
        now = 7.0
        troubles.append(jobs.picture().trouble)
        jobs.end()
        return troubles

    assert asyncio.run(shown()) == ["The jobs have not been read yet.", "The store has not answered for 7 s."]


def test_a_store_that_does_not_answer_says_so_until_it_does(tmp_path: Path) -> None:
    def is_said(expected: str, trouble: str) -> bool:
        return expected in trouble if expected else not trouble

    async def shown() -> list[str]:
        store = await SqliteStore.open(tmp_path / "jobs.sqlite")
        failures = [StoreError("it is away")]

        async def opened() -> Storage:
            if failures:
                raise failures.pop()
            return Storage(store, Blobs(str(tmp_path)), Holder("gateway-0", 1))

        jobs, troubles = OpenJobs(opened, lambda: 0.0), []
        for expected in ("away", ""):
            jobs.picture()
            await until(lambda expected=expected: is_said(expected, jobs.known.trouble))
            troubles.append(jobs.known.trouble)
        await store.close()
        return troubles

    assert asyncio.run(shown()) == ["The store of jobs does not answer: it is away", ""]
