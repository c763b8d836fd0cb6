"""Tests of stores on a disk that is really full and later has room again, and on a disk that can only be read."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import StoreError, StoreFull
from alignedserve.store import redis_client, sqlite_store
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.storage import check_storage, open_storage
from alignedserve.store.store import Holder, Store
from tests.redis_server import RedisServer
from tests.small_disk import SmallDisk, small_disk
from tests.store.test_stores import job, result, stored

RUNNER = Holder("runner", 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


async def add_until_full(store: Store, fence: int) -> int:
    """Add results until the disk is full, and return the last line whose result was acknowledged."""
    written = 0
    with suppress(StoreError):
        for line in range(1, 2_000):
            await store.add_results("batch_1", [result(line, text="x" * 5_000)], fence)
            written = line
    assert 0 < written < 1_999, "the disk was never full"
    return written


def test_sqlite_on_a_full_disk_has_what_it_acknowledged_and_goes_on(disk: SmallDisk) -> None:
    path = disk.folder / "jobs.sqlite"

    async def check() -> None:
        store = await SqliteStore.open(path)
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        disk.fill(but=200_000)
        written = await add_until_full(store, fence)
        with pytest.raises(StoreFull, match=r"no space is left for .*jobs.sqlite: free some"):
            await store.add_results("batch_1", [result(5_000, text="x" * 500_000)], fence)
        assert await store.done_lines("batch_1") == frozenset(range(1, written + 1))
        assert (await store.counts("batch_1")).done == written
        disk.make_room()
        await store.add_results("batch_1", [result(written + 1)], fence)
        assert (await store.counts("batch_1")).done == written + 1
        await store.close()

    asyncio.run(check())
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_disk_that_hangs_is_an_error_in_time_and_the_store_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, execute = threading.Event(), SqliteStore._execute

    def hang(*given: Any) -> sqlite3.Cursor:
        goes_on.wait(600)
        return execute(*given)

    async def check() -> None:
        store = await SqliteStore.open(tmp_path / "jobs.sqlite")
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        with monkeypatch.context() as hanging:
            hanging.setattr(sqlite_store, "ANSWER_S", 0.05)
            hanging.setattr(SqliteStore, "_execute", hang)
            for _ in range(2):
                with pytest.raises(StoreError, match=r"disk of .*jobs.sqlite has not answered for 0\.05 s"):
                    await store.add_results("batch_1", [result(1)], fence)
        goes_on.set()
        await store.add_results("batch_1", [result(1), result(2)], fence)
        assert await store.done_lines("batch_1") == frozenset({1, 2})
        await store.close()

    asyncio.run(check())


def test_what_starts_on_a_full_disk_says_so_and_starts_when_there_is_room(disk: SmallDisk) -> None:
    config = JobsConfig(directory=str(disk.folder / "data"))

    async def check() -> None:
        (disk.folder / "data").mkdir()
        disk.fill()
        with pytest.raises(StoreFull, match="no space is left"):
            await open_storage(config, RUNNER)
        disk.make_room()
        storage = await open_storage(config, RUNNER)
        await storage.store.add_file(stored(1))
        await storage.close()

    asyncio.run(check())


def test_a_disk_that_can_only_be_read_is_named(disk: SmallDisk) -> None:
    config = JobsConfig(directory=str(disk.folder / "data"))

    async def use() -> None:
        await (await open_storage(config, RUNNER)).close()

    asyncio.run(use())
    disk.close()
    with pytest.raises(StoreError, match="Read-only file system: name another place with --jobs-directory"):
        check_storage(config, "demo", 8000)
    with pytest.raises(StoreError, match=r"jobs.sqlite cannot be written: check who owns it"):
        asyncio.run(_write_to(disk.folder / "data" / "jobs.sqlite"))


async def _write_to(path: Path) -> None:
    store = await SqliteStore.open(path)
    await store.add_file(stored(1))


@pytest.mark.parametrize(("fsync", "said"), [("everysec", r"refuses: MISCONF"), ("always", r"not reached")])
def test_redis_on_a_full_disk_has_what_it_acknowledged_and_goes_on(
    disk: SmallDisk, fsync: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `always`, Redis ends itself rather than lose what it has acknowledged, and must be started again."""
    monkeypatch.setattr(redis_client, "TRIES", 1)
    server = RedisServer(disk.folder, "--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0")

    async def check() -> None:
        store = await RedisStore.open(server.url, "p")
        fence = await store.lease(RUNNER, 1_000)
        assert fence is not None
        await store.add_job(job(1))
        disk.fill(but=200_000)
        written = await add_until_full(store, fence)
        with pytest.raises(StoreError, match=said):
            await store.add_results("batch_1", [result(1_999)], fence)
        disk.make_room()
        if fsync == "always":
            server.kill()
            server.start()
        while True:
            try:
                await store.add_results("batch_1", [result(1_999)], fence)
                break
            except StoreError:  # Redis refuses until it has tried to write again
                await asyncio.sleep(0.05)
        assert await store.done_lines("batch_1") >= frozenset(range(1, written + 1)) | {1_999}
        await store.close()

    try:
        asyncio.run(asyncio.wait_for(check(), 300))
    finally:
        server.kill()
