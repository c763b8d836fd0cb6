"""A Redis with replicas whose store is written to while something happens to its servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from alignedserve.store.redis_store import RedisStore
from alignedserve.store.store import Holder, ListPage
from tests.redis_server import Servers
from tests.store.test_stores import ME, ids, job, result, stored

START_S = 60.0
RUNNER = Holder("runner", 1, "demo")


async def opened(servers: Servers, prefix: str) -> RedisStore:
    """Open the store once both replicas follow: before, a failover may choose the one that has not all."""
    store = await RedisStore.open(servers.url, prefix)
    deadline = asyncio.get_running_loop().time() + START_S
    while len((await store.redis.role())[2]) < 2:
        assert asyncio.get_running_loop().time() < deadline, "the replicas do not follow"
        await asyncio.sleep(0.05)
    await store.add_file(stored(0))
    return store


class Load:
    """Files, jobs and lines that are written one after another, each once the one before was acknowledged."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._number, self._is_enough = 0, False  # a cancelled call of the client may end as if it was not

    async def go_on(self, task: asyncio.Task[None], count: int) -> None:
        """Return after as many more were acknowledged."""
        until = self._number + count
        while self._number < until and not task.done():
            await asyncio.sleep(0.01)
        assert self._number >= until, f"the calls wait until there is another master: {task}"

    async def write(self) -> None:
        while not self._is_enough:
            number = self._number + 1
            await self._store.add_file(stored(number))
            await self._store.add_job(job(number))
            await self._store.add_results("batch_0", [result(number)], self._lease)
            self._number = number

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Write until the end; then look whether all is there, and once."""
        lease = await self._store.lease(RUNNER, 60.0)
        assert lease is not None
        self._lease, store = lease, self._store
        await store.add_job(job(0))
        writing = asyncio.create_task(self.write())
        await self.go_on(writing, 30)
        yield writing
        self._is_enough = True
        await writing
        numbers = range(1, self._number + 1)
        files, jobs = ids(await store.files(ME, ListPage(10_000))), ids(await store.jobs(ME, ListPage(10_000)))
        assert [number for number in numbers if f"file-{number}" not in files or f"batch_{number}" not in jobs] == []
        assert await store.done_lines("batch_0") == frozenset(numbers)
        assert (await store.counts("batch_0")).done == self._number, "no line counts twice"
        assert await store.find_faults() == []
        assert await store.lease(Holder("other", 2, "demo"), 60.0) is None, "the lease is as it was"
        assert await store.lease(RUNNER, 60.0) == lease
