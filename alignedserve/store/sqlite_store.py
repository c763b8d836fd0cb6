"""The embedded store: one SQLite file, which several processes of a machine share.

In WAL mode readers never wait; with `synchronous=FULL` a commit reaches the disk before it is acknowledged. All
statements of a process run in a thread of their own, so that no event loop waits for the disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from alignedserve.errors import Conflict, Fenced, StoreError, StoreFull
from alignedserve.store.job import Forecast, Job, LineCounts, LineResult
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

BUSY_S = 10.0  # how long a write waits for another process's write
ANSWER_S = 30.0  # for any use, with what waits before it: a disk may hang
LOG_PAGES = 1000  # after which a commit copies the log into the file: SQLite's own default
MOST_LOG_BYTES = 16 << 20  # that the log keeps on the disk once it is copied
SHRUNK_PAGES = 1000  # that are given back together: other processes may write meanwhile
_AGAIN_S = 0.01  # between two tries to open a file that another process is opening
ROWS = 100  # results that are read together
_SUMS = tuple(asdict(LineCounts()))
_SUMS_OF = {"counts": _SUMS[:-3], "costs": _SUMS[-3:]}  # table -> its columns
T = TypeVar("T")

# The steps from each version of the schema to the next; a file's version is the number of steps that it has taken. In
# an upgrade the version before writes on to the file after a step: a step adds tables, and columns that have defaults.
MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL, expires_at INTEGER, record TEXT NOT NULL);
    CREATE INDEX files_of_owner ON files (owner, number);
    CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
        is_open INTEGER NOT NULL, revision INTEGER NOT NULL, record TEXT NOT NULL, forecast TEXT);
    CREATE INDEX jobs_of_owner ON jobs (owner, number);
    CREATE INDEX open_jobs ON jobs (number) WHERE is_open;
    CREATE TABLE results (
        job TEXT NOT NULL, line INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (job, line)) WITHOUT ROWID;
    CREATE TABLE counts (
        job TEXT PRIMARY KEY, completed INTEGER NOT NULL, failed INTEGER NOT NULL, input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE lease (
        one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL, holder TEXT, life INTEGER, until REAL);
    INSERT INTO lease VALUES (1, 0, NULL, NULL, NULL);
    """,
    """
    CREATE TABLE begun (id TEXT PRIMARY KEY, holder TEXT NOT NULL, life INTEGER NOT NULL, at REAL NOT NULL)
        WITHOUT ROWID;
    """,
    # Jobs that ended under older versions are kept for 30 days more.
    """
    ALTER TABLE jobs ADD COLUMN kept_until INTEGER;
    UPDATE jobs SET kept_until = strftime('%s', 'now') + 2592000 WHERE NOT is_open;
    CREATE INDEX ended_jobs ON jobs (kept_until) WHERE kept_until IS NOT NULL;
    """,
    """
    CREATE TABLE responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
        expires_at INTEGER NOT NULL, record TEXT NOT NULL);
    CREATE INDEX responses_of_owner ON responses (owner, number, bytes);
    CREATE INDEX responses_by_expiry ON responses (expires_at);
    """,
    "ALTER TABLE counts ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0;",
    "ALTER TABLE lease ADD COLUMN model TEXT;",
    "ALTER TABLE lease ADD COLUMN keys TEXT NOT NULL DEFAULT '';",
)
# A table that came without a step: the version before opens a file that has it, and leaves it alone.
COSTS = """
    CREATE TABLE IF NOT EXISTS costs (
        job TEXT PRIMARY KEY, device_us INTEGER NOT NULL, millijoules INTEGER NOT NULL, modelled_mj INTEGER NOT NULL)
        WITHOUT ROWID
"""
# Likewise: what the results of an open job take, which counts as its owner's.
GROWING = "CREATE TABLE IF NOT EXISTS growing (job TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID"


class SqliteStore:
    def __init__(self, path: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
        self._path, self._migrations = path, migrations
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path, migrations: Sequence[str] = MIGRATIONS) -> SqliteStore:
        store = cls(path, migrations)
        try:
            await store._run(store._connect)
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        if self._connection is not None:
            await self._run(self._connection.close)
        self._thread.shutdown(wait=self._connection is not None)  # or it may hang where it opens

    async def describe(self) -> StoreDescription:
        guarantees = (
            "what was acknowledged survives a kill of any process, and a loss of power where the disk keeps what it "
            "has confirmed (journal_mode WAL, synchronous FULL)",
            "processes of one machine share it; it must not lie on a network file system",
        )
        return StoreDescription("SQLite", sqlite3.sqlite_version, len(self._migrations), guarantees)

    # --- Files

    async def begin_file(self, id: str, holder: Holder, now: float) -> None:
        await self._do(
            "INSERT OR IGNORE INTO begun (id, holder, life, at) VALUES (?, ?, ?, ?)", id, holder.name, holder.life, now
        )

    async def forget_file(self, id: str) -> None:
        await self._do("DELETE FROM begun WHERE id = ?", id)

    async def orphans(self, holder: Holder, before: float) -> Sequence[str]:
        sql = "SELECT id FROM begun WHERE (holder = ? AND life <> ?) OR at < ?"
        return [row[0] for row in await self._all(sql, holder.name, holder.life, before)]

    async def add_file(self, file: StoredFile, quota: OwnerUsage | None = None) -> None:
        def add() -> None:
            if self._insert_file(file) and quota is not None:
                usage = self._usage(file.owner)
                if usage.files > quota.files or usage.bytes > quota.bytes:
                    raise OverQuota(OwnerUsage(usage.files - 1, usage.bytes - file.bytes, usage.open_jobs))

        await self._write(add)

    async def file(self, owner: str, id: str) -> StoredFile | None:
        return await self._record("files", StoredFile, owner, id)

    async def files(
        self, owner: str, page: ListPage, purpose: Purpose | None = None, now: float = 0.0
    ) -> Listing[StoredFile] | None:
        condition = _not_past("expires_at", now)
        if purpose is not None:
            condition += f" AND purpose = '{purpose.value}'"
        return await self._listing("files", StoredFile, owner, page, condition)

    async def remove_file(self, owner: str, id: str) -> bool:
        def remove() -> bool:
            if not self._execute("DELETE FROM files WHERE id = ? AND owner = ?", id, owner).rowcount:
                return False
            # The row says that the file was begun long ago, so that any process may sweep it.
            self._execute("INSERT OR REPLACE INTO begun (id, holder, life, at) VALUES (?, '', 0, 0)", id)
            return True

        return await self._write(remove)

    async def expired_files(self, now: float) -> Sequence[StoredFile]:
        return await self._records(
            StoredFile, "SELECT record FROM files WHERE expires_at <= ? ORDER BY expires_at", now
        )

    async def usage(self, owner: str) -> OwnerUsage:
        return await self._run(lambda: self._usage(owner))

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        sql = "INSERT OR IGNORE INTO jobs (id, owner, is_open, revision, record) VALUES (?, ?, ?, ?, ?)"
        values = (job.id, job.owner, job.is_open, job.revision, _text(job))

        def add() -> None:
            if self._execute(sql, *values).rowcount and most_open is not None:
                usage = self._usage(job.owner)
                if usage.open_jobs > most_open:
                    raise OverQuota(replace(usage, open_jobs=usage.open_jobs - 1))

        await self._write(add)

    async def job(self, owner: str, id: str) -> Job | None:
        return await self._record("jobs", Job, owner, id)

    async def jobs(self, owner: str, page: ListPage, now: float = 0.0) -> Listing[Job] | None:
        return await self._listing("jobs", Job, owner, page, _not_past("kept_until", now))

    async def forget_jobs(self, now: float) -> None:
        await self._do("DELETE FROM jobs WHERE kept_until <= ?", now)

    async def open_jobs(self, owner: str | None = None) -> Sequence[Job]:
        sql = "SELECT record FROM jobs WHERE is_open AND owner = COALESCE(?, owner) ORDER BY number"
        return await self._records(Job, sql, owner)

    async def ended_jobs(self, most: int) -> Sequence[Job]:
        sql = "SELECT record FROM jobs WHERE kept_until IS NOT NULL ORDER BY kept_until DESC LIMIT ?"
        return await self._records(Job, sql, most)

    async def save_job(self, job: Job, fence: int | None = None, files: Sequence[StoredFile] = ()) -> Job:
        saved = replace(job, revision=job.revision + 1)

        def save() -> None:
            self._check_fence(fence)
            sql = "UPDATE jobs SET is_open = ?, revision = ?, record = ?, kept_until = ? WHERE id = ? AND revision = ?"
            values = (saved.is_open, saved.revision, _text(saved), saved.kept_until, job.id, job.revision)
            if not self._execute(sql, *values).rowcount:
                raise Conflict(f"{job.id} was changed meanwhile")
            for file in files:
                self._insert_file(file)
            if not saved.is_open:
                for table in ("results", "growing", *_SUMS_OF):
                    self._execute(f"DELETE FROM {table} WHERE job = ?", job.id)

        await self._write(save)
        return saved

    # --- Lines

    async def add_results(self, job: str, results: Sequence[LineResult], fence: int) -> int:
        def add() -> int:
            self._check_fence(fence)
            sql = "INSERT OR IGNORE INTO results (job, line, record) VALUES (?, ?, ?)"
            new = [result for result in results if self._execute(sql, job, result.line, _text(result)).rowcount]
            counts = asdict(sum((result.counts for result in new), LineCounts()))
            for table, names in _SUMS_OF.items():
                sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in names)
                columns, marks = ", ".join(("job", *names)), ", ".join("?" * (1 + len(names)))
                sql = f"INSERT INTO {table} ({columns}) VALUES ({marks}) ON CONFLICT (job) DO UPDATE SET {sums}"
                self._execute(sql, job, *(counts[name] for name in names))
            sql = "INSERT INTO growing VALUES (?, ?) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes"
            self._execute(sql, job, sum(len(result.text) for result in new))
            return len(new)

        return await self._write(add)

    async def results(self, job: str) -> AsyncIterator[LineResult]:
        last = 0
        while rows := await self._run(partial(self._some_results, job, last)):
            last = rows[-1][0]
            for _, record in rows:
                yield msgspec.json.decode(record, type=LineResult)

    def _some_results(self, job: str, after: int) -> list[tuple[int, str]]:
        """Return the next results, ROWS of them or MOST_TOGETHER characters: any may be large."""
        sql = "SELECT line, record FROM results WHERE job = ? AND line > ? ORDER BY line LIMIT ?"
        rows: list[tuple[int, str]] = []
        size = 0
        with closing(self._execute(sql, job, after, ROWS)) as cursor:
            while size < MOST_TOGETHER and (row := cursor.fetchone()) is not None:
                rows.append(row)
                size += len(row[1])
        return rows

    async def done_lines(self, job: str) -> frozenset[int]:
        return frozenset(row[0] for row in await self._all("SELECT line FROM results WHERE job = ?", job))

    async def counts(self, job: str) -> LineCounts:
        sums = dict[str, int]()
        for table, names in _SUMS_OF.items():  # costs are missing where a version before has written all results
            row = await self._first(f"SELECT {', '.join(names)} FROM {table} WHERE job = ?", job)
            sums |= zip(names, row or (0,) * len(names), strict=True)
        return LineCounts(**sums)

    async def set_forecasts(self, forecasts: Mapping[str, Forecast]) -> None:
        def update() -> None:
            for job, forecast in forecasts.items():
                self._execute("UPDATE jobs SET forecast = ? WHERE id = ?", _text(forecast), job)

        await self._write(update)

    async def forecast(self, job: str) -> Forecast | None:
        row = await self._first("SELECT forecast FROM jobs WHERE id = ?", job)
        return None if row is None or row[0] is None else msgspec.json.decode(row[0], type=Forecast)

    # --- Responses

    async def add_response(self, response: StoredResponse, most_bytes: int) -> None:
        text = _text(response)
        values = (response.id, response.owner, len(text.encode()), response.expires_at, text)
        sums = "SELECT number, SUM(bytes) OVER (ORDER BY number DESC) AS size FROM responses WHERE owner = ?"
        oldest = f"DELETE FROM responses WHERE number IN (SELECT number FROM ({sums}) WHERE size > ?)"

        def add() -> None:
            sql = "INSERT OR IGNORE INTO responses (id, owner, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?)"
            self._execute(sql, *values)
            sql = "SELECT COALESCE(SUM(bytes), 0) FROM responses WHERE owner = ?"
            if self._execute(sql, response.owner).fetchone()[0] > most_bytes:
                self._execute(oldest, response.owner, most_bytes)

        await self._write(add)

    async def save_response(self, response: StoredResponse) -> bool:
        text = _text(response)
        sql = "UPDATE responses SET bytes = ?, record = ? WHERE id = ? AND owner = ?"
        return await self._do(sql, len(text.encode()), text, response.id, response.owner) > 0

    async def response(self, owner: str, id: str) -> StoredResponse | None:
        return await self._record("responses", StoredResponse, owner, id)

    async def remove_response(self, owner: str, id: str) -> bool:
        return await self._do("DELETE FROM responses WHERE id = ? AND owner = ?", id, owner) > 0

    async def forget_responses(self, now: float) -> None:
        await self._do("DELETE FROM responses WHERE expires_at <= ?", now)
        while await self._run(self._shrink):
            pass

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        def take() -> int | None:
            now = time.time()
            number, name, life, until = self._execute("SELECT number, holder, life, until FROM lease").fetchone()
            is_held = name not in (None, holder.name) and now < until <= now + for_s  # later: the clock was set back
            # Before SQLite 3.51.3 commits could be lost where one process copied the log that another had just copied
            # (its WAL-reset bug). One that alone copies, after its own commits, never finds all of it copied.
            self._execute(f"PRAGMA wal_autocheckpoint = {0 if is_held else LOG_PAGES}")
            if is_held:
                return None
            number = int(number) + ((name, life) != (holder.name, holder.life))
            sql = "UPDATE lease SET number = ?, holder = ?, life = ?, until = ?, model = ?, keys = ?"
            self._execute(sql, number, holder.name, holder.life, now + for_s, holder.model, holder.keys)
            return number

        return await self._write(take)

    async def release(self, holder: Holder) -> None:
        sql = "UPDATE lease SET holder = NULL, life = NULL, until = NULL WHERE holder = ? AND life = ?"
        await self._do(sql, holder.name, holder.life)

    async def last_lease(self) -> LastLease | None:
        model, holder, until, keys = await self._first("SELECT model, holder, until, keys FROM lease")
        is_held = holder is not None and time.time() < until
        return None if model is None else LastLease(model, holder if is_held else None, keys)

    async def find_faults(self) -> Sequence[str]:
        lines = [row[0] for row in await self._all("PRAGMA integrity_check")]
        return [] if lines == ["ok"] else [f"{self._path} is damaged: {line}" for line in lines]

    async def records(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for kind in ("file", "job"):
            last = 0
            sql = f"SELECT number, record FROM {kind}s WHERE number > ? ORDER BY number LIMIT ?"
            while rows := await self._all(sql, last, ROWS):
                last = rows[-1][0]
                for _, record in rows:
                    yield kind, json.loads(record)
        for (job,) in await self._all("SELECT DISTINCT job FROM results"):
            async for result in self.results(job):
                yield "result", {"job": job, **asdict(result)}

    # --- In the store's thread

    def _connect(self) -> None:
        if self._path.name != ":memory:":
            # No other user of the machine may read it; the files that SQLite puts beside it get the same rights.
            with suppress(OSError):  # SQLite says what is wrong
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._connection = connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file, before anything is in it
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {MOST_LOG_BYTES}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # the holder of the lease does it
        _use_wal(connection)
        with self._transaction():
            found = self._execute("PRAGMA user_version").fetchone()[0]
            known = len(self._migrations)
            check_schema(self._path, found, known)
            for script in self._migrations[found:]:
                for statement in filter(str.strip, script.split(";")):
                    self._execute(statement)
            self._execute(COSTS)
            self._execute(GROWING)
            self._execute(f"PRAGMA user_version = {known}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Begin a transaction as a writer's, so that no other writer changes what it reads; commit it at the end."""
        try:
            self._execute("BEGIN IMMEDIATE")
            yield
            self._execute("COMMIT")
        finally:
            with suppress(sqlite3.Error):  # it has ended already if it was committed or the disk is full
                self._execute("ROLLBACK")

    def _execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(sql, values)

    def _insert_file(self, file: StoredFile) -> bool:
        """Insert a file and unlist it as begun; return whether the file is new."""
        sql = "INSERT OR IGNORE INTO files (id, owner, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)"
        values = (file.id, file.owner, file.purpose.value, file.bytes, file.expires_at, _text(file))
        is_new = self._execute(sql, *values).rowcount > 0
        self._execute("DELETE FROM begun WHERE id = ?", file.id)
        return is_new

    def _usage(self, owner: str) -> OwnerUsage:
        sql = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?"
        files, size = self._execute(sql, owner).fetchone()
        sums = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM jobs LEFT JOIN growing ON job = id"
        jobs, growing = self._execute(f"{sums} WHERE owner = ? AND is_open", owner).fetchone()
        return OwnerUsage(files, size + growing, jobs)

    def _shrink(self) -> bool:
        """Give the disk back some of what deleted rows took; return whether there is more."""
        self._execute(f"PRAGMA incremental_vacuum({SHRUNK_PAGES})").fetchall()
        is_incremental = self._execute("PRAGMA auto_vacuum").fetchone()[0] == 2
        return is_incremental and bool(self._execute("PRAGMA freelist_count").fetchone()[0] >= SHRUNK_PAGES)

    def _check_fence(self, fence: int | None) -> None:
        number = self._execute("SELECT number FROM lease").fetchone()[0]
        if fence is not None and fence != number:
            raise Fenced(f"another job runner has the lease: its number is {number}, ours was {fence}")

    # --- For the event loop

    async def _listing(
        self, table: str, kind: type[Record], owner: str, page: ListPage, condition: str
    ) -> Listing[Record] | None:
        where = f"owner = ?{condition}"
        values: list[Any] = [owner]
        if page.after is not None:
            after = await self._first(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", page.after, owner)
            if after is None:
                return None
            where += f" AND number {'<' if page.newest_first else '>'} ?"
            values.append(after[0])
        order = "DESC" if page.newest_first else "ASC"
        sql = f"SELECT record FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        found = await self._records(kind, sql, *values, page.limit + 1)
        return Listing(tuple(found[: page.limit]), len(found) > page.limit)

    async def _record(self, table: str, kind: type[T], owner: str, id: str) -> T | None:
        row = await self._first(f"SELECT record FROM {table} WHERE id = ? AND owner = ?", id, owner)
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    async def _records(self, kind: type[T], sql: str, *values: Any) -> list[T]:
        """Return records, which are decoded in the store's thread: there may be thousands."""
        return await self._run(lambda: [msgspec.json.decode(row[0], type=kind) for row in self._execute(sql, *values)])

    async def _first(self, sql: str, *values: Any) -> Any:
        return await self._run(lambda: self._execute(sql, *values).fetchone())

    async def _all(self, sql: str, *values: Any) -> list[Any]:
        return await self._run(lambda: self._execute(sql, *values).fetchall())

    async def _do(self, sql: str, *values: Any) -> int:
        """Execute one statement, and return how many rows it has changed."""
        return await self._write(lambda: self._execute(sql, *values).rowcount)

    async def _write(self, work: Callable[[], T]) -> T:
        def work_in_transaction() -> T:
            with self._transaction():
                return work()

        return await self._run(work_in_transaction)

    async def _run(self, work: Callable[[], T]) -> T:
        """Do the work in the store's thread. What is late there may still be done, as after an answer that was lost."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.wait_for(done, ANSWER_S)
        except sqlite3.Error as error:
            raise self._store_error(error) from error
        except asyncio.TimeoutError:
            raise StoreError(f"the disk of {self._path} has not answered for {ANSWER_S:g} s") from None

    def _store_error(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "full" in text:
            return StoreFull(f"no space is left for {self._path}: free some on its disk")
        if "readonly" in text or "unable to open" in text:
            return StoreError(f"{self._path} cannot be written: check who owns it and its folder ({text})")
        if "malformed" in text or "not a database" in text:
            return StoreError(f"{self._path} is damaged ({text}): bring it back from a backup, or move it away")
        return StoreError(f"{self._path} cannot be used now: {text}")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode.

    When several processes open a new file at once, all but the first find it locked, and here SQLite does not wait."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


def _not_past(column: str, now: float) -> str:
    """Return the condition that the instant in this column has not passed; NULL never passes."""
    return f" AND COALESCE({column} > {float(now)!r}, 1)"


def _text(record: object) -> str:
    return msgspec.json.encode(record).decode()
