"""Tests of the errors of a store that cannot be used, and that the store finds a Redis again which was killed."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import stat
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import BytesGone, StoreError, StoreFull, StoreRefused
from alignedserve.store import redis_client, redis_store
from alignedserve.store.blobs import Blobs, Writing
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.storage import check_storage, holder_of, open_storage
from alignedserve.store.store import Holder, ListPage
from tests.redis_server import RedisServer
from tests.store.test_stores import ME, ids, job, response, result, stored


def test_results_of_a_batch_that_redis_has_forgotten_leave_nothing_there(tmp_path: Path) -> None:
    """Else nobody would ever remove them."""
    server = RedisServer(tmp_path)

    async def check() -> None:
        store = await RedisStore.open(server.url, "p")
        await store.add_job(job(1))
        assert await store.lease(Holder("runner", 1), 60) == 1
        assert await store.add_results("batch_1", [result(0)], fence=1) == 1
        server.forget()
        assert await store.lease(Holder("runner", 1), 60) == 1, "its number begins again"
        assert await store.add_results("batch_1", [result(1)], fence=1) == 0
        assert await store.redis.keys("*") == ["{p}:lease"]
        await store.close()

    try:
        asyncio.run(check())
    finally:
        server.kill()


def test_a_redis_that_was_killed_has_what_it_acknowledged(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)

    async def check() -> None:
        store = await RedisStore.open(server.url, "p")
        await store.add_file(stored(1))
        server.kill()
        waiting = asyncio.create_task(store.add_file(stored(2)))  # the call waits for the next life of Redis
        await asyncio.to_thread(server.start)
        await waiting
        assert ids(await store.files(ME, ListPage())) == ["file-2", "file-1"]
        await store.close()

    try:
        asyncio.run(check())
    finally:
        server.kill()


def test_a_new_file_is_opened_by_several_at_once(tmp_path: Path) -> None:
    """A gateway and a job runner that start together do this."""

    async def check(path: Path) -> None:
        for store in await asyncio.gather(*(SqliteStore.open(path) for _ in range(8))):
            await store.close()

    for number in range(20):
        asyncio.run(check(tmp_path / f"{number}.sqlite"))


def test_a_redis_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "TRIES", 0)
    with pytest.raises(StoreError, match=r"redis://127.0.0.1:1/0 is not reached"):
        asyncio.run(RedisStore.open("redis://user:secret@127.0.0.1:1/0", "p"))


def test_a_sweep_of_large_responses_reads_none_of_them(tmp_path: Path) -> None:
    """A sweep read all that had expired in one answer: a hundred of 16 MB filled the memory of each gateway."""
    server, owners = RedisServer(tmp_path), (ME, 'says "ü"')

    async def check() -> None:
        store = await RedisStore.open(server.url, "p")
        for number in range(2 * redis_store.ROWS + 1):
            await store.add_response(response(number % 3_000, owners[number % 2], said="x" * 10_000), 10**9)
        await store.add_response(response(4_000, said="stays"), 10**9)
        before = (await store.redis.info("stats"))["total_net_output_bytes"]
        await store.forget_responses(5_000 + 3_000)
        assert (await store.redis.info("stats"))["total_net_output_bytes"] - before < 10_000
        assert await store.redis.hkeys("{p}:responses") == ["resp_4000"]
        sums = await store.redis.hgetall("{p}:response_bytes")
        assert int(sums[owners[1]]) == 0 < int(sums[ME])
        await store.close()

    try:
        asyncio.run(check())
    finally:
        server.kill()


def test_sums_in_redis_that_are_not_those_of_its_records_are_found(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)

    async def check() -> None:
        store = await RedisStore.open(server.url, "p")
        await store.add_file(stored(1))
        await store.redis.hincrby("{p}:bytes", ME, 5)
        assert await store.find_faults() == [f"{ME} has 11 bytes of files, and 16 are counted"]
        await store.close()

    try:
        asyncio.run(check())
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--appendfsync", "everysec"), "a loss of power loses up to about a second"),
        (("--appendonly", "no"), "a restart of Redis loses"),
        (("--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb"), "lets Redis drop jobs"),
    ],
)
def test_a_redis_that_keeps_less_is_said_to(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    server = RedisServer(tmp_path, *options)

    async def warnings() -> tuple[str, ...]:
        store = await RedisStore.open(server.url, "p")
        about = await store.describe()
        await store.close()
        return about.warnings

    try:
        assert any(said in warning for warning in asyncio.run(warnings()))
    finally:
        server.kill()


def test_a_redis_without_memory_is_full_and_loses_nothing(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "3mb")

    async def fill() -> None:
        store = await RedisStore.open(server.url, "p")
        fence = await store.lease(Holder("runner", 1), 1_000)
        assert fence is not None
        await store.add_job(job(1))
        written = 0
        with suppress(StoreFull):
            for line in range(1, 10_000):
                await store.add_results("batch_1", [result(line, text="x" * 100_000)], fence)
                written = line
        with pytest.raises(StoreFull, match="no memory left"):
            await store.add_results("batch_1", [result(99_999, text="x" * 100_000)], fence)
        assert await store.done_lines("batch_1") == frozenset(range(1, written + 1))
        await store.close()

    try:
        asyncio.run(fill())
    finally:
        server.kill()


def test_a_full_disk_is_told_and_nothing_is_damaged(tmp_path: Path) -> None:
    async def fill() -> None:
        store = await SqliteStore.open(tmp_path / "jobs.sqlite")
        fence = await store.lease(Holder("runner", 1), 1_000)
        assert fence is not None
        # as full as a disk of this size would be
        await store._run(lambda: store._execute("PRAGMA max_page_count = 60"))
        written = 0
        with suppress(StoreFull):
            for line in range(1, 10_000):
                await store.add_results("batch_1", [result(line, text="x" * 5_000)], fence)
                written = line
        with pytest.raises(StoreFull, match="no space is left for"):
            await store.add_results("batch_1", [result(99_999, text="x" * 100_000)], fence)
        assert written
        assert await store.done_lines("batch_1") == frozenset(range(1, written + 1))
        assert (await store.counts("batch_1")).done == written
        await store.close()

    asyncio.run(fill())
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_only_who_has_the_lease_copies_the_log_into_the_file(tmp_path: Path) -> None:
    """In SQLite before 3.51.3 two processes that do so at once could lose what was committed."""
    path = tmp_path / "jobs.sqlite"

    async def check() -> None:
        gateway, runner, other = [await SqliteStore.open(path) for _ in range(3)]
        size = path.stat().st_size
        for number in range(400):
            await gateway.add_file(stored(number))
        await other.add_file(stored(400))
        assert (path.with_name("jobs.sqlite-wal").stat().st_size > 4_200_000, path.stat().st_size) == (True, size)
        assert await runner.lease(Holder("runner", 1), 1_000)
        assert path.stat().st_size > size
        for store in (gateway, runner, other):
            await store.close()

    asyncio.run(check())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be kept in .*file/data: Not a directory"):
        asyncio.run(open_storage(JobsConfig(directory=str(tmp_path / "file" / "data")), Holder("me", 1)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        asyncio.run(open_storage(JobsConfig(directory=str(tmp_path / "data")), Holder("me", 1)))


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match="is damaged"):
        asyncio.run(SqliteStore.open(tmp_path / "jobs.sqlite"))


@pytest.mark.parametrize("url", ["{}/files", "file://{}/files", "memory://files{}"])
def test_bytes_appear_whole_or_not_at_all(tmp_path: Path, url: str) -> None:
    blobs = Blobs(url.format(tmp_path))
    blobs.make()
    kept, dropped = blobs.begin("file-1"), blobs.begin("file-2")
    for writing in (kept, dropped):
        writing.write(b"one\0")
        writing.write("zwö".encode())
    kept.commit()
    dropped.abandon()
    assert blobs.sizes() == {"file-1": kept.num_bytes}
    with blobs.open("file-1") as opened:
        assert opened.read() == b"one\0" + "zwö".encode()
    blobs.remove("file-1")
    blobs.remove("file-1")
    assert blobs.sizes() == {}
    with pytest.raises(BytesGone, match="the bytes of file-1 are gone"):
        blobs.open("file-1")


def test_all_bytes_are_with_the_disk_when_it_is_asked_to_confirm_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed, sync = dict[str, int](), os.fsync

    def noted(fd: int) -> None:
        confirmed[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    blobs = Blobs(str(tmp_path))
    writing = blobs.begin("file-1")
    writing.write(b"four")
    writing.commit()
    file, folder = confirmed
    assert (confirmed[file], folder) == (4, str(tmp_path))


def test_an_upload_that_is_cancelled_as_it_is_completed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key may be revoked just then. The disk went on, and put the file back that had been abandoned."""
    begun, go_on, commit = Event(), Event(), Writing.commit

    def slow(writing: Writing) -> None:
        begun.set()
        assert go_on.wait(60)
        commit(writing)

    monkeypatch.setattr(Writing, "commit", slow)

    async def cancelled() -> None:
        storage = await open_storage(JobsConfig(directory=str(tmp_path)), Holder("gateway", 1))
        writing = await storage.begin("file-a")
        completing = asyncio.create_task(storage.commit(writing, b"bytes"))
        await asyncio.to_thread(begun.wait)
        completing.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await completing
        await storage.abandon(writing)
        assert storage.blobs.sizes() == {}
        await storage.close()

    asyncio.run(cancelled())


def test_bytes_of_a_given_up_upload_that_cannot_be_removed_stay_listed_until_they_can(tmp_path: Path) -> None:
    async def check() -> None:
        storage = await open_storage(JobsConfig(directory=str(tmp_path)), Holder("gateway", 1))
        next_life = replace(storage, holder=Holder("gateway", 2))
        writing = await storage.begin("file-1")
        (in_the_way := tmp_path / "files" / "file-1").mkdir()
        await storage.abandon(writing)
        assert await storage.store.orphans(next_life.holder, 0.0) == ["file-1"]
        in_the_way.rmdir()
        await next_life.sweep()
        assert (await storage.store.orphans(next_life.holder, 0.0), storage.blobs.sizes()) == ([], {})
        await storage.close()

    asyncio.run(check())


def test_a_url_that_nobody_knows_is_refused() -> None:
    with pytest.raises(StoreError, match="files cannot be kept at nowhere://x"):
        Blobs("nowhere://x")


def test_without_the_client_of_redis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("alignedserve.store.storage.find_spec", lambda _: None)
    jobs = JobsConfig(store="redis://127.0.0.1:1", directory=str(tmp_path))
    with pytest.raises(StoreError, match=r"pip install 'alignedserve\[redis\]'"):
        check_storage(jobs, "demo", 8000)
    with pytest.raises(StoreError, match="not installed"):
        asyncio.run(open_storage(jobs, holder_of("name", "jobs", 1)))
    assert check_storage(replace(jobs, store="sqlite"), "demo", 8000).store == "sqlite"


def test_a_redis_that_does_not_answer_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_storage(JobsConfig(store="redis://127.0.0.1:1", directory=str(tmp_path)), "demo", 8000)
    (line,) = caplog.messages
    assert "127.0.0.1:1" in line
    assert line.endswith("batch jobs wait until it does, chats do not: start it, or name another with --jobs-store")


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:right@"])
def test_a_password_that_redis_refuses_ends_the_start(login: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "right")
    try:
        jobs = JobsConfig(store=server.url.replace("//", f"//{login}"), directory=str(tmp_path / "data"))
        with pytest.raises(StoreRefused) as refused:
            check_storage(jobs, "demo", 8000)
    finally:
        server.kill()
    said = r"unix:///\S+ refuses the user or password in jobs.store \([^\n]+\): start with the right ones, \S+"
    assert re.fullmatch(said, str(refused.value))


def test_a_store_of_a_later_version_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as file:
        file.execute("PRAGMA user_version = 1000")
    check_storage(JobsConfig(directory=str(tmp_path)), "demo", 8000)
    (line,) = caplog.messages
    assert "has schema 1000" in line
    assert line.endswith("--jobs-directory or --jobs-store; batch jobs wait until then, chats do not")


def test_no_other_user_of_the_machine_reads_what_clients_sent(tmp_path: Path) -> None:
    jobs = JobsConfig(directory=str(tmp_path / "data" / "alignedserve"))

    async def store_a_file() -> None:
        storage = await open_storage(check_storage(jobs, "demo", 8000), holder_of("name", "jobs", 1))
        try:
            writing = storage.blobs.begin("file-1")
            writing.write(b"secret")
            writing.commit()
        finally:
            await storage.close()

    before = os.umask(0o022)
    try:
        asyncio.run(store_a_file())
    finally:
        os.umask(before)
    folder = tmp_path / "data" / "alignedserve"
    made = [path for path in folder.rglob("*") if path.is_file()]
    assert {"jobs.sqlite", "file-1"} <= {path.name for path in made}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_each_model_and_port_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    deployments = (("demo", 8000), ("other", 8000), ("demo", 8001), ("../demo", 8000), ("/models/demo", 8000))
    folders = [Path(str(check_storage(JobsConfig(), *named).directory)) for named in deployments]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {tmp_path / "alignedserve" / "jobs"}
    assert str(check_storage(JobsConfig(), "demo", 8000).directory) == str(folders[0])  # also after a restart
