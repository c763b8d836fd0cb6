"""Write the files of a job from its results. After a crash this is done again, into new files with the same lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

from alignedserve.errors import BytesGone
from alignedserve.jobs.lines import error_line, raw_lines, read_checked_line
from alignedserve.store.blobs import Writing
from alignedserve.store.job import Job, JobStatus, LineCounts
from alignedserve.store.storage import Storage
from alignedserve.store.store import Purpose, StoredFile

log = logging.getLogger("alignedserve.jobs")

_PIECE_BYTES = 1 << 18
# The error code and message of the lines without a result, by how the job ended.
_UNDONE = {
    JobStatus.EXPIRED: ("batch_expired", "the batch's completion window was over before this request was done"),
    JobStatus.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was done"),
}


@dataclass
class _OutputFile:
    """A file that is begun with its first line; without lines there is no file."""

    storage: Storage
    writing: Writing | None = None

    async def begin(self) -> Writing:
        self.writing = self.writing or await self.storage.begin(f"file-{uuid4().hex}")
        return self.writing


async def assemble(storage: Storage, job: Job, status: JobStatus, most_bytes: int, now: float, keep_s: int) -> EndedJob:
    """Return the ended job with its written files; others see them when the job and the files are saved."""
    done, output, errors = set[int](), _OutputFile(storage), _OutputFile(storage)
    try:
        async for ok, lines, numbers in _result_pieces(storage, job):
            done |= numbers
            await asyncio.to_thread(_write, await (output if ok else errors).begin(), lines)
        if status in _UNDONE and job.total > len(done):
            error = next(((problem.code, problem.message) for problem in job.problems), _UNDONE[status])
            await _add_undone(storage, job, most_bytes, done, errors, error)
        files = [await _commit(file, job, name, now, keep_s) for file, name in ((output, "output"), (errors, "error"))]
    except BaseException:
        for file in (output, errors):
            if file.writing is not None:
                await storage.abandon(file.writing)
        raise
    ids = [None if file is None else file.id for file in files]
    counts = await storage.store.counts(job.id)
    num_undone = 0 if status not in _UNDONE else max(0, job.total - counts.done)
    counts += LineCounts(failed=num_undone)
    ended = job.move(status, now, output_file_id=ids[0], error_file_id=ids[1], counts=counts)
    return EndedJob(ended, tuple(file for file in files if file is not None))


@dataclass(frozen=True)
class EndedJob:
    job: Job
    files: tuple[StoredFile, ...]

    async def discard(self, storage: Storage) -> None:
        """Remove the files of a job that surely was not saved."""
        for file in self.files:
            await asyncio.to_thread(storage.blobs.remove, file.id)
            await storage.store.forget_file(file.id)


async def _result_pieces(storage: Storage, job: Job) -> AsyncIterator[tuple[bool, list[str], set[int]]]:
    """Yield the results in pieces for the same file: (whether they are answers, lines, their numbers)."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    numbers: dict[bool, set[int]] = {True: set(), False: set()}
    size = {True: 0, False: 0}
    async for result in storage.store.results(job.id):
        ok = result.is_ok
        lines[ok].append(result.text)
        numbers[ok].add(result.line)
        size[ok] += len(result.text)
        if size[ok] >= _PIECE_BYTES:
            yield ok, lines[ok], numbers[ok]
            lines[ok], numbers[ok], size[ok] = [], set(), 0
    for ok in (True, False):
        if lines[ok]:
            yield ok, lines[ok], numbers[ok]


async def _add_undone(
    storage: Storage, job: Job, most_bytes: int, done: set[int], errors: _OutputFile, error: tuple[str, str]
) -> None:
    """Write an error for each line without a result; if the input file is gone, the job ends without these errors."""
    try:
        opened = await asyncio.to_thread(storage.blobs.open, job.input_file_id)
    except BytesGone as gone:
        log.error("%s ends without a line for each request that was not done: %s", job.id, gone)
        return
    writing = await errors.begin()

    def write() -> None:
        with opened:
            for raw in raw_lines(opened, most_bytes):
                if raw.number not in done:
                    _write(writing, [error_line(read_checked_line(raw).custom_id, *error)])

    await asyncio.to_thread(write)


def _write(writing: Writing, lines: list[str]) -> None:
    """Write the lines; to be called in a thread."""
    writing.write("".join(f"{line}\n" for line in lines).encode())


async def _commit(output: _OutputFile, job: Job, name: str, now: float, keep_s: int) -> StoredFile | None:
    if output.writing is None:
        return None
    await asyncio.to_thread(output.writing.commit)
    lives_s = job.output_lives_s or keep_s
    size = output.writing.num_bytes
    filename = f"{job.id}_{name}.jsonl"
    return StoredFile(output.writing.id, job.owner, filename, size, Purpose.BATCH_OUTPUT, int(now), int(now) + lives_s)
