"""Makes every kind of store, new and empty, for tests that hold for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from alignedserve.store import redis_store, sqlite_store
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Store
from tests.redis_server import RedisServer

T = TypeVar("T")


@dataclass
class Kind:
    """A store that can be opened again and again, from the event loops of several processes."""

    open: Callable[..., Awaitable[Any]]
    migrations: Sequence[Any]

    def run(self, work: Callable[[Store], Awaitable[T]]) -> T:
        async def opened() -> T:
            store = await self.open()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(opened())


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(params=["sqlite", "redis"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "sqlite":
        return Kind(lambda *more: SqliteStore.open(tmp_path / "jobs.sqlite", *more), sqlite_store.MIGRATIONS)
    server: RedisServer = request.getfixturevalue("redis")
    return Kind(lambda *more: RedisStore.open(server.url, tmp_path.name, *more), redis_store.MIGRATIONS)
