"""From settings to a store and the bytes of its files."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
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


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror}") from error
