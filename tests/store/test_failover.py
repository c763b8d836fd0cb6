"""A Redis whose master dies: another server takes over, and what was acknowledged is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from alignedserve.errors import ConfigError, StoreError, StoreRefused
from alignedserve.store import redis_client
from alignedserve.store.address import hide_secrets, without_password
from alignedserve.store.redis_store import RedisStore
from tests.redis_server import PASSWORDS, REPLICATED, Servers
from tests.store.loading import Load, opened
from tests.store.test_stores import ME, stored


@pytest.fixture(scope="module", params=REPLICATED)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Yield servers for all tests: Sentinels take 10 s to know each other. The last test kills the master."""
    started: Servers = REPLICATED[request.param](tmp_path_factory.mktemp("servers"))
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
        asyncio.run(RedisStore.open(re.sub("//(:[^@]*@)?", "//nobody:wrong@", servers.url), "p"))


def test_a_password_that_sentinels_refuse_is_said(servers: Servers) -> None:
    for url in servers.refused:
        with pytest.raises(StoreRefused) as refused:
            asyncio.run(RedisStore.open(url, "p"))
        said = r"the Sentinels of \S+ refuse the user or password for them [^\n]+: start with the right ones, \S+"
        assert re.fullmatch(said, str(refused.value))
        assert not re.search(f"{PASSWORDS}|wr0ng", str(refused.value))


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
    with pytest.raises(ConfigError, match=r"must end with the name of the service"):
        redis_client.connect(url, "p")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/ss@host",
        "redis+sentinel://:pa/ss@host/jobs",
        "redis+cluster://:pa?ss@host",
        "redis+sentinel://host:pass/jobs",
        "redis+sentinel://host/jobs?sentinel_password=x&pass=1",
        "redis+cluster://host?sentinel_password=pass",
        "redis://host?socket_timeout=pass",
        "unix:///nowhere?pass=1",
    ],
)
def test_an_address_that_cannot_be_read_is_not_shown(url: str) -> None:
    """Parts of passwords that were not quoted stood in the errors of a port that is no number."""
    with pytest.raises(ConfigError) as fault:
        asyncio.run(RedisStore.open(url, "p"))
    assert not re.search("pa|ss", re.sub("password|address|PASSWORD", "", str(fault.value)))


@pytest.mark.parametrize(
    ("url", "shown", "where"),
    [
        ("redis://u:p@host:1/2", "redis://(hidden)@host:1/2", "redis://host:1/2"),
        ("unix:///tmp/socket", "unix:///tmp/socket", "unix:///tmp/socket"),
        ("redis://host?password=p@q&db=1", "redis://host?password=(hidden)&db=1", "redis://host"),
        ("redis://host?Password=p", "redis://host?Password=(hidden)", "redis://host"),
        (
            "rediss+sentinel://:p@a,b/jobs?sentinel_username=u&sentinel_password=q",
            "rediss+sentinel://(hidden)@a,b/jobs?sentinel_username=u&sentinel_password=(hidden)",
            "rediss+sentinel://a,b/jobs",
        ),
        ("redis://:p/q@host", "redis://(hidden)", "redis://(hidden)"),
        ("redis://:p?q@host", "redis://(hidden)", "redis://(hidden)"),
        ("sqlite", "sqlite", "sqlite"),
    ],
)
def test_passwords_of_an_address_are_hidden(url: str, shown: str, where: str) -> None:
    assert (hide_secrets(url), without_password(url)) == (shown, where)


@pytest.mark.parametrize("url", ["redis+sentinel://:secret@127.0.0.1:1/jobs", "redis+cluster://:secret@127.0.0.1:1"])
def test_servers_that_are_not_there_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "FAILOVER_TRIES", 0)
    with pytest.raises(StoreError, match=re.escape(f"{url.replace(':secret@', '')} is not reached")):
        asyncio.run(RedisStore.open(url, "p"))
