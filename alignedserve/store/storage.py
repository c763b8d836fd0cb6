"""Open the store and the files that the settings name, and keep the two consistent."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import StoreError, StoreFull, StoreRefused, StoreTaken, StoreUnfit
from alignedserve.store.address import without_password
from alignedserve.store.blobs import Blobs, Writing, check_writable, sync_path
from alignedserve.store.sqlite_store import ANSWER_S, SqliteStore
from alignedserve.store.store import Holder, OverQuota, OwnerUsage, Store, StoredFile

log = logging.getLogger("alignedserve.launch")

OFF, SQLITE = "off", "sqlite"
SQLITE_FILE = "jobs.sqlite"
_FOLDER = "files"
KEY_PREFIX = "alignedserve"  # of all keys in Redis: deployments that share a Redis have a database each
LOOK_S = 2.0  # in which a store must answer at the start
ORPHAN_S = 86_400.0  # after this time a file that was begun is surely no longer being written


@dataclass(frozen=True)
class Storage:
    """The store and the bytes of its files, for one process.

    The store has a list of files that were begun. A file is listed before its first byte is written, and leaves the
    list in the transaction that adds the file; in the transaction that removes the file it is listed again, until its
    bytes are gone. So the bytes that a killed process left behind are known from other bytes at the same place, and are
    swept.
    """

    store: Store
    blobs: Blobs
    holder: Holder

    async def begin(self, id: str) -> Writing:
        await self.store.begin_file(id, self.holder, time.time())
        return await asyncio.to_thread(self.blobs.begin, id)

    @asynccontextmanager
    async def writing(self, id: str) -> AsyncIterator[Writing]:
        """Begin a file, and remove its bytes where an error ends the block: it has surely not been added."""
        writing = await self.begin(id)
        try:
            yield writing
        except BaseException:
            await self.abandon(writing)
            raise

    async def add(self, file: StoredFile, writing: Writing, quota: OwnerUsage | None = None) -> None:
        """Add the file to the store.

        If an error leaves it unknown whether the store has it, the bytes stay until the sweep can tell."""
        try:
            await self.store.add_file(file, quota)
        except (StoreFull, OverQuota):
            await self.abandon(writing)
            raise

    async def commit(self, writing: Writing, data: bytes = b"", threads: Executor | None = None) -> None:
        """Complete a file, with its last bytes. A caller that is cancelled waits for the disk: an abandoned file could
        come back else."""

        def work() -> None:
            if data:
                writing.write(data)
            writing.commit()

        working = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    async def abandon(self, writing: Writing) -> None:
        """Remove the bytes of a file that surely was not added."""
        with suppress(StoreError):  # the sweep then finds it
            await asyncio.to_thread(writing.abandon)
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


OpenStorage: TypeAlias = Callable[[], Awaitable[Storage]]


def is_on(jobs: JobsConfig) -> bool:
    return jobs.store != OFF


def stores_folder() -> Path:
    """Return the folder in which each deployment that names no place has a folder for its jobs."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "alignedserve" / "jobs"


def data_folder(jobs: JobsConfig) -> Path:
    assert jobs.directory is not None, "`check_storage` and `find_store` choose it"
    return Path(jobs.directory).expanduser()


def holder_of(deployment: str, part: str, life: int, model: str = "", keys: str = "") -> Holder:
    return Holder(f"{socket.gethostname()}/{deployment}/{part}", life, model, keys)


async def open_storage(jobs: JobsConfig, holder: Holder) -> Storage:
    folder = data_folder(jobs)
    try:
        blobs = await asyncio.wait_for(asyncio.to_thread(_make_folders, jobs, folder), ANSWER_S)
    except asyncio.TimeoutError:
        raise StoreError(f"the disk of {folder} has not answered for {ANSWER_S:g} s") from None
    if jobs.store == SQLITE:
        return Storage(await SqliteStore.open(folder / SQLITE_FILE), blobs, holder)
    _check_redis_client()
    from alignedserve.store.redis_store import RedisStore  # imported only if Redis is used: its client is an extra

    return Storage(await RedisStore.open(jobs.store, KEY_PREFIX), blobs, holder)


def _check_redis_client() -> None:
    """Raise StoreError if Redis's client is not installed: an extra that one machine does not need."""
    if find_spec("redis") is None:
        raise StoreError("jobs.store names Redis, whose client is not installed: pip install 'alignedserve[redis]'")


def find_store(jobs: JobsConfig) -> JobsConfig:
    """Return the settings with the folder of the one store that is there; raise StoreError if there is none, or more.

    So a command that reads a store does not make one at a mistyped place."""
    if jobs.directory is None:
        folders = sorted(folder for folder in stores_folder().glob("*") if _has_store(jobs, folder))
        if len(folders) > 1:
            found = ", ".join(map(str, folders))
            raise StoreError(f"each deployment has its own store: name one of {found} with --jobs-directory")
        jobs = replace(jobs, directory=str(folders[0] if folders else stores_folder()))
    if not _has_store(jobs, folder := data_folder(jobs)):
        raise StoreError(f"there is no store at {folder}: name its folder with --jobs-directory, as for serve")
    return jobs


def _has_store(jobs: JobsConfig, folder: Path) -> bool:
    if jobs.store == SQLITE:
        return (folder / SQLITE_FILE).exists()
    return jobs.files is not None or (folder / _FOLDER).exists()


class LazyStorage:
    """Opens and sweeps the storage on its first use; if that fails, the next use tries again."""

    def __init__(self, jobs: JobsConfig, holder: Holder) -> None:
        self._jobs, self._holder = jobs, holder
        self._opened: Storage | None = None
        self._opening = asyncio.Lock()

    async def __call__(self) -> Storage:
        async with self._opening:
            if self._opened is None:
                opened = await open_storage(self._jobs, self._holder)
                with suppress(StoreError):  # the next start sweeps too
                    await opened.sweep()
                self._opened = opened
            return self._opened


def check_storage(jobs: JobsConfig, model: str, port: int) -> JobsConfig:
    """Return the settings with the absolute folder that all parts use; raise StoreError if it cannot be written.

    Where none is named, each model and port has its own: the job runner of one deployment must not take the batches of
    another one of the same user, whose models it does not serve."""
    if not is_on(jobs):
        return jobs
    own = stores_folder() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}-{port}"
    folder = Path(jobs.directory or own).expanduser().absolute()
    if jobs.store != SQLITE:
        _check_redis_client()
    try:
        _make_folders(jobs, folder)
    except StoreError as error:
        raise StoreError(f"{error}: name another place with --jobs-directory, or serve with --jobs-store off") from None
    jobs = replace(jobs, directory=str(folder))
    if jobs.store != SQLITE or (folder / SQLITE_FILE).exists():
        asyncio.run(_look(jobs, model))
    return jobs


async def _look(jobs: JobsConfig, model: str) -> None:
    """Raise StoreTaken if the store is another model's, StoreRefused if it refuses the password. If it does not answer,
    say so: the job runner tries again."""

    async def look() -> None:
        storage = await open_storage(jobs, Holder("alignedserve serve", 0, model))
        try:
            await check_shared(storage.store, jobs, storage.holder, time.time())
        finally:
            await storage.close()

    try:
        await asyncio.wait_for(look(), LOOK_S)
    except (StoreTaken, StoreRefused):
        raise
    except StoreUnfit as error:
        log.warning("%s; batch jobs wait until then, chats do not", error)
    except (StoreError, asyncio.TimeoutError) as error:
        where = data_folder(jobs) if jobs.store == SQLITE else without_password(jobs.store)
        why = str(error) or f"the store {where} did not answer within {LOOK_S:g} s"
        log.warning("%s: batch jobs wait until it does, chats do not: start it, or name another with --jobs-store", why)


async def check_shared(store: Store, jobs: JobsConfig, part: Holder, now: float, may_take: bool = True) -> None:
    """Raise StoreTaken if the store is not for this part's deployment: one of another model lives, or has batches that
    have not ended, or one with other keys lives, whose batches this one would cancel as those of revoked keys.

    Other deployments of one model share a store rightly, since any of them can answer any line. Without `may_take` it
    is also raised while another model's deployment was the last to have the store: a batch that came before this
    deployment's job runner has it would count as one of that model."""
    last = await store.last_lease()
    if last is None:
        return
    if _is_same(last.model, part.model):
        theirs, ours = ((name or "").split("/")[-2:-1] for name in (last.holder, part.name))  # deployments
        lives_elsewhere = last.holder is not None and theirs != ours
        if not lives_elsewhere or _is_same(last.keys, part.keys):
            return
        why = f"{last.holder} serves with keys of other names"
    elif last.holder is not None:
        why = f"{last.holder} serves {last.model} with it"
    elif left := sum(job.expires_at > now for job in await store.open_jobs()):
        why = f"batches for {last.model} have not ended ({left})"
    elif may_take:
        return
    else:
        why = f"a deployment of {last.model} had it last"
    where, own = str(data_folder(jobs)), "a folder of its own with --jobs-directory"
    if jobs.store != SQLITE:
        where, own = "that jobs.store names", "a database of its own with --jobs-store, such as redis://HOST/1"
    raise StoreTaken(f"the store {where} is not for {part.model}: {why}; give this deployment {own}")


def _is_same(theirs: str, ours: str) -> bool:
    return theirs == ours or not theirs or not ours  # the leases of older versions do not say


def _make_folders(jobs: JobsConfig, folder: Path) -> Blobs:
    """Make the folders of the store, where it has any, and return the files."""
    if jobs.store == SQLITE or jobs.files is None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what clients sent
            check_writable(folder)
            sync_path(folder)
        except OSError as error:
            raise StoreError(f"jobs cannot be kept in {folder}: {error.strerror}") from error
    blobs = Blobs(jobs.files or str(folder / _FOLDER))
    blobs.make()
    return blobs
