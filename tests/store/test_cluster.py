"""A Redis Cluster: its slots move, and it has no databases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from alignedserve.errors import StoreError, StoreUnfit
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.store import Listing, ListPage
from tests.redis_server import RedisCluster, RedisServer, free_ports, tls_options
from tests.store.loading import Load, opened
from tests.store.test_stores import ME, ids, stored


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    servers = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield servers
    servers.kill()


def test_what_was_acknowledged_is_there_after_its_slot_moved(cluster: RedisCluster) -> None:
    """Half of the keys are on one server for a while, and the other half on another."""

    async def check() -> None:
        store = await opened(cluster, "moves")
        load = Load(store)
        async with load.running() as writing:
            for _ in cluster.move_slot(key_slot(b"{moves}")):
                await asyncio.sleep(0.05)
            await load.go_on(writing, 30)
        assert (await store.redis.info("server"))["tcp_port"] == cluster.other
        await store.close()

    asyncio.run(check())


def test_an_operation_that_a_new_master_cuts_off_says_what_it_did(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has done its work and waits for a replica: the next master is asked again, and finds the file gone."""
    monkeypatch.setattr("alignedserve.store.redis_store.REPLICA_MS", 0)  # for ever
    first, second, third = cluster.servers

    async def check() -> None:
        store = await opened(cluster, "cut")
        with cluster.stopped(third):
            removing = asyncio.create_task(store.remove_file(ME, "file-0"))
            while await store.redis.hexists("{cut}:files", "file-0"):
                await asyncio.sleep(0.01)
            cluster.ask(second, "FAILOVER")
            while (await store.redis.role())[0] == "master":
                await asyncio.sleep(0.01)
        assert await removing
        await store.close()

    asyncio.run(check())
    cluster.servers[:2] = [second, first]


def test_names_in_a_cluster_keep_deployments_apart(cluster: RedisCluster) -> None:
    async def check() -> None:
        store, other = [await RedisStore.open(f"{cluster.url}/{name}", "named") for name in ("0", "1")]
        await store.add_file(stored(1))
        assert await other.files(ME, ListPage()) == Listing((), False)
        again = await RedisStore.open(cluster.url, "named")
        assert ids(await again.files(ME, ListPage())) == ["file-1"]
        for each in (store, other, again):
            await each.close()

    asyncio.run(check())


def test_a_cluster_of_one_server_with_tls_and_a_password_acknowledges_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1, with_bus=True)
    clustered = "--cluster-enabled yes --tls-cluster yes --requirepass sécret"
    server = RedisServer(tmp_path, *tls_options(port), *clustered.split())

    async def check() -> None:
        by_socket = Redis.from_url(server.url, password="sécret")
        await by_socket.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        await by_socket.aclose()
        url = f"rediss+cluster://:s%C3%A9cret@127.0.0.1:{port}?ssl_cert_reqs=none"
        store = await RedisStore.open(url, "p")
        with pytest.raises(StoreError, match=r"rediss\+cluster://127.* has no replica that answers"):
            await store.add_file(stored(1))
        await store.close()

    try:
        asyncio.run(check())
    finally:
        server.kill()


def test_an_address_of_the_wrong_kind_is_told(cluster: RedisCluster, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = RedisServer(tmp_path, "--port", str(port))

    async def check() -> None:
        with pytest.raises(StoreUnfit, match=r"redis://127.0.0.1:\d+ is in a Redis Cluster: name it redis\+cluster://"):
            await RedisStore.open(f"redis://127.0.0.1:{cluster.other}", "p")
        store = await RedisStore.open(f"redis://127.0.0.1:{cluster.servers[0]}", "p")  # which has the slot of its keys
        assert any("redis+cluster:// finds the jobs" in warning for warning in (await store.describe()).warnings)
        await store.close()
        with pytest.raises(StoreUnfit, match=r"127.0.0.1:\d+ is in no Redis Cluster: name it redis://"):
            await RedisStore.open(f"redis+cluster://127.0.0.1:{port}", "p")

    try:
        asyncio.run(check())
    finally:
        server.kill()
