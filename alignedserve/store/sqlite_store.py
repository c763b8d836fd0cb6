"""The embedded store: one SQLite file, which several processes of a machine share.

In WAL mode readers wait for nobody; `synchronous=FULL` has each commit reach the disk before it is acknowledged. All
statements of a process run in one thread of their own, so that no event loop waits for the disk.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.errors import Conflict, Fenced, StoreError, StoreFull
from alignedserve.store.job import Counts, Forecast, Job, LineResult
from alignedserve.store.store import About, Holder, Listing, OverQuota, Page, Purpose, Record, StoredFile, Taken

BUSY_S = 10.0  # how long another process's write is waited for
_AGAIN_S = 0.01  # between two tries to open a file that another opens just now
ROWS = 100  # of results that are read together
T = TypeVar("T")

# From each version of the schema to the next; the version is how many of them a file has seen.
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
    # Whatever has ended before is kept for 30 days more.
    """
    ALTER TABLE jobs ADD COLUMN kept_until INTEGER;
    UPDATE jobs SET kept_until = strftime('%s', 'now') + 2592000 WHERE NOT is_open;
    CREATE INDEX ended_jobs ON jobs (kept_until) WHERE kept_until IS NOT NULL;
    """,
)


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
        self._thread.shutdown()

    async def about(self) -> About:
        guarantees = (
            "what was acknowledged survives a kill of any process, and a loss of power where the disk keeps what it "
            "has confirmed (journal_mode WAL, synchronous FULL)",
            "processes of one machine share it; it must not lie on a network file system",
        )
        return About("SQLite", sqlite3.sqlite_version, len(self._migrations), guarantees)

    # --- Files

    async def begin_file(self, id: str, holder: Holder, now: float) -> None:
        values = (id, holder.name, holder.life, now)
        await self._write(lambda: self._execute("INSERT OR IGNORE INTO begun VALUES (?, ?, ?, ?)", *values))

    async def forget_file(self, id: str) -> None:
        await self._write(lambda: self._execute("DELETE FROM begun WHERE id = ?", id))

    async def orphans(self, holder: Holder, before: float) -> Sequence[str]:
        sql = "SELECT id FROM begun WHERE (holder = ? AND life <> ?) OR at < ?"
        return [row[0] for row in await self._all(sql, holder.name, holder.life, before)]

    async def add_file(self, file: StoredFile, most: Taken | None = None) -> None:
        def add() -> None:
            if self._insert_file(file) and most is not None:
                has = self._taken(file.owner)
                if has.files > most.files or has.bytes > most.bytes:
                    raise OverQuota(Taken(has.files - 1, has.bytes - file.bytes, has.open_jobs))

        await self._write(add)

    async def file(self, owner: str, id: str) -> StoredFile | None:
        row = await self._one("SELECT record FROM files WHERE id = ? AND owner = ?", id, owner)
        return None if row is None else _file(row[0])

    async def files(
        self, owner: str, page: Page, purpose: Purpose | None = None, now: float = 0.0
    ) -> Listing[StoredFile] | None:
        only = _still("expires_at", now)
        if purpose is not None:
            only += f" AND purpose = '{purpose.value}'"
        return await self._listing("files", _file, owner, page, only)

    async def remove_file(self, owner: str, id: str) -> bool:
        def remove() -> bool:
            if not self._execute("DELETE FROM files WHERE id = ? AND owner = ?", id, owner).rowcount:
                return False
            self._execute(
                "INSERT OR REPLACE INTO begun VALUES (?, '', 0, 0)", id
            )  # begun long ago: anybody may sweep it
            return True

        return await self._write(remove)

    async def expired_files(self, now: float) -> Sequence[StoredFile]:
        rows = await self._all("SELECT record FROM files WHERE expires_at <= ? ORDER BY expires_at", now)
        return [_file(row[0]) for row in rows]

    async def taken(self, owner: str) -> Taken:
        return await self._run(lambda: self._taken(owner))

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        sql = "INSERT OR IGNORE INTO jobs (id, owner, is_open, revision, record) VALUES (?, ?, ?, ?, ?)"
        values = (job.id, job.owner, job.is_open, job.revision, _text(job))

        def add() -> None:
            if self._execute(sql, *values).rowcount and most_open is not None:
                has = self._taken(job.owner)
                if has.open_jobs > most_open:
                    raise OverQuota(replace(has, open_jobs=has.open_jobs - 1))

        await self._write(add)

    async def job(self, owner: str, id: str) -> Job | None:
        row = await self._one("SELECT record FROM jobs WHERE id = ? AND owner = ?", id, owner)
        return None if row is None else _job(row[0])

    async def jobs(self, owner: str, page: Page, now: float = 0.0) -> Listing[Job] | None:
        return await self._listing("jobs", _job, owner, page, _still("kept_until", now))

    async def forget_jobs(self, now: float) -> None:
        await self._write(lambda: self._execute("DELETE FROM jobs WHERE kept_until <= ?", now))

    async def open_jobs(self) -> Sequence[Job]:
        return [_job(row[0]) for row in await self._all("SELECT record FROM jobs WHERE is_open ORDER BY number")]

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
                self._execute("DELETE FROM results WHERE job = ?", job.id)
                self._execute("DELETE FROM counts WHERE job = ?", job.id)

        await self._write(save)
        return saved

    # --- Lines

    async def add_results(self, job: str, results: Sequence[LineResult], fence: int) -> int:
        def add() -> int:
            self._check_fence(fence)
            sql = "INSERT OR IGNORE INTO results VALUES (?, ?, ?)"
            new = [one for one in results if self._execute(sql, job, one.line, _result_text(one)).rowcount]
            counts = sum((one.counts for one in new), Counts())
            sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in asdict(counts))
            sql = f"INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (job) DO UPDATE SET {sums}"
            self._execute(sql, job, *asdict(counts).values())
            return len(new)

        return await self._write(add)

    async def results(self, job: str) -> AsyncIterator[LineResult]:
        sql = "SELECT line, record FROM results WHERE job = ? AND line > ? ORDER BY line LIMIT ?"
        last = 0
        while rows := await self._all(sql, job, last, ROWS):
            last = rows[-1][0]
            for _, record in rows:
                yield LineResult(**json.loads(record))

    async def done(self, job: str) -> frozenset[int]:
        return frozenset(row[0] for row in await self._all("SELECT line FROM results WHERE job = ?", job))

    async def counts(self, job: str) -> Counts:
        row = await self._one("SELECT * FROM counts WHERE job = ?", job)
        return Counts() if row is None else Counts(*row[1:])

    async def set_forecasts(self, forecasts: Mapping[str, Forecast]) -> None:
        def update() -> None:
            for job, forecast in forecasts.items():
                self._execute("UPDATE jobs SET forecast = ? WHERE id = ?", json.dumps(asdict(forecast)), job)

        await self._write(update)

    async def forecast(self, job: str) -> Forecast | None:
        row = await self._one("SELECT forecast FROM jobs WHERE id = ?", job)
        return None if row is None or row[0] is None else Forecast(**json.loads(row[0]))

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        def take() -> int | None:
            now = time.time()
            number, name, life, until = self._execute("SELECT number, holder, life, until FROM lease").fetchone()
            if name not in (None, holder.name) and until > now:
                return None
            number = int(number) + ((name, life) != (holder.name, holder.life))
            sql = "UPDATE lease SET number = ?, holder = ?, life = ?, until = ?"
            self._execute(sql, number, holder.name, holder.life, now + for_s)
            return number

        return await self._write(take)

    async def release(self, holder: Holder) -> None:
        sql = "UPDATE lease SET holder = NULL, life = NULL, until = NULL WHERE holder = ? AND life = ?"
        await self._write(lambda: self._execute(sql, holder.name, holder.life))

    async def faults(self) -> Sequence[str]:
        found = [row[0] for row in await self._all("PRAGMA integrity_check")]
        return [] if found == ["ok"] else [f"{self._path} is damaged: {one}" for one in found]

    async def everything(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
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
        self._connection = connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        connection.execute("PRAGMA synchronous = FULL")
        _use_wal(connection)
        self._migrate()

    def _migrate(self) -> None:
        with _Transaction(self):
            found = self._execute("PRAGMA user_version").fetchone()[0]
            known = len(self._migrations)
            if found > known:
                raise StoreError(
                    f"{self._path} has schema {found}, this version of AlignedServe knows up to {known}: "
                    "use a newer one"
                )
            for script in self._migrations[found:]:
                for statement in filter(str.strip, script.split(";")):
                    self._execute(statement)
            self._execute(f"PRAGMA user_version = {known}")

    def _execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(sql, values)

    def _insert_file(self, file: StoredFile) -> bool:
        """Whether it is new."""
        sql = "INSERT OR IGNORE INTO files (id, owner, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)"
        values = (file.id, file.owner, file.purpose.value, file.bytes, file.expires_at, _text(file))
        is_new = self._execute(sql, *values).rowcount > 0
        self._execute("DELETE FROM begun WHERE id = ?", file.id)
        return is_new

    def _taken(self, owner: str) -> Taken:
        sql = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?"
        files = self._execute(sql, owner).fetchone()
        jobs = self._execute("SELECT COUNT(*) FROM jobs WHERE owner = ? AND is_open", owner).fetchone()
        return Taken(*files, *jobs)

    def _check_fence(self, fence: int | None) -> None:
        number = self._execute("SELECT number FROM lease").fetchone()[0]
        if fence is not None and fence != number:
            raise Fenced(f"another job runner has the lease: its number is {number}, ours was {fence}")

    # --- For the event loop

    async def _listing(
        self, table: str, read: Callable[[str], Record], owner: str, page: Page, only: str = ""
    ) -> Listing[Record] | None:
        where = f"owner = ?{only}"
        values: list[Any] = [owner]
        if page.after is not None:
            after = await self._one(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", page.after, owner)
            if after is None:
                return None
            where += f" AND number {'<' if page.newest_first else '>'} ?"
            values.append(after[0])
        order = "DESC" if page.newest_first else "ASC"
        sql = f"SELECT record FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = await self._all(sql, *values, page.limit + 1)
        return Listing(tuple(read(row[0]) for row in rows[: page.limit]), len(rows) > page.limit)

    async def _one(self, sql: str, *values: Any) -> Any:
        return await self._run(lambda: self._execute(sql, *values).fetchone())

    async def _all(self, sql: str, *values: Any) -> list[Any]:
        return await self._run(lambda: self._execute(sql, *values).fetchall())

    async def _write(self, work: Callable[[], T]) -> T:
        def within() -> T:
            with _Transaction(self):
                return work()

        return await self._run(within)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise self._told(error) from error

    def _told(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "full" in text:
            return StoreFull(f"no space is left for {self._path}: free some on its disk")
        if "readonly" in text or "unable to open" in text:
            return StoreError(f"{self._path} cannot be written: check who owns it and its folder ({text})")
        if "malformed" in text or "not a database" in text:
            return StoreError(f"{self._path} is damaged ({text}): bring it back from a backup, or move it away")
        return StoreError(f"{self._path} cannot be used now: {text}")


class _Transaction:
    """All or nothing. It begins as a writer's, so that nothing is read that another writer changes meanwhile."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._store._execute("COMMIT")
        finally:
            with suppress(sqlite3.Error):  # there is none left, where it was committed or a full disk has ended it
                self._store._execute("ROLLBACK")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Where a new file is opened by several at once, all but one find it locked, and SQLite does not wait here."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


def _still(until: str, now: float) -> str:
    """Of a record that is there until then, or for ever."""
    return f" AND COALESCE({until} > {float(now)!r}, 1)"


def _text(record: StoredFile | Job) -> str:
    return json.dumps(record.to_tree())


def _result_text(result: LineResult) -> str:
    return json.dumps(asdict(result))


def _file(text: str) -> StoredFile:
    return StoredFile.from_tree(json.loads(text))


def _job(text: str) -> Job:
    return Job.from_tree(json.loads(text))
