"""Tests of files and batches, as clients see them, from the upload to the results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from redis.asyncio import Redis

from alignedserve.config.config import Config
from alignedserve.config.prices import Prices
from alignedserve.core import FinishReason, Spent
from alignedserve.errors import StoreError
from alignedserve.gateway.batches import RUNNER_PATIENCE_S
from alignedserve.jobs import actor, answering
from alignedserve.jobs.actor import JobRunner
from alignedserve.jobs.answering import Answering
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Culprit, Delivered, GivenUp, Overloaded
from alignedserve.store.job import Job, LineCounts, LineResult
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Holder, Store
from alignedserve.text.text_model import TextModel
from tests.exposition import value
from tests.gateway.conftest import MODEL, MOST, FakeOwner
from tests.jobs.conftest import URL, Service, ended, line, rows, sqlite_only, submit, until, upload

HELLO = "Hello, naïve 😀!"
OTHER = Holder("host/other/jobs", 1, "other")


def test_openais_client_drives_it_from_end_to_end(service: Service) -> None:
    longest: dict[str, str] = {"k" * 64: "v" * 512}

    async def drive() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(service.app)) as http, service.running():
            client = AsyncOpenAI(api_key="ann", base_url="http://localhost/v1", http_client=http, max_retries=0)
            file = await client.files.create(file=("ä.jsonl", line("a") + b"\n" + line("b")), purpose="batch")
            assert (file.filename, file.bytes, file.purpose) == ("ä.jsonl", len(line("a")) * 2 + 1, "batch")
            assert await client.files.retrieve(file.id) == file
            assert [listed.id async for listed in client.files.list(purpose="batch")] == [file.id]
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata=longest
            )
            assert (batch.status, batch.metadata) == ("validating", longest)
            while batch.status != "completed":
                assert batch.output_file_id is None
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert batch.usage is not None
            assert batch.request_counts.model_dump() == {"completed": 2, "failed": 0, "total": 2}
            assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
            assert (batch.model, batch.error_file_id) == ("demo", None)
            assert batch.output_file_id is not None
            output = (await client.files.content(batch.output_file_id)).text.splitlines()
            answers = {row["custom_id"]: row for row in map(json.loads, output)}
            assert sorted(answers) == ["a", "b"]
            for row in answers.values():
                answer = ChatCompletion.model_validate(row["response"]["body"])
                assert (row["response"]["status_code"], row["error"]) == (200, None)
                assert answer.choices[0].message.content == HELLO
            assert [listed.id async for listed in client.batches.list()] == [batch.id]
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(file.id)

    service.run(drive)


def test_lines_count_in_the_metrics_as_requests_do(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client, service.running():
            await ended(client, (await submit(client, b"\n".join([line("a"), line("b")])))["id"])

    service.run(check)
    shown = "".join(service.metrics.blocks())
    assert value(shown, 'alignedserve:e2e_request_latency_seconds_count{class="be"}') == 2
    assert value(shown, 'alignedserve:slo_attainment{class="be",kind="jct",tier="flex"}') == 1


def test_a_batch_has_a_price_also_after_a_restart_with_others(text: TextModel, config: Config) -> None:
    used = Delivered((5,), FinishReason.LENGTH, spent=Spent(36.0, 3.6e6, "rapl"))
    service = Service(text, FakeOwner(used), config, prices=Prices(second=0.001, joule=1e-7))
    batches = list[Any]()

    async def run() -> None:
        async with service.client() as client, service.running():
            batches.append(await ended(client, (await submit(client, line("a") + b"\n" + line("b")))["id"]))
            for row in await rows(client, batches[0]["output_file_id"]):
                assert row["response"]["body"]["usage"]["cost"]["price"] == pytest.approx(0.396)

    service.run(run)
    again = Service(text, FakeOwner(), config, prices=Prices(second=0.002))

    async def look() -> None:
        async with again.client() as client:
            batches.append(await ended(client, batches[0]["id"]))

    again.run(look)
    assert [batch["usage"]["cost"]["price"] for batch in batches] == pytest.approx([0.792, 0.144])


def test_an_invalid_file_fails_as_a_whole_with_line_numbers(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client, service.running():
            data = b"\n".join([line("a"), b"{", line("a"), line("c", stream=True)])
            batch = await ended(client, (await submit(client, data))["id"])
            assert batch["status"] == "failed"
            assert [(problem["line"], problem["code"]) for problem in batch["errors"]["data"]] == [
                (2, "invalid_json"),
                (3, "duplicate_custom_id"),
                (4, "stream_not_supported"),
            ]
            assert not {"output_file_id", "error_file_id"} & batch.keys()
            assert service.owner.opened == []

    service.run(check)


async def expire(store: Store, id: str) -> None:
    """Make the batch expire now: the shortest window that a client may ask for has ten minutes."""
    job = await store.job("ann", id)
    assert job is not None
    await store.save_job(replace(job, expires_at=int(time.time())))


class Sorted(FakeOwner):
    """An owner that plays another script for some prompts."""

    def __init__(self, text: TextModel, usual: tuple[Any, ...], **scripts: tuple[Any, ...]) -> None:
        super().__init__(*usual)
        self._text, self._scripts = text, scripts

    def steps_of(self, request: Any) -> tuple[Any, ...]:
        prompt = self._text.decode(request.prompt)
        return next((script for word, script in self._scripts.items() if word in prompt), self.steps)


class Panic(BaseException):
    """What libraries in Rust raise where they panic is no Exception."""


@sqlite_only
@pytest.mark.parametrize("place", ["read_checked_line", "answered_line"])
@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
def test_a_line_at_which_the_job_runner_fails_fails_alone(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch, place: str, fault: Any
) -> None:
    service, works = Service(text, FakeOwner(hello), config), getattr(actor, place)

    def fails_once(*given: Any) -> Any:
        if "deadly" in repr(given):
            raise fault
        return works(*given)

    monkeypatch.setattr(actor, place, fails_once)

    async def check() -> None:
        lines = [line("good"), line("deadly"), line("better")]
        async with service.client() as client, service.running():
            batch = await ended(client, (await submit(client, b"\n".join(lines)))["id"])
            assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
            (failed,) = await rows(client, batch["error_file_id"])
            assert failed["error"]["code"] == "internal_error"
            assert "line 2" in failed["error"]["message"]

    service.run(check)


@sqlite_only
@pytest.mark.parametrize(
    ("module", "place", "ends"),
    [(actor, "read_checked_line", False), (actor, "answered_line", False), (answering, "make_requests", True)],
)
def test_a_line_that_hangs_in_a_thread_holds_up_no_other(
    text: TextModel,
    hello: tuple[int, ...],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    place: str,
    ends: bool,
) -> None:
    """It held its thread for ever, and its batch never ended. Reading and writing are tried again: disks come back."""
    monkeypatch.setattr("alignedserve.shell.bounded_threads.WORK_S", 0.2)
    monkeypatch.setattr(actor, "RETRY_S", 0.01)
    service, works = Service(text, FakeOwner(hello), config), getattr(module, place)
    hangs, is_over = Event(), Event()

    def hangs_once(*given: Any) -> Any:
        if "stuck" in repr(given) and not hangs.is_set():
            hangs.set()
            is_over.wait()
        return works(*given)

    monkeypatch.setattr(module, place, hangs_once)

    async def check() -> None:
        lines = [line("good"), line("stuck", "stuck"), line("better")]
        async with service.client() as client, service.running():
            try:
                batch = await ended(client, (await submit(client, b"\n".join(lines)))["id"])
            finally:
                is_over.set()
            assert batch["request_counts"] == {"total": 3, "completed": 3 - ends, "failed": int(ends)}
            errors = await rows(client, batch.get("error_file_id"))
            assert [row["response"]["body"]["error"]["code"] for row in errors] == ["body_takes_too_long"] * ends
            assert hangs.is_set()

    service.run(check)


@sqlite_only
@pytest.mark.parametrize("place", ["_check_file", "_read_places"])
def test_a_file_whose_reading_hangs_is_read_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    monkeypatch.setattr("alignedserve.shell.bounded_threads.WORK_S", 0.2)
    is_over, works, hangs = Event(), getattr(JobRunner, place), list[bool]()

    def hangs_once(*given: Any) -> Any:
        if not hangs:
            hangs.append(True)
            is_over.wait()
        return works(*given)

    monkeypatch.setattr(JobRunner, place, hangs_once)

    async def check() -> None:
        async with service.client() as client, service.running():
            try:
                batch = await ended(client, (await submit(client, line("a")))["id"])
            finally:
                is_over.set()
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    service.run(check)
    assert hangs
    (waits,) = [message for message in caplog.messages if " waits: " in message]
    assert waits.endswith("and gives it up")


@sqlite_only
def test_a_batch_that_ends_while_it_is_looked_at_has_its_counts(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums go as it ends: a look that came between its record and its sums saw no line done."""
    counts, looking, has_ended = SqliteStore.counts, list[str](), asyncio.Event()

    async def late(store: SqliteStore, job: str) -> LineCounts:
        looking.append(job)
        await has_ended.wait()
        return await counts(store, job)

    async def check() -> None:
        async with service.client() as client:
            batch = await submit(client, line("a"))
            monkeypatch.setattr(SqliteStore, "counts", late)
            looks = [asyncio.create_task(client.get(path)) for path in (f"/v1/batches/{batch['id']}", "/v1/batches")]
            while len(looking) < len(looks):
                await asyncio.sleep(0.01)
            monkeypatch.setattr(SqliteStore, "counts", counts)
            async with service.running():
                await ended(client, batch["id"])
            has_ended.set()
            one, (of_all,) = (await looks[0]).json(), (await looks[1]).json()["data"]
            assert one["request_counts"] == of_all["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    service.run(check)


@sqlite_only
def test_lines_that_fail_are_in_the_error_file_and_cost_no_other_its_answer(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    usual = (hello,)
    scripts: dict[str, tuple[Any, ...]] = {"lost": (GivenUp("nothing came of it", 0.0),)}
    scripts |= {"broken": (RuntimeError("unforeseen"),), "deadly": (Culprit("3 workers ended"),)}
    service = Service(text, Sorted(text, usual, **scripts), config)

    async def check() -> None:
        lines = [line("good"), line("lost", "lost"), line("broken", "broken"), line("deadly", "deadly")]
        lines.append(line("bad", temperature=9))
        async with service.client() as client, service.running():
            batch = await ended(client, (await submit(client, b"\n".join(lines)))["id"])
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
            assert [row["custom_id"] for row in await rows(client, batch["output_file_id"])] == ["good"]
            errors = {row["custom_id"]: row["response"] for row in await rows(client, batch["error_file_id"])}
            assert {name: error["status_code"] for name, error in errors.items()} == {
                "lost": 503,
                "broken": 500,
                "deadly": 500,
                "bad": 400,
            }
            assert errors["bad"]["body"]["error"]["param"] == "temperature"
            prompts = [text.decode(request.prompt) for request in service.owner.opened]
            assert sum("lost" in prompt for prompt in prompts) == 2  # the first try and one retry
            assert sum("deadly" in prompt for prompt in prompts) == 1, "another try would end other workers"

    service.run(check)


@sqlite_only
def test_a_write_that_hung_while_the_lease_was_lost_drops_no_result_of_the_next(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the first results of the next lease for those that it had written, and their lines never ended."""
    add, lease = SqliteStore.add_results, SqliteStore.lease
    hangs, has_more, is_away = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang_once(store: SqliteStore, job: str, results: Sequence[LineResult], fence: int) -> int:
        if not hangs.is_set():
            hangs.set()
            second.clear()
            await has_more.wait()
        return await add(store, job, results, fence)

    async def fail_once(store: SqliteStore, holder: Holder, for_s: float) -> int | None:
        if hangs.is_set() and not is_away.is_set():
            is_away.set()
            raise StoreError("away")
        return await lease(store, holder, for_s)

    monkeypatch.setattr(SqliteStore, "add_results", hang_once)
    monkeypatch.setattr(SqliteStore, "lease", fail_once)
    monkeypatch.setattr("alignedserve.jobs.actor.RENEW_S", 0.05)
    monkeypatch.setattr("alignedserve.jobs.actor.RETRY_S", 0.05)
    first, second = asyncio.Event(), asyncio.Event()
    second.set()
    service = Service(text, Sorted(text, (hello,), first=(first, hello), second=(second, hello)), config)

    async def check() -> None:
        async with service.client() as client, service.running() as runner:
            batch = await submit(client, b"\n".join([line("a", "first"), line("b", "second")]))
            await is_away.wait()  # the result of the second line hangs, and the next lease runs both again
            while len(service.owner.opened) < 4:
                await asyncio.sleep(0.01)
            for number, gate in enumerate((first, second), 1):
                gate.set()
                while runner.held["results"] < number:
                    await asyncio.sleep(0.01)
            has_more.set()
            batch = await ended(client, batch["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}

    service.run(check)


@sqlite_only
def test_what_the_router_refuses_for_want_of_room_waits_and_is_answered(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    class Full(FakeOwner):
        def steps_of(self, request: Any) -> tuple[Any, ...]:
            return (Overloaded("full", 0.05),) if len(self.opened) <= 10 else (hello,)

    service = Service(text, Full(), config)

    async def check() -> None:
        async with service.client() as client, service.running():
            batch = await ended(client, (await submit(client, b"\n".join(map(line, "abcdef"))))["id"])
            assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}

    service.run(check)


def test_a_cancelled_batch_keeps_what_is_done(text: TextModel, hello: tuple[int, ...], config: Config) -> None:
    gate = asyncio.Event()
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), config)

    async def check() -> None:
        data = b"\n".join([line("fast"), line("slow-1", "slow"), line("slow-2", "slow")])
        async with service.client() as client, service.running():
            batch = await submit(client, data)
            await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
            cancelling = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
            assert cancelling["status"] == "cancelling"
            batch = await ended(client, batch["id"])
            assert batch["status"] == "cancelled"
            assert [row["custom_id"] for row in await rows(client, batch["output_file_id"])] == ["fast"]
            errors = await rows(client, batch["error_file_id"])
            assert sorted(row["custom_id"] for row in errors) == ["slow-1", "slow-2"]
            assert {(row["response"], row["error"]["code"]) for row in errors} == {(None, "batch_cancelled")}
            assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 0}, "those did not run"
            assert service.owner.open_now == set()
            again = await client.post(f"/v1/batches/{batch['id']}/cancel")
            assert again.json()["status"] == "cancelled"

    service.run(check)


def test_a_batch_that_has_ended_is_kept_as_long_as_its_files_and_then_goes_with_them(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    service = Service(text, FakeOwner(hello), replace(config, jobs=replace(config.jobs, keep_days=2.0)))

    async def lives_s(client: httpx.AsyncClient, id: str) -> int:
        file = (await client.get(f"/v1/files/{id}")).json()
        return int(file["expires_at"] - file["created_at"])

    async def check() -> None:
        async with service.client() as client:
            storage, jobs = await service.storage(), list[Job]()
            async with service.running():
                for expires in ({}, *({"output_expires_after": after(seconds)} for seconds in (3_600, 259_200))):
                    batch = await ended(client, (await submit(client, line("a"), **expires))["id"])
                    job = await storage.store.job("ann", batch["id"])
                    assert job is not None
                    assert job.kept_until is not None
                    assert job.kept_until - batch["completed_at"] >= await lives_s(client, batch["output_file_id"])
                    jobs.append(job)
            kept_s = [round((job.kept_until or 0) - (job.completed_at or 0), -3) for job in jobs]
            assert kept_s == [173_000, 173_000, 259_000]
            assert [await lives_s(client, job.output_file_id or "") for job in jobs] == [172_800, 3_600, 259_200]
            for job in jobs[:2]:  # as if two days had passed
                await storage.store.save_job(replace(job, kept_until=1))
                assert (await client.get(f"/v1/batches/{job.id}")).status_code == 404
                assert (await client.post(f"/v1/batches/{job.id}/cancel")).status_code == 404
            assert [listed["id"] for listed in (await client.get("/v1/batches")).json()["data"]] == [jobs[2].id]
            async with service.running():
                while await storage.store.job("ann", jobs[1].id):
                    await asyncio.sleep(0.02)
            assert [tree["id"] async for kind, tree in storage.store.records() if kind == "job"] == [jobs[2].id]

    def after(seconds: int) -> dict[str, Any]:
        return {"anchor": "created_at", "seconds": seconds}

    service.run(check)


@sqlite_only
def test_a_batch_with_removed_bytes_ends_all_the_same(text: TextModel, hello: tuple[int, ...], config: Config) -> None:
    gate = asyncio.Event()
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), config)

    async def check() -> None:
        async with service.client() as client:
            storage = await service.storage()
            begun, fresh, gone = [await submit(client, b"\n".join([line("a"), line("b", "slow")])) for _ in range(3)]
            await asyncio.to_thread(storage.blobs.remove, fresh["input_file_id"])
            await storage.store.remove_file("ann", gone["input_file_id"])
            async with service.running():
                for lacking in (fresh, gone):
                    failed = await ended(client, lacking["id"])
                    assert [problem["code"] for problem in failed["errors"]["data"]] == ["file_not_found"]
                await until(client, begun["id"], lambda state: state["request_counts"]["completed"] == 1)
                await asyncio.to_thread(storage.blobs.remove, begun["input_file_id"])
                await client.post(f"/v1/batches/{begun['id']}/cancel")
                batch = await ended(client, begun["id"])
            assert batch["status"] == "cancelled"
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
            assert [row["custom_id"] for row in await rows(client, batch["output_file_id"])] == ["a"]

    service.run(check)


@sqlite_only
def test_lines_whose_bytes_are_gone_end_with_that_and_no_other_batch_waits(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    gate = asyncio.Event()
    jobs = replace(config.jobs, most_open=2)
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), replace(config, jobs=jobs))

    async def check() -> None:
        async with service.client() as client, service.running():
            begun = await submit(client, b"\n".join(line(str(number), "slow") for number in range(5)))
            while len(service.owner.opened) < 2:
                await asyncio.sleep(0.01)
            storage = await service.storage()
            await asyncio.to_thread(storage.blobs.remove, begun["input_file_id"])
            gate.set()
            second = await ended(client, (await submit(client, line("a")))["id"])
            assert second["request_counts"]["completed"] == 1
            batch = await ended(client, begun["id"])
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
            errors = await rows(client, batch["error_file_id"])
            assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [(None, "file_not_found")] * 3

    service.run(check)


@sqlite_only
def test_a_batch_without_room_says_so_early_and_keeps_what_is_done(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    """At most four lines a second are opened, and there are lines for minutes, in a window of one minute: the server
    says within seconds that the batch will be late."""

    class Slow(FakeOwner):
        async def _play(self, request: Any) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(1.0)
            async for delivered in super()._play(request):
                yield delivered

    service = Service(text, Slow(hello), replace(config, jobs=replace(config.jobs, most_open=4)))

    async def check() -> None:
        async with service.client() as client:
            batch = await submit(client, b"\n".join(line(str(number)) for number in range(480)))
            store = (await service.storage()).store
            job = await store.job("ann", batch["id"])
            assert job is not None
            await store.save_job(replace(job, expires_at=job.created_at + 60))
            async with service.running():
                while (got := await client.get(f"/v1/batches/{batch['id']}")).headers.get("x-batch-late") != "true":
                    assert got.json()["status"] in ("validating", "in_progress"), "it never said so"
                    await asyncio.sleep(0.05)
                assert int(got.headers["x-batch-predicted-finish-at"]) > batch["created_at"] + 60
                assert float(got.headers["x-batch-tokens-per-s"]) > 0
                await expire(store, batch["id"])
                batch = await ended(client, batch["id"])
            assert batch["status"] == "expired"
            done = await rows(client, batch["output_file_id"])
            assert 0 < len(done) == batch["request_counts"]["completed"]
            assert len(done) + len(await rows(client, batch["error_file_id"])) == 480

    service.run(check)


@sqlite_only
def test_files_as_no_editor_makes_them(service: Service) -> None:
    """The files come by HTTP; tests/jobs/test_lines.py has more cases."""
    long = line("long", "x" * 10_000_000)

    async def check() -> None:
        async with service.client() as client, service.running():
            wrong = b"\n".join([line("a"), b"\0" * 9, long, b'{"custom_id": "\xff"}', line("z")])
            failed = await ended(client, (await submit(client, wrong))["id"])
            assert [(problem["line"], problem["code"]) for problem in failed["errors"]["data"]] == [
                (2, "invalid_json"),
                (3, "line_too_long"),
                (4, "invalid_json"),
            ]
            right = b"\xef\xbb\xbf" + b"\r\n".join([line("a"), b"", line("nul", "a\0b"), line("last")])
            done = await ended(client, (await submit(client, right))["id"])
            assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
            ids = [row["custom_id"] for row in await rows(client, done["output_file_id"])]
            assert sorted(ids) == ["a", "last", "nul"]

    service.run(check)


@pytest.mark.parametrize("config", ["redis"], indirect=True)  # the test above uses SQLite
def test_an_expired_batch_keeps_what_is_done(text: TextModel, hello: tuple[int, ...], config: Config) -> None:
    gate = asyncio.Event()
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), config)

    async def check() -> None:
        data = b"\n".join([line("fast"), line("slow", "slow")])
        async with service.client() as client:
            batch = await submit(client, data)
            async with service.running():
                await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
                await expire((await service.storage()).store, batch["id"])
                batch = await ended(client, batch["id"])
            assert batch["status"] == "expired"
            assert [row["custom_id"] for row in await rows(client, batch["output_file_id"])] == ["fast"]
            errors = await rows(client, batch["error_file_id"])
            assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [("slow", "batch_expired")]

    service.run(check)


def test_a_runner_that_starts_anew_goes_on_where_the_last_runner_was(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    gate = asyncio.Event()
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), config)

    async def check() -> None:
        async with service.client() as client:
            lines = [line("fast"), *(line(f"slow-{number}", "slow") for number in range(20))]
            batch = await submit(client, b"\n".join(lines))
            async with service.running():
                await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
            gate.set()
            async with service.running():
                batch = await ended(client, batch["id"])
            assert batch["request_counts"] == {"total": 21, "completed": 21, "failed": 0}
            ids = [row["custom_id"] for row in await rows(client, batch["output_file_id"])]
            assert sorted(ids) == sorted(["fast", *(f"slow-{number}" for number in range(20))])
            prompts = [text.decode(request.prompt) for request in service.owner.opened]
            assert sum("Hi" in prompt for prompt in prompts) == 1  # a line that had a result did not run again

    service.run(check)


@sqlite_only
def test_requests_of_lines_are_best_effort_and_share_kv_with_their_key_alone(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client, service.running():
            done = await ended(client, (await submit(client, line("a")))["id"])
            assert (await client.post(f"/v1/batches/{done['id']}/cancel")).status_code == 409
            await client.post(URL, json=json.loads(line("a"))["body"])
        of_line, of_chat = service.owner.opened
        assert (of_line.service.value, of_chat.service.value) == ("be", "rt")
        assert of_line.salt == of_chat.salt != ""
        assert 86_000 < of_line.slo.jct_s <= 86_400

    service.run(check)


def test_nobody_sees_anything_of_anothers(service: Service) -> None:
    async def check() -> None:
        async with service.client("ann") as ann, service.client("bob") as bob:
            batch = await submit(ann, line("a"))
            file = batch["input_file_id"]
            for method, path in (
                ("GET", f"/v1/files/{file}"),
                ("DELETE", f"/v1/files/{file}"),
                ("GET", f"/v1/files/{file}/content"),
                ("GET", f"/v1/batches/{batch['id']}"),
                ("POST", f"/v1/batches/{batch['id']}/cancel"),
            ):
                of_another = await bob.request(method, path)
                nobodys = await bob.request(method, path.replace(file, "file-0").replace(batch["id"], "batch_0"))
                assert of_another.status_code == nobodys.status_code == 404
                same = of_another.text.replace(file, "file-0").replace(batch["id"], "batch_0")
                assert same == nobodys.text
            for path in ("/v1/files", "/v1/batches"):
                assert (await bob.get(path)).json()["data"] == []
                after = file if "files" in path else batch["id"]
                assert (await bob.get(path, params={"after": after})).status_code == 400
            asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
            assert (await bob.post("/v1/batches", json=asked)).status_code == 404
            assert (await ann.get(f"/v1/batches/{batch['id']}")).json()["status"] == "validating"
        async with service.client("carl") as stranger:
            assert (await stranger.get("/v1/files")).status_code == 401

    service.run(check)


@sqlite_only
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "5m"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "1.5h"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"endpoint": "/v1/score"}, "endpoint"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 64),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"weight": 0}, "weight"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_a_batch_cannot_be_is_refused_by_name(service: Service, fields: dict[str, Any], param: str) -> None:
    async def check() -> None:
        async with service.client() as client:
            file = (await upload(client, line("a"))).json()
            asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "10m", **fields}
            refused = await client.post("/v1/batches", json=asked)
            assert refused.status_code == 400, refused.text
            assert param.startswith(refused.json()["error"]["param"].rstrip("."))

    service.run(check)


@sqlite_only
def test_a_store_that_is_away_for_a_while_costs_nothing_but_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alignedserve.store.sqlite_store import SqliteStore

    write, times = SqliteStore._write, 0

    async def sometimes(self: SqliteStore, work: Any) -> Any:
        nonlocal times
        times += 1
        if times % 3 == 0:
            raise StoreError("the store is away")
        return await write(self, work)

    async def check() -> None:
        async with service.client() as client:
            batch = await submit(client, b"\n".join(map(line, "abcdefghij")))
            monkeypatch.setattr(SqliteStore, "_write", sometimes)
            monkeypatch.setattr("alignedserve.jobs.actor.RETRY_S", 0.01)
            async with service.running():
                batch = await ended(client, batch["id"])
            monkeypatch.undo()
            assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
            assert len(await rows(client, batch["output_file_id"])) == 10

    service.run(check)
    assert times > 3


def test_a_password_that_changes_meanwhile_is_said_once_and_costs_nothing_but_time(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if config.jobs.store == "sqlite":
        return  # it has no password
    monkeypatch.setattr("alignedserve.jobs.actor.RETRY_S", 0.01)
    gate = asyncio.Event()
    service = Service(text, Sorted(text, (hello,), slow=(gate, hello)), config)
    admin = Redis.from_url(config.jobs.store)

    async def check() -> None:
        async with service.client() as client, service.running():
            lines = [line("fast"), *(line(f"slow-{number}", "slow") for number in range(20))]
            batch = await submit(client, b"\n".join(lines))
            await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
            await admin.config_set("requirepass", "other")
            await admin.execute_command("CLIENT", "KILL", "SKIPME", "yes")
            refused = "batch jobs wait: "
            while not (said := [message for message in caplog.messages if message.startswith(refused)]):
                await asyncio.sleep(0.01)
            gate.set()
            assert "refuses the user or password in jobs.store" in said[0]
            answer = await client.get(f"/v1/batches/{batch['id']}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            failed = (await admin.info("commandstats"))["cmdstat_hello"]["failed_calls"]
            while (await admin.info("commandstats"))["cmdstat_hello"]["failed_calls"] < failed + 10:
                await asyncio.sleep(0.01)  # it goes on trying
            assert [message for message in caplog.messages if message.startswith(refused)] == said
            await admin.config_set("requirepass", "")
            batch = await ended(client, batch["id"])
            assert batch["request_counts"] == {"total": 21, "completed": 21, "failed": 0}
            assert len(await rows(client, batch["output_file_id"])) == 21
        await admin.aclose()

    service.run(check)


@sqlite_only
def test_without_a_job_runner_new_jobs_are_refused_for_a_while_and_all_else_goes_on(service: Service) -> None:
    async def drive() -> None:
        async with service.client() as client:
            batch = await submit(client, line("a"))
            service.runner_away_s = RUNNER_PATIENCE_S + 1
            asked = {"input_file_id": batch["input_file_id"], "endpoint": URL, "completion_window": "24h"}
            refused = await client.post("/v1/batches", json=asked)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
            assert refused.json()["error"]["code"] == "not_ready"
            assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "validating"
            assert (await upload(client, line("b"))).status_code == 200
            service.runner_away_s = 0.0
            async with service.running():
                assert (await client.post("/v1/batches", json=asked)).status_code == 200
                assert (await ended(client, batch["id"]))["status"] == "completed"

    service.run(drive)


def test_a_job_runner_of_another_model_leaves_the_batches_alone(
    text: TextModel, hello: tuple[int, ...], config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Both deployments began before either had the store, so that neither was refused at its start."""
    service = Service(text, FakeOwner(hello), config)
    other = JobRunner(Answering(service.owner, text, ("other",), MOST, RequestMetrics()), config, OTHER, time.time)

    async def check() -> None:
        async with service.client() as client:
            async with service.running():
                await ended(client, (await submit(client, line("a")))["id"])
                serving = asyncio.create_task(other.serve())
                while not any("serves demo with it" in message for message in caplog.messages):
                    await asyncio.sleep(0.01)
            waiting = await submit(client, line("a"))
            async with service.running():
                assert (await ended(client, waiting["id"]))["status"] == "completed"
            other.stop()
            await serving

    service.run(check)


@sqlite_only
@pytest.mark.parametrize("other", [OTHER, replace(OTHER, model=MODEL, keys="others")])
def test_no_batch_is_taken_while_a_deployment_with_another_model_or_other_keys_has_the_store(
    service: Service, other: Holder
) -> None:
    """Its job runner would fail or cancel them."""

    async def check() -> None:
        store = (await service.storage()).store
        async with service.client() as client:
            file = (await upload(client, line("a"))).json()["id"]
            bodies = {
                "/v1/batches": {"input_file_id": file, "endpoint": URL, "completion_window": "24h"},
                "/v1/responses": {"model": MODEL, "input": "Hi", "background": True},
            }
            await store.lease(other, 1_000)
            for route, body in bodies.items():
                refused = await client.post(route, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
                assert "another deployment has the store" in refused.json()["error"]["message"]
                assert refused.headers["retry-after"]
            assert await store.open_jobs() == []
            await store.release(other)
            if other.model != MODEL:  # its job runner would count the batch as one of the other model
                assert (await client.post("/v1/batches", json=bodies["/v1/batches"])).status_code == 503
            async with service.running():
                for route, body in bodies.items():
                    while (taken := await client.post(route, json=body)).status_code == 503:
                        await asyncio.sleep(0.01)
                    assert taken.status_code == 200, taken.text

    service.run(check)
