"""A Redis whose master dies: another server takes over, and what was acknowledged is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial

import pytest

from alignedserve.errors import StoreError, StoreRefused
from alignedserve.store import redis_client
from alignedserve.store.redis_store import RedisStore
from tests.redis_server import RedisCluster, RedisTrio, Servers
from tests.store.loading import Load, opened
from tests.store.test_stores import ME, stored

STARTS = {"sentinels": RedisTrio, "sentinels with TLS": partial(RedisTrio, is_tls=True), "cluster": RedisCluster}


@pytest.fixture(scope="module", params=STARTS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Yield servers for all tests: Sentinels take 10 s to know each other. The last test kills the master."""
    started: Servers = STARTS[request.param](tmp_path_factory.mktemp("servers"))
    yield started
    started.kill()


def test_a_write_waits_for_each_replica_that_follows(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store = await opened(servers, "waits")
        monkeypatch.setattr("alignedserve.store.redis_store.REPLICA_MS", 0)  # for ever
        with servers.stopped(servers.servers[2]):
            adding = asyncio.create_task(store.add_file(stored(1)))
            _, waiting = await asyncio.wait([adding], timeout=0.5)
            assert waiting, "a failover may choose the replica that has not answered"
        await adding
        await store.close()

    asyncio.run(check())


def test_the_first_operation_after_another_replica_came_says_what_it_did(servers: Servers) -> None:
    """It is sent again, to wait for both; the second time it finds its file gone."""

    async def check() -> None:
        await (await opened(servers, "again")).close()
        store = await RedisStore.open(servers.url, "again")
        assert await store.remove_file(ME, "file-0")
        await store.close()

    asyncio.run(check())


def test_a_master_without_a_replica_acknowledges_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store = await opened(servers, "alone")
        monkeypatch.setattr("alignedserve.store.redis_store.REPLICA_MS", 100)
        with (
            servers.stopped(servers.servers[1]),
            servers.stopped(servers.servers[2]),
            pytest.raises(StoreError, match="has no replica that answers"),
        ):
            await store.add_file(stored(1))
        await store.close()

    asyncio.run(check())


def test_a_password_that_servers_refuse_is_said(servers: Servers) -> None:
    with pytest.raises(StoreRefused, match=r"refuses the user or password in jobs\.store"):
        asyncio.run(RedisStore.open(servers.url.replace("//", "//nobody:wrong@"), "p"))


def test_what_was_acknowledged_is_there_after_a_failover(servers: Servers) -> None:
    async def check() -> None:
        store = await opened(servers, "failover")
        load = Load(store)
        async with load.running() as writing:
            await asyncio.to_thread(servers.kill, servers.servers[0])
            await load.go_on(writing, 30)
        await store.close()

    asyncio.run(check())


@pytest.mark.parametrize("url", ["redis+sentinel://a,b:1", "rediss+sentinel://:p@a/jobs/x"])
def test_an_address_without_a_service_says_what_is_missing(url: str) -> None:
    with pytest.raises(StoreError, match=r"must end with the name of the service"):
        redis_client.connect(url, "p")


@pytest.mark.parametrize("url", ["redis+sentinel://:secret@127.0.0.1:1/jobs", "redis+cluster://:secret@127.0.0.1:1"])
def test_servers_that_are_not_there_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "FAILOVER_TRIES", 0)
    with pytest.raises(StoreError, match=re.escape(f"{url.replace(':secret@', '')} is not reached")):
        asyncio.run(RedisStore.open(url, "p"))
