"""From settings to a store and the bytes of its files."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from alignedserve.config.config import JobsConfig
from alignedserve.errors import StoreError, StoreFull
from alignedserve.store.blobs import Blobs, Writing, check_writable
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Holder, OverQuota, Store, StoredFile, Taken

OFF, SQLITE = "off", "sqlite"
SQLITE_FILE = "jobs.sqlite"
_FOLDER = "files"
_KEY_PREFIX = "alignedserve"  # of all keys in Redis: deployments that share one have a database each
ORPHAN_S = 86_400.0  # after which nobody writes a file any more that was begun then


@dataclass(frozen=True)
class Keeping:
    """Where files and jobs are kept, for one process.

    That a file is begun is noted before its first byte is written, and struck out in the move that makes it a file; in
    the move that makes it one no more it is noted again, until its bytes are gone. So what was left by a process that
    was killed can be told from what others have at the same place, and is swept.
    """

    store: Store
    blobs: Blobs
    holder: Holder

    async def begin(self, id: str) -> Writing:
        await self.store.begin_file(id, self.holder, time.time())
        return await asyncio.to_thread(self.blobs.begin, id)

    async def add(self, file: StoredFile, writing: Writing, most: Taken | None = None) -> None:
        """Where it is not known whether the store has it, its bytes stay, until the sweep can tell."""
        try:
            await self.store.add_file(file, most)
        except (StoreFull, OverQuota):
            await self.abandon(writing)
            raise

    async def abandon(self, writing: Writing) -> None:
        """It did not become a file, for certain."""
        await asyncio.to_thread(writing.abandon)
        with suppress(StoreError):  # then the sweep finds it
            await self.store.forget_file(writing.id)

    async def remove(self, file: StoredFile) -> None:
        await self.store.remove_file(file.owner, file.id)
        await self._forget(file.id)

    async def sweep(self) -> None:
        for id in await self.store.orphans(self.holder, time.time() - ORPHAN_S):
            await self._forget(id)

    async def _forget(self, id: str) -> None:
        await asyncio.to_thread(self.blobs.remove, id)
        await self.store.forget_file(id)

    async def close(self) -> None:
        await self.store.close()


def is_on(jobs: JobsConfig) -> bool:
    return jobs.store != OFF


def data_folder(jobs: JobsConfig) -> Path:
    if jobs.directory is not None:
        return Path(jobs.directory).expanduser()
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "alignedserve"


def holder_of(deployment: str, part: str, life: int) -> Holder:
    return Holder(f"{socket.gethostname()}/{deployment}/{part}", life)


async def open_keeping(jobs: JobsConfig, holder: Holder) -> Keeping:
    folder = data_folder(jobs)
    blobs = Blobs(jobs.files or str(folder / _FOLDER))
    await asyncio.to_thread(blobs.make)
    if jobs.store == SQLITE:
        _make(folder)
        return Keeping(await SqliteStore.open(folder / SQLITE_FILE), blobs, holder)
    _check_redis_client()
    from alignedserve.store.redis_store import RedisStore  # imported only where it is used: its client is an extra

    return Keeping(await RedisStore.open(jobs.store, _KEY_PREFIX), blobs, holder)


def _check_redis_client() -> None:
    """Raise StoreError where Redis's client is absent: it is an extra, which serving from one machine does without."""
    if find_spec("redis") is None:
        raise StoreError("jobs.store names Redis, whose client is not installed: pip install 'alignedserve[redis]'")


def check_is_there(jobs: JobsConfig) -> None:
    """For who looks at a store and is not to make one by a slip in its name."""
    path = data_folder(jobs) / SQLITE_FILE
    if jobs.store == SQLITE and not path.exists():
        raise StoreError(f"there is no store at {path}: name its folder with --jobs-directory, as serve was given it")


class Lazily:
    """Opened and swept by the first who asks; where that fails, the next tries again."""

    def __init__(self, jobs: JobsConfig, holder: Holder) -> None:
        self._jobs, self._holder = jobs, holder
        self._opened: Keeping | None = None
        self._opening = asyncio.Lock()

    async def __call__(self) -> Keeping:
        if self._opened is None:
            async with self._opening:
                if self._opened is None:
                    opened = await open_keeping(self._jobs, self._holder)
                    with suppress(StoreError):  # the next start sweeps too
                        await opened.sweep()
                    self._opened = opened
        return self._opened


def settled(jobs: JobsConfig) -> JobsConfig:
    """With the folder named that all parts are to use; StoreError where there can be no files and jobs in it."""
    if not is_on(jobs):
        return jobs
    folder = data_folder(jobs).absolute()
    if jobs.store != SQLITE:
        _check_redis_client()
    try:
        Blobs(jobs.files or str(folder / _FOLDER)).make()
        if jobs.store == SQLITE:
            _make(folder)
    except StoreError as error:
        raise StoreError(f"{error}: name another place with --jobs-directory, or serve with --jobs-store off") from None
    return replace(jobs, directory=str(folder))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise StoreError(f"jobs cannot be kept in {folder}: {error.strerror}") from error
