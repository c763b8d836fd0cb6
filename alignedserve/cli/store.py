"""`alignedserve store`: checks the store of files and jobs, and exports its records."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import StoreError, file_errors
from alignedserve.machine.whole_file import whole_file
from alignedserve.store.job import Job
from alignedserve.store.storage import Storage, find_store, is_on, open_storage
from alignedserve.store.store import Holder, StoredFile


def check(jobs: JobsConfig) -> int:
    """Print what the store guarantees and holds; return 1 where something is damaged, missing or of a wrong size."""
    return asyncio.run(_within(jobs, _check))


def export(jobs: JobsConfig, out: Path) -> int:
    """Write a line for each record, with its kind. A backup copies the bytes of files besides."""

    async def work(storage: Storage) -> int:
        number = 0
        with file_errors(StoreError, out), whole_file(out) as file:
            async for kind, tree in storage.store.records():
                file.write(json.dumps({"kind": kind, **tree}).encode() + b"\n")
                number += 1
        print(f"{out}: {number} records; the bytes of files are at {storage.blobs.url}")
        return 0

    return asyncio.run(_within(jobs, work))


async def _within(jobs: JobsConfig, work: Callable[[Storage], Awaitable[int]]) -> int:
    if not is_on(jobs):
        raise StoreError("jobs.store is off: there is no store to look at")
    storage = await open_storage(find_store(jobs), Holder("alignedserve store", 0))
    try:
        return await work(storage)
    finally:
        await storage.close()


async def _check(storage: Storage) -> int:
    about = await storage.store.describe()
    print(f"{about.kind} {about.version}, schema {about.schema}; files at {storage.blobs.url}")
    for line in (*about.guarantees, *(f"warning: {warning}" for warning in about.warnings)):
        print(f"  {line}")
    files: dict[str, StoredFile] = {}
    jobs: list[Job] = []
    num_results = 0
    async for kind, tree in storage.store.records():
        if kind == "file":
            files[tree["id"]] = msgspec.convert(tree, StoredFile)
        elif kind == "job":
            jobs.append(msgspec.convert(tree, Job))
        else:
            num_results += 1
    counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(j.status.value for j in jobs).items()))
    print(f"{len(files)} files, {len(jobs)} batches ({counts or 'none'}), {num_results} results of open batches")
    sizes = await asyncio.to_thread(storage.blobs.sizes)
    problems = [
        *await storage.store.find_faults(),
        *(f"the bytes of {id} are missing" for id in files if id not in sizes),
        *(
            f"{id} has {sizes[id]} bytes, not {file.bytes}"
            for id, file in files.items()
            if sizes.get(id, file.bytes) != file.bytes
        ),
        *(
            f"{job.id} is {job.status.value}, and its file {job.input_file_id} is missing"
            for job in jobs
            if job.is_open and job.input_file_id not in files
        ),
    ]
    for problem in problems:
        print(f"problem: {problem}")
    for name in sorted(set(sizes) - set(files)):
        print(f"note: {name} belongs to no file: an upload that goes on, or the rest of one that crashed")
    return 1 if problems else 0
