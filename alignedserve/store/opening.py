"""From settings to a store and the bytes of its files."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.config import JobsConfig
from alignedserve.errors import StoreError
from alignedserve.store.blobs import Blobs
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Store

OFF, SQLITE = "off", "sqlite"
_FILE, _FOLDER = "jobs.sqlite", "files"


@dataclass(frozen=True)
class Keeping:
    """Where files and jobs are kept."""

    store: Store
    blobs: Blobs

    async def close(self) -> None:
        await self.store.close()


def is_on(jobs: JobsConfig) -> bool:
    return jobs.store != OFF


def data_folder(jobs: JobsConfig) -> Path:
    if jobs.directory is not None:
        return Path(jobs.directory).expanduser()
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "alignedserve"


async def open_keeping(jobs: JobsConfig) -> Keeping:
    folder = data_folder(jobs)
    blobs = Blobs(jobs.files or str(folder / _FOLDER))
    await asyncio.to_thread(blobs.make)
    if jobs.store == SQLITE:
        _make(folder)
        return Keeping(await SqliteStore.open(folder / _FILE), blobs)
    from alignedserve.store.redis_store import RedisStore  # whoever has no Redis needs not wait for its client

    return Keeping(await RedisStore.open(jobs.store, jobs.key_prefix), blobs)


class Lazily:
    """Opened by the first who asks; where that fails, the next tries again."""

    def __init__(self, jobs: JobsConfig) -> None:
        self._jobs = jobs
        self._opened: Keeping | None = None
        self._opening = asyncio.Lock()

    async def __call__(self) -> Keeping:
        if self._opened is None:
            async with self._opening:
                if self._opened is None:
                    self._opened = await open_keeping(self._jobs)
        return self._opened


def settled(jobs: JobsConfig) -> JobsConfig:
    """With the folder named that all parts are to use; StoreError where there can be no files and jobs in it."""
    if not is_on(jobs):
        return jobs
    folder = data_folder(jobs).absolute()
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
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StoreError(f"jobs cannot be kept in {folder}: {error.strerror}") from error
