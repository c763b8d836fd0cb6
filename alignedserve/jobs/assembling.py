"""Write the files of a job from its results. After a crash this is done again, into new files with the same lines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from uuid import uuid4

from alignedserve.errors import BytesGone
from alignedserve.jobs.lines import error_line, raw_lines, read_checked_line
from alignedserve.store.blobs import Writing
from alignedserve.store.job import Job, JobStatus, Problem
from alignedserve.store.storage import Storage
from alignedserve.store.store import Purpose, StoredFile

log = logging.getLogger("alignedserve.jobs")

_PIECE_BYTES = 1 << 18
# What is said of the lines without a result, by how the job ended, unless the job has a problem of its own.
_UNDONE = {
    JobStatus.EXPIRED: Problem("batch_expired", "the batch's completion window was over before this request was done"),
    JobStatus.CANCELLED: Problem("batch_cancelled", "the batch was cancelled before this request was done"),
}


class _Output:
    """The output file and the error file of a job. Each is begun with its first line: without lines there is none."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.writings = storage, dict[str, Writing]()

    async def begin(self, name: str) -> Writing:
        if name not in self.writings:
            self.writings[name] = await self._storage.begin(f"file-{uuid4().hex}")
        return self.writings[name]

    async def add(self, name: str, lines: list[str]) -> None:
        await asyncio.to_thread(_write, await self.begin(name), lines)

    async def add_results(self, job: Job) -> set[int]:
        """Write the results of a job in pieces; return the lines that have one."""
        done, size = set[int](), Counter[str]()
        waiting: dict[str, list[str]] = {"output": [], "error": []}
        async for result in self._storage.store.results(job.id):
            name = "output" if result.is_ok else "error"
            done.add(result.line)
            waiting[name].append(result.text)
            size[name] += len(result.text)
            if size[name] >= _PIECE_BYTES:
                await self.add(name, waiting[name])
                waiting[name], size[name] = [], 0
        for name, lines in waiting.items():
            if lines:
                await self.add(name, lines)
        return done

    async def add_undone(self, job: Job, most_bytes: int, done: set[int], code: str, message: str) -> None:
        """Write an error for each line without a result; if the input file is gone, the job ends without them."""
        try:
            opened = await asyncio.to_thread(self._storage.blobs.open, job.input_file_id)
        except BytesGone as gone:
            log.error("%s ends without a line for each request that was not done: %s", job.id, gone)
            return
        writing = await self.begin("error")

        def write() -> None:
            with opened:
                for raw in raw_lines(opened, most_bytes):
                    if raw.number not in done:
                        _write(writing, [error_line(read_checked_line(raw)[0], code, message)])

        await asyncio.to_thread(write)

    async def commit(self, name: str, job: Job, now: float, keep_s: int) -> StoredFile | None:
        if (writing := self.writings.get(name)) is None:
            return None
        await asyncio.to_thread(writing.commit)
        return StoredFile(
            id=writing.id,
            owner=job.owner,
            filename=f"{job.id}_{name}.jsonl",
            bytes=writing.num_bytes,
            purpose=Purpose.BATCH_OUTPUT,
            created_at=int(now),
            expires_at=int(now) + (job.output_lives_s or keep_s),
        )


async def assemble(
    storage: Storage, job: Job, status: JobStatus, most_bytes: int, now: float, keep_s: int
) -> tuple[Job, tuple[StoredFile, ...]]:
    """Return the ended job with its written files; others see them when the job and the files are saved."""
    output = _Output(storage)
    try:
        done = await output.add_results(job)
        if status in _UNDONE and job.total > len(done):
            problem = next(iter(job.problems), _UNDONE[status])
            await output.add_undone(job, most_bytes, done, problem.code, problem.message)
        files = [await output.commit(name, job, now, keep_s) for name in ("output", "error")]
    except BaseException:
        for writing in output.writings.values():
            await storage.abandon(writing)
        raise
    counts = await storage.store.counts(job.id)
    output_id, error_id = (None if file is None else file.id for file in files)
    ended = job.move(status, now, output_file_id=output_id, error_file_id=error_id, counts=counts)
    return ended, tuple(file for file in files if file is not None)


async def discard(storage: Storage, files: Sequence[StoredFile]) -> None:
    """Remove the files of a job that surely was not saved."""
    for file in files:
        await asyncio.to_thread(storage.blobs.remove, file.id)
        await storage.store.forget_file(file.id)


def _write(writing: Writing, lines: list[str]) -> None:
    """Write the lines; to be called in a thread."""
    writing.write("".join(f"{line}\n" for line in lines).encode())
