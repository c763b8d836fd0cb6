"""A Redis whose master dies: the Sentinels choose another, and what was acknowledged is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from alignedserve.errors import StoreError
from alignedserve.store import redis_client
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.store import Holder, ListPage
from tests.redis_server import RedisTrio
from tests.store.test_stores import ME, ids, stored

START_S = 60.0


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisTrio]:
    """Yield servers for all tests: Sentinels take 10 s to know each other. The last test kills the master."""
    servers = RedisTrio(tmp_path_factory.mktemp("trio"))
    yield servers
    servers.kill()


async def opened(trio: RedisTrio, prefix: str) -> RedisStore:
    """Open the store once both replicas follow: before, a failover may choose the one that has not all."""
    store = await RedisStore.open(trio.url, prefix)
    deadline = asyncio.get_running_loop().time() + START_S
    while len((await store.redis.role())[2]) < 2:
        assert asyncio.get_running_loop().time() < deadline, "the replicas do not follow"
        await asyncio.sleep(0.05)
    await store.add_file(stored(0))
    return store


def test_a_write_waits_for_each_replica_that_follows(trio: RedisTrio, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store = await opened(trio, "waits")
        monkeypatch.setattr("alignedserve.store.redis_store.REPLICA_MS", 0)  # for ever
        with trio.stopped(trio.servers[2]):
            adding = asyncio.create_task(store.add_file(stored(1)))
            _, waiting = await asyncio.wait([adding], timeout=0.5)
            assert waiting, "a failover may choose the replica that has not answered"
        await adding
        await store.close()

    asyncio.run(check())


def test_the_first_operation_after_another_replica_came_says_what_it_did(trio: RedisTrio) -> None:
    """It is sent again, to wait for both; the second time it finds its file gone."""

    async def check() -> None:
        await (await opened(trio, "again")).close()
        store = await RedisStore.open(trio.url, "again")
        assert await store.remove_file(ME, "file-0")
        await store.close()

    asyncio.run(check())


def test_a_master_without_a_replica_acknowledges_nothing(trio: RedisTrio, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store = await opened(trio, "alone")
        monkeypatch.setattr("alignedserve.store.redis_store.REPLICA_MS", 100)
        with (
            trio.stopped(trio.servers[1]),
            trio.stopped(trio.servers[2]),
            pytest.raises(StoreError, match="has no replica that answers"),
        ):
            await store.add_file(stored(1))
        await store.close()

    asyncio.run(check())


def test_what_was_acknowledged_is_there_after_a_failover(trio: RedisTrio) -> None:
    holder = Holder("runner", 1, "demo")

    async def check() -> None:
        store, number = await opened(trio, "failover"), 0
        lease = await store.lease(holder, 60.0)
        assert lease is not None

        enough = asyncio.Event()  # a cancelled call of the client may end as if it was not

        async def add_files() -> None:
            nonlocal number
            while not enough.is_set():
                await store.add_file(stored(number + 1))
                number += 1

        adding = asyncio.create_task(add_files())
        while number < 50:
            await asyncio.sleep(0.01)
        before = number
        await asyncio.to_thread(trio.kill, trio.servers[0])
        while number < before + 50 and not adding.done():
            await asyncio.sleep(0.01)
        assert number >= before + 50, f"the calls wait until there is another master: {adding}"
        enough.set()
        await adding
        found = ids(await store.files(ME, ListPage(limit=10_000)))
        assert [each for each in range(1, number + 1) if f"file-{each}" not in found] == []
        assert await store.lease(Holder("other", 2, "demo"), 60.0) is None, "the lease is as it was"
        assert await store.lease(holder, 60.0) == lease
        await store.close()

    asyncio.run(check())


@pytest.mark.parametrize("url", ["redis+sentinel://a,b:1", "redis+sentinel://a/jobs/x"])
def test_an_address_without_a_service_says_what_is_missing(url: str) -> None:
    with pytest.raises(StoreError, match=r"must end with the name of the service"):
        redis_client.connect(url)


def test_sentinels_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "FAILOVER_TRIES", 0)
    with pytest.raises(StoreError, match=r"redis\+sentinel://127\.0\.0\.1:1/jobs is not reached"):
        asyncio.run(RedisStore.open("redis+sentinel://:secret@127.0.0.1:1/jobs", "p"))
