"""The store for several machines: Redis, from 6.0 on.

Every operation that reads and then writes is a Lua script, so it is atomic. A script can be sent again if its answer
was lost with the connection: it then finds its write done and says so. All keys begin with {prefix}, braces included:
in a Redis Cluster they lie on the same node, which scripts need.

    files, jobs          id -> record            files:OWNER, jobs:OWNER   ids in order of arrival
    revisions            job -> revision         open                      jobs that have not ended, in the same order
    results:JOB          line -> record          counts:JOB                sums over the results
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
from itertools import accumulate
from typing import Any, TypeVar, cast

import msgspec
from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError, ResponseError, TimeoutError

from alignedserve.errors import Conflict, Fenced, StoreError, StoreFull
from alignedserve.store.job import Forecast, Job, LineCounts, LineResult
from alignedserve.store.redis_client import REPLICA_MS, connect, is_by_sentinels
from alignedserve.store.response import StoredResponse
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
)

OLDEST = (6, 0)  # version of Redis
T = TypeVar("T", StoredFile, Job, StoredResponse)
ROWS = 100  # rows of a list or of results that are read together

# Every script has the prefix as its key, and begins with these lines.
_HEAD = """
local p = KEYS[1]
local function fenced(fence)
  return fence ~= '' and tonumber(fence) ~= tonumber(redis.call('HGET', p..':lease', 'number') or 0)
end
local function add_file(id, owner, bytes, expires_at, record)
  redis.call('HDEL', p..':begun', id)
  if redis.call('HSETNX', p..':files', id, record) == 0 then return end
  redis.call('ZADD', p..':files:'..owner, redis.call('INCR', p..':numbers'), id)
  redis.call('HINCRBY', p..':bytes', owner, bytes)
  if expires_at ~= '' then redis.call('ZADD', p..':expiry', expires_at, id) end
end
"""
_ADD_FILE = """
local id, owner, bytes, most_files, most_bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[6]), tonumber(ARGV[7])
if most_files and redis.call('HEXISTS', p..':files', id) == 0 then
  local files, size = redis.call('ZCARD', p..':files:'..owner), redis.call('HGET', p..':bytes', owner)
  if files >= most_files or tonumber(size or 0) + tonumber(bytes) > most_bytes then return 'over' end
end
add_file(id, owner, bytes, ARGV[4], ARGV[5])
return 'done'
"""
_REMOVE_FILE = """
local id, owner, bytes = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HDEL', p..':files', id) == 0 then return 'gone' end
redis.call('ZREM', p..':files:'..owner, id)
redis.call('ZREM', p..':expiry', id)
redis.call('HINCRBY', p..':bytes', owner, -bytes)
redis.call('HSET', p..':begun', id, '[0, "", 0]')  -- as if begun long ago, so that any process may sweep it
return 'done'
"""
_ADD_JOB = """
local id, owner, record, most_open = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('HEXISTS', p..':jobs', id) == 1 then return 'done' end
if most_open and tonumber(redis.call('HGET', p..':open_of', owner) or 0) >= most_open then return 'over' end
redis.call('HSET', p..':jobs', id, record)
local number = redis.call('INCR', p..':numbers')
redis.call('HSET', p..':revisions', id, 0)
redis.call('ZADD', p..':jobs:'..owner, number, id)
redis.call('ZADD', p..':open', number, id)
redis.call('HINCRBY', p..':open_of', owner, 1)
return 'done'
"""
_SAVE_JOB = """
local fence, id, owner, revision, is_open, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local kept_until = ARGV[7]
if redis.call('HGET', p..':jobs', id) == record then return 'done' end
if fenced(fence) then return 'fenced' end
if redis.call('HGET', p..':revisions', id) ~= revision then return 'conflict' end
redis.call('HSET', p..':jobs', id, record)
redis.call('HINCRBY', p..':revisions', id, 1)
if is_open == '0' and redis.call('ZREM', p..':open', id) == 1 then
  redis.call('HINCRBY', p..':open_of', owner, -1)
  redis.call('DEL', p..':results:'..id, p..':counts:'..id)
  redis.call('HDEL', p..':forecasts', id)
end
if kept_until ~= '' then redis.call('ZADD', p..':ended', kept_until, id) end
for at = 8, #ARGV, 4 do add_file(ARGV[at], owner, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]) end
return 'done'
"""
_FORGET_JOB = """
local id, owner = ARGV[1], ARGV[2]
redis.call('HDEL', p..':jobs', id)
redis.call('HDEL', p..':revisions', id)
redis.call('ZREM', p..':jobs:'..owner, id)
redis.call('ZREM', p..':ended', id)
return 'done'
"""
_ADD_RESULTS = """
local fence, job, new = ARGV[1], ARGV[2], 0
if fenced(fence) then return 'fenced' end
for at = 3, #ARGV, 8 do
  if redis.call('HSETNX', p..':results:'..job, ARGV[at], ARGV[at + 1]) == 1 then
    new = new + 1
    for offset, name in ipairs({
      'completed', 'failed', 'input_tokens', 'cached_tokens', 'output_tokens', 'reasoning_tokens'
    }) do
      redis.call('HINCRBY', p..':counts:'..job, name, ARGV[at + 1 + offset])
    end
  end
end
return tostring(new)
"""
_FORGETS_RESPONSE = """
local function forget(id, owner)
  if redis.call('HDEL', p..':responses', id) == 0 then return 'gone' end
  redis.call('HINCRBY', p..':response_bytes', owner, -redis.call('HGET', p..':response_sizes', id))
  redis.call('HDEL', p..':response_sizes', id)
  redis.call('ZREM', p..':responses:'..owner, id)
  redis.call('ZREM', p..':response_expiry', id)
  return 'done'
end
"""
_ADD_RESPONSE = f"""{_FORGETS_RESPONSE}
local id, owner, record, size, expires_at, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
if redis.call('HSETNX', p..':responses', id, record) == 0 then return 'done' end
redis.call('HSET', p..':response_sizes', id, size)
redis.call('ZADD', p..':responses:'..owner, redis.call('INCR', p..':numbers'), id)
redis.call('ZADD', p..':response_expiry', expires_at, id)
local all = redis.call('HINCRBY', p..':response_bytes', owner, size)
while all > most do
  local oldest = redis.call('ZRANGE', p..':responses:'..owner, 0, 0)[1]
  if not oldest then break end
  forget(oldest, owner)
  all = tonumber(redis.call('HGET', p..':response_bytes', owner))
end
return 'done'
"""
_SAVE_RESPONSE = """
local id, owner, record, size = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HEXISTS', p..':responses', id) == 0 then return 'gone' end
redis.call('HSET', p..':responses', id, record)
redis.call('HINCRBY', p..':response_bytes', owner, size - redis.call('HGET', p..':response_sizes', id))
redis.call('HSET', p..':response_sizes', id, size)
return 'done'
"""
_FORGET_RESPONSE = f"""{_FORGETS_RESPONSE}
return forget(ARGV[1], ARGV[2])
"""
_FORGET_EXPIRED = rf"""{_FORGETS_RESPONSE}
local expired = redis.call('ZRANGEBYSCORE', p..':response_expiry', '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(expired) do
  local record = redis.call('HGET', p..':responses', id)
  -- The owner stands in front: a record may have megabytes, and nobody reads on.
  forget(id, string.match(record, '^{{"id":"[^"]*","owner":"([^"\\]*)"') or cjson.decode(record).owner)
end
return #expired == tonumber(ARGV[2]) and 'more' or 'done'
"""
_LEASE = """
local name, life, for_ms, model, keys = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local has = redis.call('HMGET', p..':lease', 'number', 'holder', 'life', 'until')
local number = tonumber(has[1] or 0)
local till = tonumber(has[4] or 0)
if has[2] and has[2] ~= name and till > now and till <= now + for_ms then return '' end -- later: the clock was set back
if has[2] ~= name or has[3] ~= life then number = number + 1 end
redis.call('HSET', p..':lease', 'number', number, 'holder', name, 'life', life, 'until', now + for_ms)
redis.call('HSET', p..':lease', 'model', model, 'keys', keys)
return tostring(number)
"""
_RELEASE = """
local has = redis.call('HMGET', p..':lease', 'holder', 'life')
if has[1] == ARGV[1] and has[2] == ARGV[2] then redis.call('HDEL', p..':lease', 'holder', 'life', 'until') end
return 'done'
"""

Migration = Callable[["RedisStore"], Awaitable[None]]


async def _start(_: RedisStore) -> None:
    """Change nothing: the store is empty, and keys are made when they are used."""


async def _unlist_begun_files(_: RedisStore) -> None:
    """Keep older versions from writing: since this schema, adding a file also unlists it as begun."""


async def _set_kept_until(store: RedisStore) -> None:
    """Keep jobs that ended under older versions for 30 days more."""
    until = int(time.time()) + 30 * 86_400
    async for kind, tree in store.records():
        if kind == "job" and not msgspec.convert(tree, Job).is_open:
            await store._ask(store.redis.zadd(store._key("ended"), {tree["id"]: until}, nx=True))


async def _add_responses(_: RedisStore) -> None:
    """Keep older versions from writing: they would not forget responses."""


async def _add_reasoning_tokens(_: RedisStore) -> None:
    """Keep older versions from writing: they would not count reasoning."""


MIGRATIONS: tuple[Migration, ...] = (
    _start,
    _unlist_begun_files,
    _set_kept_until,
    _add_responses,
    _add_reasoning_tokens,
)


class RedisStore:
    def __init__(self, url: str, prefix: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self.redis, self._has_replicas = connect(url), is_by_sentinels(url)
        self._num_following = 1  # replicas of the master, when it last said so
        self._prefix, self._migrations = f"{{{prefix}}}", migrations
        self._where = _without_password(url)
        self._scripts: dict[str, Any] = {}
        self._version = ""

    @classmethod
    async def open(cls, url: str, prefix: str, migrations: Sequence[Migration] = MIGRATIONS) -> RedisStore:
        store = cls(url, prefix, migrations)
        try:
            await store._check_version()
            await store._migrate()
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
        if await self._script(_ADD_FILE, file.id, file.owner, *_file_values(file), *limits) == "over":
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
        return file is not None and await self._script(_REMOVE_FILE, id, owner, file.bytes) == "done"

    async def expired_files(self, now: float) -> Sequence[StoredFile]:
        ids = await self._ask(self.redis.zrange(self._key("expiry"), "-inf", str(now), byscore=True))
        return [msgspec.json.decode(text, type=StoredFile) for text in await self._records("files", ids)]

    async def usage(self, owner: str) -> OwnerUsage:
        files = await self._ask(self.redis.zcard(self._key(f"files:{owner}")))
        size = await self._ask(self.redis.hget(self._key("bytes"), owner))
        jobs = await self._ask(self.redis.hget(self._key("open_of"), owner))
        return OwnerUsage(files, int(size or 0), int(jobs or 0))

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        limit = "" if most_open is None else most_open
        if await self._script(_ADD_JOB, job.id, job.owner, msgspec.json.encode(job), limit) == "over":
            raise OverQuota(await self.usage(job.owner))

    async def job(self, owner: str, id: str) -> Job | None:
        return await self._record("jobs", Job, owner, id)

    async def jobs(self, owner: str, page: ListPage, now: float = 0.0) -> Listing[Job] | None:
        return await self._listing("jobs", Job, owner, page, lambda job: job.is_kept(now))

    async def forget_jobs(self, now: float) -> None:
        ids = await self._ask(self.redis.zrange(self._key("ended"), "-inf", str(now), byscore=True))
        for text in await self._records("jobs", ids):
            job = msgspec.json.decode(text, type=Job)
            await self._script(_FORGET_JOB, job.id, job.owner)

    async def open_jobs(self) -> Sequence[Job]:
        ids = await self._ask(self.redis.zrange(self._key("open"), 0, -1))
        return [msgspec.json.decode(text, type=Job) for text in await self._records("jobs", ids)]

    async def ended_jobs(self, most: int) -> Sequence[Job]:
        ids = await self._ask(self.redis.zrange(self._key("ended"), 0, most - 1, desc=True))
        return [msgspec.json.decode(text, type=Job) for text in await self._records("jobs", ids)]

    async def save_job(self, job: Job, fence: int | None = None, files: Sequence[StoredFile] = ()) -> Job:
        saved = replace(job, revision=job.revision + 1)
        kept_until = "" if saved.kept_until is None else saved.kept_until
        state = (job.revision, int(saved.is_open), msgspec.json.encode(saved), kept_until)
        head = (_fence(fence), job.id, job.owner, *state)
        new = [value for file in files for value in (file.id, *_file_values(file))]
        match await self._script(_SAVE_JOB, *head, *new):
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
        answer = await self._script(_ADD_RESULTS, fence, job, *values)
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
        await self._script(_ADD_RESPONSE, *values)

    async def save_response(self, response: StoredResponse) -> bool:
        text = msgspec.json.encode(response)
        return await self._script(_SAVE_RESPONSE, response.id, response.owner, text, len(text)) == "done"

    async def response(self, owner: str, id: str) -> StoredResponse | None:
        return await self._record("responses", StoredResponse, owner, id)

    async def remove_response(self, owner: str, id: str) -> bool:
        found = await self.response(owner, id)
        return found is not None and await self._script(_FORGET_RESPONSE, id, owner) == "done"

    async def forget_responses(self, now: float) -> None:
        while await self._script(_FORGET_EXPIRED, now, ROWS) == "more":
            pass

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        answer = await self._script(_LEASE, holder.name, holder.life, int(for_s * 1000), holder.model, holder.keys)
        return int(answer) if answer else None

    async def release(self, holder: Holder) -> None:
        await self._script(_RELEASE, holder.name, holder.life)

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

    async def _check_version(self) -> None:
        self._version = str((await self._ask(self.redis.info("server")))["redis_version"])
        if tuple(map(int, self._version.split(".")[:2])) < OLDEST:
            raise StoreError(f"{self._where} is Redis {self._version}: {'.'.join(map(str, OLDEST))} or newer is needed")

    async def _migrate(self) -> None:
        found = int(await self._ask(self.redis.get(self._key("schema"))) or 0)
        if found > len(self._migrations):
            raise StoreError(
                f"{self._where} has schema {found}, this version of AlignedServe knows up to {len(self._migrations)}: "
                "use a newer one"
            )
        for number, migration in enumerate(self._migrations[found:], found + 1):
            await migration(self)
            await self._ask(self.redis.set(self._key("schema"), number))

    async def _listing(
        self, table: str, kind: type[Record], owner: str, page: ListPage, is_shown: Callable[[Record], bool]
    ) -> Listing[Record] | None:
        order, start = self._key(f"{table}:{owner}"), 0
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
            records = [msgspec.json.decode(text, type=kind) for text in await self._records(table, ids)]
            found += filter(is_shown, records)
        return Listing(tuple(found[: page.limit]), len(found) > page.limit)

    async def _record(self, table: str, kind: type[T], owner: str, id: str) -> T | None:
        text = await self._ask(self.redis.hget(self._key(table), id))
        found = None if text is None else msgspec.json.decode(text, type=kind)
        return found if found is not None and found.owner == owner else None

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

    async def _script(self, body: str, *values: Any) -> str:
        if self._has_replicas:
            return await self._replicated(body, *values)
        script = self._scripts.get(body)
        if script is None:
            script = self._scripts[body] = self.redis.register_script(_HEAD + body)
        return str(await self._ask(script(keys=[self._prefix], args=list(values))))

    async def _replicated(self, body: str, *values: Any) -> str:
        """Run a script, and return its answer when all replicas that follow have what it wrote, or one of them after
        REPLICA_MS: Sentinels may choose a replica by what it had seconds ago, so that one is not enough."""
        while True:
            both = self.redis.pipeline(transaction=False)
            both.eval(_HEAD + body, 1, self._prefix, *values)  # whole: a new master knows no script by its hash
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


def _fence(fence: int | None) -> str:
    return "" if fence is None else str(fence)


def _fenced(fence: int | None) -> Fenced:
    return Fenced(f"another job runner has the lease: our number was {fence}")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
