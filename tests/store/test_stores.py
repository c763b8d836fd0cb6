"""Tests that hold for every store, whatever its kind."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.errors import Conflict, Fenced, StoreUnfit
from alignedserve.store import redis_store, sqlite_store
from alignedserve.store.job import Endpoint, Forecast, Job, JobStatus, LineCounts, LineResult, Problem
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import (
    Holder,
    Listing,
    ListPage,
    OverQuota,
    OwnerUsage,
    Purpose,
    Store,
    StoredFile,
    StoredResponse,
)
from tests.store.conftest import Kind

ME, OTHER = "key-a", "key-b"
RUNNER = Holder("runner", 1)


def stored(number: int, owner: str = ME, purpose: Purpose = Purpose.BATCH, expires_at: int | None = None) -> StoredFile:
    return StoredFile(f"file-{number}", owner, f"{number} ä.jsonl", 10 + number, purpose, 1_000 + number, expires_at)


def job(number: int, owner: str = ME) -> Job:
    return Job(f"batch_{number}", owner, "file-1", Endpoint.CHAT, "24h", 1_000, 87_400, metadata={"a": "ü"})


def result(line: int, is_ok: bool = True, text: str = '{"custom_id": "\\u00fc\\n"}') -> LineResult:
    return LineResult(line, is_ok, text, 10, 4, 3, 2, 7, 6, 5)


def ids(listing: Listing[Any] | None) -> list[str]:
    assert listing is not None
    return [record.id for record in listing.records]


def test_what_is_written_is_read_by_the_next_store_that_opens(kind: Kind) -> None:
    moved = job(1).move(JobStatus.FAILED, 1_234.9, problems=(Problem("invalid_json", "no", 7, "body"),))

    async def write(store: Store) -> None:
        await store.add_file(stored(1, expires_at=5_000))
        await store.add_job(job(1))
        await store.save_job(moved)

    async def read(store: Store) -> None:
        assert await store.file(ME, "file-1") == stored(1, expires_at=5_000)
        assert await store.job(ME, "batch_1") == replace(moved, revision=1)
        assert moved.failed_at == 1_234

    kind.run(write)
    kind.run(read)


def test_nobody_sees_what_is_another_owners(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_file(stored(1))
        await store.add_job(job(1))
        assert await store.file(OTHER, "file-1") is None
        assert await store.job(OTHER, "batch_1") is None
        assert ids(await store.files(OTHER, ListPage())) == ids(await store.jobs(OTHER, ListPage())) == []
        assert await store.files(OTHER, ListPage(after="file-1")) is None
        assert await store.jobs(OTHER, ListPage(after="batch_1")) is None
        assert not await store.remove_file(OTHER, "file-1")
        assert await store.usage(OTHER) == OwnerUsage()
        assert await store.usage(ME) == OwnerUsage(1, 11, 1)

    kind.run(check)


def test_results_of_open_jobs_count_as_their_owner_s_bytes(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.lease(RUNNER, 60.0)
        for number, owner in ((1, ME), (2, ME), (3, OTHER)):
            await store.add_job(job(number, owner))
        for number in (1, 2):
            await store.add_results(f"batch_{number}", [result(line, text="x" * 500) for line in (1, 2)], 1)
            await store.add_results(f"batch_{number}", [result(2, text="x" * 500)], 1)  # it is there already
        used = (await store.usage(ME)).bytes
        assert 2_000 <= used <= 3_000
        assert (await store.usage(OTHER)).bytes == 0
        with pytest.raises(OverQuota):
            await store.add_file(stored(1), OwnerUsage(10, used + 10))
        await store.add_file(stored(1), OwnerUsage(10, used + 11))
        await store.save_job(job(1).move(JobStatus.FAILED, 1.0))
        assert (await store.usage(ME)).bytes == pytest.approx(used / 2 + 11, abs=1)

    kind.run(check)


def test_deleted_rows_give_their_room_back_to_the_disk(tmp_path: Path) -> None:
    """A store of 153 MB had 37,381 free pages of 37,401 once all was deleted, and as large a log."""
    path = tmp_path / "jobs.sqlite"

    async def check() -> None:
        store = await SqliteStore.open(path)
        await store.lease(RUNNER, 60.0)
        await store.add_job(job(1))
        for line in range(40):
            await store.add_results("batch_1", [result(line, text="x" * 1_000_000)], 1)
        await store.save_job(job(1).move(JobStatus.FAILED, 1.0))
        await store.forget_responses(0.0)
        await store.lease(RUNNER, 60.0)
        sizes = [path.with_name(f"jobs.sqlite{end}").stat().st_size for end in ("", "-wal")]
        await store.close()
        assert sum(sizes) < 25_000_000, sizes

    asyncio.run(check())


@pytest.mark.parametrize("newest_first", [False, True])
def test_lists_come_in_order_page_by_page(kind: Kind, newest_first: bool) -> None:
    numbers = list(range(7))
    wanted = [f"file-{number}" for number in (reversed(numbers) if newest_first else numbers)]

    async def check(store: Store) -> None:
        for number in numbers:
            await store.add_file(stored(number, purpose=Purpose.BATCH if number % 2 else Purpose.BATCH_OUTPUT))
            await store.add_file(stored(number + 100, OTHER))
        got: list[str] = []
        while True:
            listing = await store.files(ME, ListPage(3, got[-1] if got else None, newest_first))
            got += ids(listing)
            assert listing is not None
            assert listing.has_more is (len(got) < 7)
            if not listing.has_more:
                break
        assert got == wanted
        odd = await store.files(ME, ListPage(newest_first=newest_first), Purpose.BATCH)
        assert ids(odd) == [name for name in wanted if int(name[-1]) % 2]

    kind.run(check)


def test_an_unfinished_file_is_known_by_its_holder_and_its_time(kind: Kind) -> None:
    async def check(store: Store) -> None:
        gateway, next_life = Holder("gateway", 1), Holder("gateway", 2)
        for id, holder, at in (("file-1", gateway, 50.0), ("file-2", gateway, 60.0), ("file-3", RUNNER, 70.0)):
            await store.begin_file(id, holder, at)
        await store.add_file(stored(1))
        assert await store.orphans(gateway, before=0.0) == []
        assert await store.orphans(next_life, before=0.0) == ["file-2"]
        assert sorted(await store.orphans(gateway, before=80.0)) == ["file-2", "file-3"]
        await store.forget_file("file-2")
        assert await store.orphans(next_life, before=80.0) == ["file-3"]

    kind.run(check)


def test_a_file_that_is_removed_is_known_to_anybody_until_its_bytes_are_gone(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_file(stored(1))
        assert not await store.remove_file(OTHER, "file-1")
        assert await store.orphans(RUNNER, before=1.0) == []
        assert await store.remove_file(ME, "file-1")
        assert await store.orphans(RUNNER, before=1.0) == ["file-1"]
        await store.forget_file("file-1")
        assert await store.orphans(RUNNER, before=1.0) == []

    kind.run(check)


def test_a_file_is_removed_once_and_is_taken_no_more(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_file(stored(1, expires_at=2_000))
        await store.add_file(stored(1, expires_at=2_000))  # repeated, as after an answer that was lost
        await store.add_file(stored(2, expires_at=3_000))
        assert [file.id for file in await store.expired_files(2_000)] == ["file-1"]
        assert ids(await store.files(ME, ListPage(1), Purpose.BATCH, now=2_000)) == ["file-2"]
        assert ids(await store.files(ME, ListPage(), now=1_999.5)) == ["file-2", "file-1"]
        assert [await store.remove_file(ME, "file-1") for _ in range(2)] == [True, False]
        assert await store.usage(ME) == OwnerUsage(1, 12, 0)
        assert [file.id for file in await store.expired_files(9_000)] == ["file-2"]

    kind.run(check)


def test_nobody_has_more_than_allowed_and_what_is_said_again_is_no_more(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_file(stored(1), OwnerUsage(files=2, bytes=30))
        await store.add_file(stored(1), OwnerUsage(files=1, bytes=11))  # repeated
        for most in (OwnerUsage(files=1, bytes=30), OwnerUsage(files=2, bytes=22)):
            with pytest.raises(OverQuota) as error:
                await store.add_file(stored(2), most)
            assert error.value.usage == await store.usage(ME) == OwnerUsage(1, 11, 0)
        assert await store.file(ME, "file-2") is None
        await store.add_file(stored(2), OwnerUsage(files=2, bytes=23))
        await store.add_job(job(1), most_open=1)
        await store.add_job(job(1), most_open=1)
        with pytest.raises(OverQuota):
            await store.add_job(job(2), most_open=1)
        assert await store.job(ME, "batch_2") is None
        assert await store.usage(ME) == OwnerUsage(2, 23, 1)
        assert await store.find_faults() == []

    kind.run(check)


def test_of_two_changes_to_one_revision_the_second_is_a_conflict(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_job(job(1))
        await store.add_job(job(1))
        first = await store.save_job(job(1).move(JobStatus.IN_PROGRESS, 1))
        with pytest.raises(Conflict):
            await store.save_job(job(1).move(JobStatus.CANCELLING, 2))
        await store.save_job(first.move(JobStatus.CANCELLING, 2))
        assert [job.status for job in await store.open_jobs()] == [JobStatus.CANCELLING]

    kind.run(check)


def test_a_job_ends_together_with_its_files(kind: Kind) -> None:
    async def check(store: Store) -> None:
        fence = await store.lease(RUNNER, 1_000)
        for number in (1, 2):
            await store.add_job(job(number))
        running = await store.save_job(job(1).move(JobStatus.IN_PROGRESS, 1), fence)
        finalizing = await store.save_job(running.move(JobStatus.FINALIZING, 2), fence)
        outputs = [stored(number, purpose=Purpose.BATCH_OUTPUT) for number in (5, 6)]
        ended = finalizing.move(JobStatus.COMPLETED, 3, output_file_id="file-5", error_file_id="file-6")
        with pytest.raises(Fenced):
            await store.save_job(ended, 99, outputs)
        assert ids(await store.files(ME, ListPage())) == []
        await store.begin_file("file-5", RUNNER, 0.0)
        await store.save_job(ended, fence, outputs)
        assert await store.orphans(Holder("runner", 2), before=1.0) == []
        assert sorted(ids(await store.files(ME, ListPage()))) == ["file-5", "file-6"]
        assert [job.id for job in await store.open_jobs()] == ["batch_2"]
        assert (await store.usage(ME)).open_jobs == 1

    kind.run(check)


def test_of_ended_jobs_those_that_are_kept_longest_come_first(kind: Kind) -> None:
    async def check(store: Store) -> None:
        for number in (1, 2, 3):
            await store.add_job(job(number))
        for number, kept_until in ((1, 50), (2, 70)):
            await store.save_job(job(number).move(JobStatus.FAILED, 1, kept_until=kept_until))
        assert [job.id for job in await store.ended_jobs(5)] == ["batch_2", "batch_1"]
        assert [job.id for job in await store.ended_jobs(1)] == ["batch_2"]

    kind.run(check)


def test_a_line_has_one_result_and_counts_once(kind: Kind) -> None:
    many = [result(line, line % 3 > 0) for line in range(250, 0, -1)]

    async def check(store: Store) -> None:
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        await store.add_job(job(1))
        assert await store.add_results("batch_1", many, fence) == 250
        again = [replace(result(7), text="another", is_ok=False), result(251)]
        assert await store.add_results("batch_1", again, fence) == 1
        assert [stored async for stored in store.results("batch_1")] == [*reversed(many), result(251)]
        assert await store.done_lines("batch_1") == frozenset(range(1, 252))
        assert await store.counts("batch_1") == LineCounts(168, 83, 2_510, 1_004, 753, 502, 1_757, 1_506, 1_255)
        assert [stored async for stored in store.results("batch_2")] == []
        assert await store.counts("batch_2") == LineCounts()
        cancelling = await store.save_job(job(1).move(JobStatus.CANCELLING, 1))
        assert len(await store.done_lines("batch_1")) == 251
        await store.save_job(cancelling.move(JobStatus.CANCELLED, 2), fence)
        assert await store.done_lines("batch_1") == frozenset()
        assert await store.counts("batch_1") == LineCounts()

    kind.run(check)


def test_a_single_runner_has_the_lease_and_the_runner_before_writes_no_more(kind: Kind) -> None:
    async def check(store: Store) -> None:
        await store.add_job(job(1))
        first = await store.lease(RUNNER, 1_000)
        assert first == await store.lease(RUNNER, 1_000)
        assert await store.lease(Holder("another", 9), 1_000) is None
        second = await store.lease(Holder("runner", 2), 1_000)  # the holder's next life need not wait
        assert first is not None
        assert second == first + 1
        with pytest.raises(Fenced):
            await store.add_results("batch_1", [result(1)], first)
        with pytest.raises(Fenced):
            await store.save_job(job(1).move(JobStatus.IN_PROGRESS, 1), first)
        assert await store.done_lines("batch_1") == frozenset()
        await store.release(RUNNER)  # the lease is no longer RUNNER's
        assert await store.lease(Holder("another", 9), 1_000) is None
        await store.release(Holder("runner", 2))
        assert await store.lease(Holder("another", 9), 1_000) == second + 1

    kind.run(check)


def test_a_lease_from_before_the_clock_was_set_back_does_not_keep_others_waiting(kind: Kind) -> None:
    async def check(store: Store) -> None:
        first = await store.lease(RUNNER, 3_600.0)  # to those who ask for seconds it looks like one from the future
        assert first is not None
        assert await store.lease(Holder("another", 1), 10.0) == first + 1

    kind.run(check)


def test_a_lease_that_is_not_renewed_ends(kind: Kind) -> None:
    async def check(store: Store) -> None:
        assert await store.lease(RUNNER, 0.05) == 1
        while (number := await store.lease(Holder("another", 1), 1_000)) is None:
            await asyncio.sleep(0.01)
        assert number == 2

    asyncio.run(asyncio.wait_for(asyncio.to_thread(kind.run, check), 60))


def test_two_stores_that_write_at_once_share_it(kind: Kind) -> None:
    async def check(store: Store) -> None:
        second_store = await kind.open()
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        await store.add_job(job(1))
        lines = [[result(line)] for line in range(1, 41)]
        writes = [(writer, batch) for batch in lines for writer in (store, second_store)]
        new = await asyncio.gather(*(writer.add_results("batch_1", batch, fence) for writer, batch in writes))
        assert sum(new) == 40
        assert (
            await store.counts("batch_1")
            == await second_store.counts("batch_1")
            == LineCounts(40, 0, 400, 160, 120, 80, 280, 240, 200)
        )
        await second_store.close()

    kind.run(check)


def test_forecasts(kind: Kind) -> None:
    told = Forecast(5.0, 12.5, 99.0, is_late=True)

    async def check(store: Store) -> None:
        await store.add_job(job(1))
        assert await store.forecast("batch_1") is None
        await store.set_forecasts({"batch_1": told, "batch_2": replace(told, is_late=False)})
        assert await store.forecast("batch_1") == told

    kind.run(check)


def test_everything_can_be_exported(kind: Kind) -> None:
    async def check(store: Store) -> None:
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        await store.add_file(stored(1))
        await store.add_job(job(1))
        await store.add_results("batch_1", [result(1)], fence)
        kinds = [(kind, tree.get("id", tree.get("job"))) async for kind, tree in store.records()]
        assert kinds == [("file", "file-1"), ("job", "batch_1"), ("result", "batch_1")]

    kind.run(check)


def test_a_store_says_what_it_guarantees(kind: Kind) -> None:
    about = kind.run(lambda store: store.describe())
    assert about.kind in ("SQLite", "Redis")
    assert "loss of power" in " ".join(about.guarantees)
    assert about.warnings == ()


def test_a_job_that_is_kept_no_longer_is_in_no_list_and_forgotten(kind: Kind) -> None:
    async def check(store: Store) -> None:
        for number, kept_until in ((1, 5_000), (2, 6_000)):
            await store.add_job(job(number))
            saved = await store.save_job(job(number).move(JobStatus.CANCELLING, 1_200))
            await store.save_job(saved.move(JobStatus.CANCELLED, 1_300, kept_until=kept_until))
        await store.add_job(job(3))
        assert ids(await store.jobs(ME, ListPage(), now=4_999.5)) == ["batch_3", "batch_2", "batch_1"]
        assert ids(await store.jobs(ME, ListPage(), now=5_000)) == ["batch_3", "batch_2"]
        await store.forget_jobs(4_999.5)
        assert await store.job(ME, "batch_1") is not None
        for _ in range(2):  # repeated, as after an answer that was lost
            await store.forget_jobs(5_000)
        assert await store.job(ME, "batch_1") is None
        assert ids(await store.jobs(ME, ListPage())) == ["batch_3", "batch_2"]
        assert [job.id for job in await store.open_jobs()] == ["batch_3"]
        assert await store.find_faults() == []
        assert {tree["id"] async for _, tree in store.records()} == {"batch_2", "batch_3"}
        await store.forget_jobs(9_000)
        assert ids(await store.jobs(ME, ListPage())) == ["batch_3"]

    kind.run(check)


def test_a_job_that_had_ended_under_an_older_schema_is_kept_for_some_weeks(kind: Kind) -> None:
    ended = job(1).move(JobStatus.FAILED, 1_200)
    text = json.dumps({name: value for name, value in msgspec.to_builtins(ended).items() if name != "kept_until"})

    async def write() -> None:
        store = await kind.open(kind.migrations[:2])
        await store.add_job(job(1))
        if isinstance(store, sqlite_store.SqliteStore):
            await store._run(lambda: store._execute("UPDATE jobs SET is_open = 0, record = ?", text))
        else:
            await store.redis.hset(store._key("jobs"), ended.id, text)
            await store.redis.zrem(store._key("open"), ended.id)
        await store.close()

    async def check(store: Store) -> None:
        weeks_later = time.time() + 29 * 86_400
        await store.forget_jobs(weeks_later)
        assert await store.job(ME, ended.id) == ended
        assert ids(await store.jobs(ME, ListPage(), now=weeks_later)) == [ended.id]
        await store.forget_jobs(weeks_later + 2 * 86_400)
        assert await store.job(ME, ended.id) is None

    asyncio.run(write())
    kind.run(check)


def test_results_of_an_older_schema_count_without_their_reasoning(kind: Kind) -> None:
    old = {"line": 1, "is_ok": True, "text": "{}", "input_tokens": 10, "cached_tokens": 4, "output_tokens": 3}
    sums = {"completed": 1, "failed": 0, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 3}

    async def write() -> None:
        store = await kind.open(kind.migrations[:4])
        if isinstance(store, sqlite_store.SqliteStore):
            added = "INSERT INTO results VALUES ('batch_1', 1, ?)", json.dumps(old)
            await store._run(lambda: store._execute(*added))
            await store._run(lambda: store._execute("INSERT INTO counts VALUES ('batch_1', 1, 0, 10, 4, 3)"))
        else:
            await store.redis.hset(store._key("results:batch_1"), "1", json.dumps(old))
            await store.redis.hset(store._key("counts:batch_1"), mapping=sums)
        await store.close()

    async def check(store: Store) -> None:
        await store.add_job(job(1))
        assert await store.counts("batch_1") == LineCounts(1, 0, 10, 4, 3, 0)
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        assert await store.add_results("batch_1", [result(2)], fence) == 1
        assert await store.counts("batch_1") == LineCounts(2, 0, 20, 8, 6, 2, 7, 6, 5)
        assert [stored.reasoning_tokens async for stored in store.results("batch_1")] == [0, 2]

    asyncio.run(write())
    kind.run(check)


def test_a_version_writes_on_after_the_next_one_has_migrated_its_file(tmp_path: Path) -> None:
    """In an upgrade both have the file open for a while."""
    path, tables = tmp_path / "jobs.sqlite", ("files", "jobs", "results", "counts", "lease", "begun", "responses")
    newer = (*sqlite_store.MIGRATIONS, *(f"ALTER TABLE {table} ADD COLUMN later TEXT" for table in tables))

    async def check() -> None:
        store = await sqlite_store.SqliteStore.open(path)
        await (await sqlite_store.SqliteStore.open(path, newer)).close()
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        await store.begin_file("file-1", RUNNER, 1.0)
        await store.begin_file("file-2", RUNNER, 1.0)
        await store.add_file(stored(1))
        assert await store.remove_file(ME, "file-1")
        assert sorted(await store.orphans(RUNNER, before=2.0)) == ["file-1", "file-2"]
        await store.add_job(job(1))
        assert await store.add_results("batch_1", [result(1)], fence) == 1
        assert await store.add_results("batch_1", [result(2, is_ok=False)], fence) == 1
        assert await store.counts("batch_1") == result(1).counts + result(2, is_ok=False).counts
        assert await store.save_job(job(1), fence) == replace(job(1), revision=1)
        await store.add_response(response(1), most_bytes=1_000)
        assert await store.response(ME, response(1).id) == response(1)
        await store.release(RUNNER)
        await store.close()

    asyncio.run(check())


def test_an_older_schema_is_migrated_and_a_newer_schema_refused(kind: Kind) -> None:
    async def note(store: redis_store.RedisStore) -> None:
        await store.redis.set(store._key("noted"), "yes")

    is_sqlite = kind.migrations is sqlite_store.MIGRATIONS
    newer = (*kind.migrations, "CREATE TABLE noted (word TEXT)" if is_sqlite else note)

    async def migrate() -> int:
        store = await kind.open(newer)
        schema: int = (await store.describe()).schema
        await store.close()
        return schema

    kind.run(lambda store: store.add_file(stored(1)))
    assert asyncio.run(migrate()) == asyncio.run(migrate()) == len(newer)
    with pytest.raises(StoreUnfit, match=f"schema {len(newer)}, .* up to {len(newer) - 1}: serve with a later version"):
        kind.run(lambda store: store.describe())


def response(number: int, owner: str = ME, said: str = "ü" * 100) -> StoredResponse:
    item = {"type": "message", "content": [{"type": "output_text", "text": said}]}
    kept, answer = msgspec.Raw(msgspec.json.encode(item)), msgspec.Raw(msgspec.json.encode({"output": [item]}))
    return StoredResponse(f"resp_{number}", owner, 1_000 + number, 5_000 + number, [kept], answer, "resp_0")


def test_a_response_is_kept_for_its_owner_until_it_is_removed_or_expires(kind: Kind) -> None:
    async def check(store: Store) -> None:
        for number in range(4):
            await store.add_response(response(number), 10**9)
        assert await store.response(ME, "resp_1") == response(1)
        assert await store.response(OTHER, "resp_1") is None
        assert not await store.remove_response(OTHER, "resp_1")
        assert [await store.remove_response(ME, "resp_1") for _ in range(2)] == [True, False]
        assert not await store.save_response(response(1, said="removed ones do not come back"))
        assert await store.save_response(response(2, said="more"))
        await store.forget_responses(5_002)
        kept = [await store.response(ME, f"resp_{number}") for number in range(4)]
        assert kept == [None, None, None, response(3)]

    kind.run(check)


def test_what_expires_is_gone_at_that_second() -> None:
    for kept, at in ((response(1), 5_001), (stored(1, expires_at=5_001), 5_001)):
        assert [kept.has_expired(now) for now in (at - 0.1, at)] == [False, True]


def test_the_oldest_responses_make_room_for_new_ones(kind: Kind) -> None:
    each = len(msgspec.json.encode(response(1)))

    async def check(store: Store) -> None:
        await store.add_response(response(9, OTHER), each)
        for number in (1, 2, 2, 3):  # one of them twice, as after an answer that was lost
            await store.add_response(response(number), 2 * each)
        await store.save_response(response(3, said="x"))
        await store.add_response(response(4, said="x"), 2 * each)
        kept = [await store.response(ME, f"resp_{number}") is not None for number in range(1, 5)]
        assert kept == [False, True, True, True]
        assert await store.response(OTHER, "resp_9") is not None

    kind.run(check)
