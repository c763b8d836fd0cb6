"""The store for several machines: Redis, from 6.0 on.

Every operation that reads and then writes is a function of redis.lua, so it is atomic. It can be sent again if its
answer was lost with the connection: it then finds its write done and says so. All keys begin with {prefix}, braces
included: in a Redis Cluster they lie in the same slot, which scripts need (redis_client.py).

    files, jobs          id -> record            files:OWNER, jobs:OWNER   ids in order of arrival
    revisions            job -> revision         open                      jobs that have not ended, in the same order
    results:JOB          line -> record          counts:JOB, costs:JOB     sums over the results
    forecasts            job -> forecast         bytes, open_of            owner -> bytes of files, open jobs
    expiry               files by expiry         begun                     id -> time, holder, life of files that are
                                                                           not added yet, or were removed
    ended                jobs by the instant until which they are kept
    responses            id -> record            responses:OWNER           ids in order of arrival
    response_bytes       owner -> bytes of responses                       response_sizes  id -> bytes
    response_expiry      responses by expiry
    lease                number, holder, life, until, model, keys
    schema, numbers      version of the schema; last number of a file or job
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import accumulate
from typing import Any, TypeVar, cast

import msgspec
from redis.exceptions import ConnectionError, MovedError, OutOfMemoryError, RedisError, ResponseError, TimeoutError

from alignedserve.errors import ConfigError, Conflict, Fenced, StoreError, StoreFull, StoreRefused, StoreUnfit
from alignedserve.store.address import without_password
from alignedserve.store.job import Forecast, Job, LineCounts, LineResult
from alignedserve.store.redis_client import (
    REPLICA_MS,
    LoginRefused,
    SentinelsRefuse,
    connect,
    is_replicated,
    key_prefix,
)
from alignedserve.store.store import (
    MOST_TOGETHER,
    Holder,
    LastLease,
    Listing,
    ListPage,
    OverQuota,
    OwnerUsage,
    Purpose,
    Record,
    StoreDescription,
    StoredFile,
    StoredResponse,
    check_schema,
)

OLDEST = (6, 0)  # version of Redis
T = TypeVar("T", StoredFile, Job, StoredResponse)
ROWS = 100  # rows of a list or of results that are read together

_UNREADABLE = (
    "jobs.store is no address: redis://USER:PASSWORD@HOST:PORT/0, with options of redis-py behind a ?; write / ? # @ & "
    "of a password as %2F %3F %23 %40 %26"
)
_OPERATIONS = files("alignedserve.store").joinpath("redis.lua").read_text(encoding="utf-8")

Migration = Callable[["RedisStore"], Awaitable[None]]


async def _keep_older_out(_: RedisStore) -> None:
    """Change nothing but the number of the schema, so that older versions do not write."""


async def _set_kept_until(store: RedisStore) -> None:
    """Keep jobs that ended under older versions for 30 days more."""
    until = int(time.time()) + 30 * 86_400
    async for kind, tree in store.records():
        if kind == "job" and not msgspec.convert(tree, Job).is_open:
            await store._ask(store.redis.zadd(store._key("ended"), {tree["id"]: until}, nx=True))


MIGRATIONS: tuple[Migration, ...] = (
    _keep_older_out,  # the store is empty, and keys are made when they are used
    _keep_older_out,  # adding a file also unlists it as begun
    _set_kept_until,
    _keep_older_out,  # they would not forget responses
    _keep_older_out,  # they would not count reasoning
)


class RedisStore:
    def __init__(self, url: str, prefix: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        try:
            self._prefix = key_prefix(url, prefix)
            self.redis, self._has_replicas = connect(url, self._prefix), is_replicated(url)
        except (TypeError, ValueError):  # whose texts may have a part of a password
            raise ConfigError(_UNREADABLE) from None
        self._num_following = 1  # replicas of the master, when it last said so
        self._migrations = migrations
        self._where = without_password(url)
        self._operations: Any = self.redis.register_script(_OPERATIONS)
        self._version, self._is_alone_in_cluster = "", False

    @classmethod
    async def open(cls, url: str, prefix: str, migrations: Sequence[Migration] = MIGRATIONS) -> RedisStore:
        store = cls(url, prefix, migrations)
        try:
            await store._prepare()
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        await self.redis.aclose()

    async def describe(self) -> StoreDescription:
        persistence = await self._ask(self.redis.info("persistence"))
        memory = await self._ask(self.redis.info("memory"))
        guarantees, warnings = _durability(bool(persistence.get("aof_enabled")), await self._setting("appendfsync"))
        policy = str(memory.get("maxmemory_policy", "unknown"))
        if policy.startswith("allkeys"):
            warnings += (f"maxmemory-policy {policy} lets Redis drop jobs when its memory is full: set noeviction",)
        if self._is_alone_in_cluster:
            warnings += (f"{self._where} is in a Redis Cluster: redis+cluster:// finds the jobs where they move to",)
        return StoreDescription("Redis", self._version, len(self._migrations), guarantees, warnings)

    # --- Files

    async def begin_file(self, id: str, holder: Holder, now: float) -> None:
        await self._ask(self.redis.hset(self._key("begun"), id, json.dumps([now, holder.name, holder.life])))

    async def forget_file(self, id: str) -> None:
        await self._ask(self.redis.hdel(self._key("begun"), id))

    async def orphans(self, holder: Holder, before: float) -> Sequence[str]:
        begun = await self._ask(self.redis.hgetall(self._key("begun")))
        rows = ((id, *json.loads(text)) for id, text in begun.items())
        return [id for id, at, name, life in rows if (name == holder.name and life != holder.life) or at < before]

    async def add_file(self, file: StoredFile, quota: OwnerUsage | None = None) -> None:
        limits = ("", "") if quota is None else (quota.files, quota.bytes)
        if await self._script("add_file", file.id, file.owner, *_file_values(file), *limits) == "over":
            raise OverQuota(await self.usage(file.owner))

    async def file(self, owner: str, id: str) -> StoredFile | None:
        return await self._record("files", StoredFile, owner, id)

    async def files(
        self, owner: str, page: ListPage, purpose: Purpose | None = None, now: float = 0.0
    ) -> Listing[StoredFile] | None:
        def is_shown(file: StoredFile) -> bool:
            return purpose in (None, file.purpose) and not file.has_expired(now)

        return await self._listing("files", StoredFile, owner, page, is_shown)

    async def remove_file(self, owner: str, id: str) -> bool:
        file = await self.file(owner, id)
        return file is not None and await self._script("remove_file", id, owner, file.bytes) == "done"

    async def expired_files(self, now: float) -> Sequence[StoredFile]:
        ids = await self._ask(self.redis.zrange(self._key("expiry"), "-inf", str(now), byscore=True))
        return await self._decoded("files", StoredFile, ids)

    async def usage(self, owner: str) -> OwnerUsage:
        files = await self._ask(self.redis.zcard(self._key(f"files:{owner}")))
        size = await self._ask(self.redis.hget(self._key("bytes"), owner))
        jobs = await self._ask(self.redis.hget(self._key("open_of"), owner))
        growing = int(await self._script("growing", owner))
        return OwnerUsage(files, int(size or 0) + growing, int(jobs or 0))

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        limit = "" if most_open is None else most_open
        if await self._script("add_job", job.id, job.owner, msgspec.json.encode(job), limit) == "over":
            raise OverQuota(await self.usage(job.owner))

    async def job(self, owner: str, id: str) -> Job | None:
        return await self._record("jobs", Job, owner, id)

    async def jobs(self, owner: str, page: ListPage, now: float = 0.0) -> Listing[Job] | None:
        return await self._listing("jobs", Job, owner, page, lambda job: job.is_kept(now))

    async def forget_jobs(self, now: float) -> None:
        ids = await self._ask(self.redis.zrange(self._key("ended"), "-inf", str(now), byscore=True))
        for job in await self._decoded("jobs", Job, ids):
            await self._script("forget_job", job.id, job.owner)

    async def open_jobs(self, owner: str | None = None) -> Sequence[Job]:
        if owner is None:
            ids = await self._ask(self.redis.zrange(self._key("open"), 0, -1))
        else:
            ids = (await self._script("open_jobs", owner)).split()
        return await self._decoded("jobs", Job, ids)

    async def ended_jobs(self, most: int) -> Sequence[Job]:
        ids = await self._ask(self.redis.zrange(self._key("ended"), 0, most - 1, desc=True))
        return await self._decoded("jobs", Job, ids)

    async def save_job(self, job: Job, fence: int | None = None, files: Sequence[StoredFile] = ()) -> Job:
        saved = replace(job, revision=job.revision + 1)
        kept_until = "" if saved.kept_until is None else saved.kept_until
        state = (job.revision, int(saved.is_open), msgspec.json.encode(saved), kept_until)
        head = ("" if fence is None else str(fence), job.id, job.owner, *state)
        new = [value for file in files for value in (file.id, *_file_values(file))]
        match await self._script("save_job", *head, *new):
            case "fenced":
                raise _fenced(fence)
            case "conflict":
                raise Conflict(f"{job.id} was changed meanwhile")
        return saved

    # --- Lines

    async def add_results(self, job: str, results: Sequence[LineResult], fence: int) -> int:
        values = [
            value
            for result in results
            for value in (result.line, msgspec.json.encode(result), *asdict(result.counts).values())
        ]
        answer = await self._script("add_results", fence, job, *values)
        if answer == "fenced":
            raise _fenced(fence)
        return int(answer)

    async def results(self, job: str) -> AsyncIterator[LineResult]:
        lines = sorted(await self.done_lines(job))
        while lines:
            sizes = self.redis.pipeline(transaction=False)
            for line in lines[:ROWS]:
                sizes.hstrlen(self._key(f"results:{job}"), str(line))
            before = accumulate(await self._ask(sizes.execute()), initial=0)
            together = sum(size < MOST_TOGETHER for size in [*before][:-1])  # any result may be large
            for text in await self._records(f"results:{job}", lines[:together]):
                yield msgspec.json.decode(text, type=LineResult)
            lines = lines[together:]

    async def done_lines(self, job: str) -> frozenset[int]:
        return frozenset(map(int, await self._ask(self.redis.hkeys(self._key(f"results:{job}")))))

    async def counts(self, job: str) -> LineCounts:
        sums = await self._ask(self.redis.hgetall(self._key(f"counts:{job}")))
        sums |= await self._ask(self.redis.hgetall(self._key(f"costs:{job}")))
        return LineCounts(**{name: int(value) for name, value in sums.items()})

    async def set_forecasts(self, forecasts: Mapping[str, Forecast]) -> None:
        texts: Any = {job: msgspec.json.encode(forecast) for job, forecast in forecasts.items()}
        await self._ask(self.redis.hset(self._key("forecasts"), mapping=texts))

    async def forecast(self, job: str) -> Forecast | None:
        text = await self._ask(self.redis.hget(self._key("forecasts"), job))
        return None if text is None else msgspec.json.decode(text, type=Forecast)

    # --- Responses

    async def add_response(self, response: StoredResponse, most_bytes: int) -> None:
        text = msgspec.json.encode(response)
        values = (response.id, response.owner, text, len(text), response.expires_at, most_bytes)
        await self._script("add_response", *values)

    async def save_response(self, response: StoredResponse) -> bool:
        text = msgspec.json.encode(response)
        return await self._script("save_response", response.id, response.owner, text, len(text)) == "done"

    async def response(self, owner: str, id: str) -> StoredResponse | None:
        return await self._record("responses", StoredResponse, owner, id)

    async def remove_response(self, owner: str, id: str) -> bool:
        found = await self.response(owner, id)
        return found is not None and await self._script("forget_response", id, owner) == "done"

    async def forget_responses(self, now: float) -> None:
        while await self._script("forget_expired", now, ROWS) == "more":
            pass

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        answer = await self._script("lease", holder.name, holder.life, int(for_s * 1000), holder.model, holder.keys)
        return int(answer) if answer else None

    async def release(self, holder: Holder) -> None:
        await self._script("release", holder.name, holder.life)

    async def last_lease(self) -> LastLease | None:
        fields = ["model", "holder", "until", "keys"]
        model, holder, until, keys = await self._ask(self.redis.hmget(self._key("lease"), fields))
        seconds, microseconds = await self._ask(self.redis.time())
        is_held = holder is not None and seconds * 1000 + microseconds // 1000 < int(until)
        return None if model is None else LastLease(model, holder if is_held else None, keys or "")

    async def find_faults(self) -> Sequence[str]:
        """Return the sums that differ from the records in two looks: between two reads, a script may change a sum."""
        first = await self._wrong_sums()
        return [] if not first else [fault for fault in await self._wrong_sums() if fault in first]

    async def _wrong_sums(self) -> list[str]:
        size, num_open = Counter[str](), Counter[str]()
        async for kind, tree in self.records():
            if kind == "file":
                size[tree["owner"]] += tree["bytes"]
        for job in await self.open_jobs():
            num_open[job.owner] += 1
        found = []
        for name, sums, unit in (("bytes", size, "bytes of files"), ("open_of", num_open, "open batches")):
            counted = await self._ask(self.redis.hgetall(self._key(name)))
            for owner in sorted(counted.keys() | sums.keys()):
                if int(counted.get(owner, 0)) != sums[owner]:
                    found.append(f"{owner} has {sums[owner]} {unit}, and {counted.get(owner, 0)} are counted")
        return found

    async def records(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for kind in ("file", "job"):
            ids = await self._ask(self.redis.hkeys(self._key(f"{kind}s")))
            for start in range(0, len(ids), ROWS):
                for text in await self._records(f"{kind}s", ids[start : start + ROWS]):
                    yield kind, json.loads(text)
        for job in await self.open_jobs():
            async for result in self.results(job.id):
                yield "result", {"job": job.id, **asdict(result)}

    # --- Internal

    async def _prepare(self) -> None:
        """Check the version of Redis, and bring the schema up to ours."""
        server = await self._ask(self.redis.info("server"))
        self._version = str(server["redis_version"])
        self._is_alone_in_cluster = server.get("redis_mode") == "cluster" and not self._has_replicas
        if tuple(map(int, self._version.split(".")[:2])) < OLDEST:
            raise StoreError(f"{self._where} is Redis {self._version}: {'.'.join(map(str, OLDEST))} or newer is needed")
        found = int(await self._ask(self.redis.get(self._key("schema"))) or 0)
        check_schema(self._where, found, len(self._migrations))
        for number, migration in enumerate(self._migrations[found:], found + 1):
            await migration(self)
            await self._ask(self.redis.set(self._key("schema"), number))

    async def _listing(
        self, table: str, kind: type[Record], owner: str, page: ListPage, is_shown: Callable[[Record], bool]
    ) -> Listing[Record] | None:
        order, start, num_read = self._key(f"{table}:{owner}"), 0, 0
        if page.after is not None:
            rank = self.redis.zrevrank if page.newest_first else self.redis.zrank
            after = await self._ask(rank(order, page.after))
            if after is None:
                return None
            start = int(cast(int, after)) + 1
        found: list[Record] = []
        while len(found) <= page.limit:
            ids = await self._ask(self.redis.zrange(order, start, start + ROWS - 1, desc=page.newest_first))
            if not ids:
                break
            start += ROWS
            num_read += len(ids)
            found += filter(is_shown, await self._decoded(table, kind, ids))
        return Listing(tuple(found[: page.limit]), len(found) > page.limit, num_read - len(found))

    async def _record(self, table: str, kind: type[T], owner: str, id: str) -> T | None:
        text = await self._ask(self.redis.hget(self._key(table), id))
        found = None if text is None else msgspec.json.decode(text, type=kind)
        return found if found is not None and found.owner == owner else None

    async def _decoded(self, table: str, kind: type[T], ids: Sequence[Any]) -> list[T]:
        return [msgspec.json.decode(text, type=kind) for text in await self._records(table, ids)]

    async def _records(self, table: str, ids: Sequence[Any]) -> list[str]:
        """Return the records of those ids that still exist, ROWS of them in an answer."""
        found: list[str | None] = []
        for start in range(0, len(ids), ROWS):
            some = [str(id) for id in ids[start : start + ROWS]]
            found += await self._ask(self.redis.hmget(self._key(table), some))
        return [text for text in found if text is not None]

    async def _setting(self, name: str) -> str | None:
        """Return a setting of Redis; None if Redis does not show it, as managed services do not."""
        try:
            found = await self._ask(self.redis.config_get(name))
        except StoreError:
            return None
        return cast("str | None", found.get(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _script(self, operation: str, *values: Any) -> str:
        """Return what an operation of redis.lua answers."""
        if self._has_replicas:
            return await self._replicated(operation, *values)
        return str(await self._ask(self._operations(keys=[self._prefix], args=[*values, operation])))

    async def _replicated(self, operation: str, *values: Any) -> str:
        """Return the answer when all replicas that follow have what was written, or one of them after REPLICA_MS: the
        next master may be one that has what it had seconds ago, so that one is not enough. Another replica may have
        come meanwhile: then it is sent again, and its first answer counts, since the second finds it done."""
        first: str | None = None

        def keep_first(answer: str) -> str:
            """Keep the first answer also where the connection ends amid a WAIT, and the client sends all again."""
            nonlocal first
            first = answer if first in (None, "over") else first  # "over" wrote nothing, and now there may be room
            return first

        while True:
            both = self.redis.pipeline(transaction=False)
            both.response_callbacks = cast(Any, {"EVAL": keep_first})
            # Whole: a new master knows no script by its hash.
            both.eval(_OPERATIONS, 1, self._prefix, *values, operation)
            both.execute_command("ROLE")
            both.execute_command("WAIT", self._num_following, REPLICA_MS)
            answer, role, num_replicas = await self._ask(both.execute())
            if not num_replicas:
                raise StoreError(f"{self._where} has no replica that answers: what only its master has may be lost")
            waited_for, self._num_following = self._num_following, max(1, len(role[2]))
            if self._num_following <= waited_for:
                return str(answer)

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except OutOfMemoryError as error:
            raise StoreFull(f"{self._where} has no memory left: give Redis more, or delete files") from error
        except (ConnectionError, TimeoutError) as error:
            raise StoreError(f"{self._where} is not reached: {_one_line(error)}") from error
        except SentinelsRefuse as error:
            said = f"the Sentinels of {self._where} refuse the user or password for them in jobs.store"
            named = "start with the right ones, ?sentinel_username=USER&sentinel_password=PASSWORD"
            raise StoreRefused(f"{said} ({_one_line(error).rstrip('.')}): {named}") from error
        except LoginRefused as error:
            said = f"{self._where} refuses the user or password in jobs.store ({_one_line(error).rstrip('.')})"
            raise StoreRefused(f"{said}: start with the right ones, redis://USER:PASSWORD@HOST") from error
        except MovedError as error:
            named = "is in a Redis Cluster: name it redis+cluster:// with --jobs-store"
            raise StoreUnfit(f"{self._where} {named}") from error
        except (ResponseError, RedisError) as error:
            kind = StoreFull if "MISCONF" in str(error) or "No space" in str(error) else StoreError
            raise kind(f"{self._where} refuses: {_one_line(error)}") from error


def _durability(aof: bool, fsync: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not aof:
        lost = "a restart of Redis loses what came after its last snapshot: set appendonly yes"
        return ("what was acknowledged survives as long as Redis runs",), (lost,)
    if fsync == "always":
        return ("what was acknowledged survives a kill of Redis and a loss of power (appendfsync always)",), ()
    survives = "what was acknowledged survives a kill of Redis"
    if fsync == "everysec":
        return (survives,), ("a loss of power loses up to about a second (appendfsync everysec): set always",)
    if fsync == "no":
        return (survives,), ("a loss of power loses what the system has not written (appendfsync no): set always",)
    return (survives,), ("Redis does not tell its appendfsync: a loss of power may lose what came last",)


def _file_values(file: StoredFile) -> tuple[Any, ...]:
    return file.bytes, "" if file.expires_at is None else file.expires_at, msgspec.json.encode(file)


def _fenced(fence: int | None) -> Fenced:
    return Fenced(f"another job runner has the lease: our number was {fence}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
