"""A job's results become its files. Done again after a crash, they are other files with the same lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO
from uuid import uuid4

from alignedserve.errors import BytesGone
from alignedserve.jobs.lines import line_of, raw_lines, unanswered
from alignedserve.store.blobs import Writing
from alignedserve.store.job import Counts, Job, Status
from alignedserve.store.opening import Keeping
from alignedserve.store.store import Purpose, StoredFile

log = logging.getLogger("alignedserve.jobs")

_PIECE_BYTES = 1 << 18
_WHY = {
    Status.EXPIRED: ("batch_expired", "the batch's completion window was over before this request was done"),
    Status.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was done"),
}


@dataclass
class _Output:
    """A file that is begun with its first line: without one there is none."""

    keeping: Keeping
    writing: Writing | None = None

    async def begun(self) -> Writing:
        self.writing = self.writing or await self.keeping.begin(f"file-{uuid4().hex}")
        return self.writing


async def assemble(keeping: Keeping, job: Job, status: Status, most_bytes: int, now: float, keep_s: int) -> Ended:
    """The job as it ends, with files that are written; they exist for others once both are saved."""
    done, output, errors = set[int](), _Output(keeping), _Output(keeping)
    try:
        async for ok, lines, numbers in _in_pieces(keeping, job):
            done |= numbers
            await asyncio.to_thread(_write, await (output if ok else errors).begun(), lines)
        if status in _WHY and job.total > len(done):
            await _add_rest(keeping, job, most_bytes, done, errors, _WHY[status])
        files = [await _committed(one, job, name, now, keep_s) for one, name in ((output, "output"), (errors, "error"))]
    except BaseException:
        for one in (output, errors):
            if one.writing is not None:
                await keeping.abandon(one.writing)
        raise
    ids = [None if file is None else file.id for file in files]
    counts = await keeping.store.counts(job.id)
    left = 0 if status not in _WHY else max(0, job.total - counts.done)
    moved = job.moved(status, now, output_file_id=ids[0], error_file_id=ids[1], counts=counts + Counts(failed=left))
    return Ended(moved, tuple(file for file in files if file is not None))


@dataclass(frozen=True)
class Ended:
    job: Job
    files: tuple[StoredFile, ...]

    async def discard(self, keeping: Keeping) -> None:
        """It was not saved, for certain."""
        for file in self.files:
            await asyncio.to_thread(keeping.blobs.remove, file.id)
            await keeping.store.forget_file(file.id)


async def _in_pieces(keeping: Keeping, job: Job) -> AsyncIterator[tuple[bool, list[str], set[int]]]:
    """Results, those of one kind together: (which file, lines, their numbers)."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    numbers: dict[bool, set[int]] = {True: set(), False: set()}
    size = {True: 0, False: 0}
    async for result in keeping.store.results(job.id):
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


async def _add_rest(
    keeping: Keeping, job: Job, most_bytes: int, done: set[int], errors: _Output, why: tuple[str, str]
) -> None:
    """What had no result. Where nobody can read any more what that was, the job ends all the same."""
    try:
        opened = await asyncio.to_thread(keeping.blobs.open, job.input_file_id)
    except BytesGone as error:
        log.error("%s ends without a line for each request that was not done: %s", job.id, error)
        return
    await asyncio.to_thread(_write_rest, opened, most_bytes, done, await errors.begun(), *why)


def _write(writing: Writing, lines: list[str]) -> None:
    """In a thread."""
    writing.write("".join(f"{line}\n" for line in lines).encode())


def _write_rest(file: IO[bytes], most_bytes: int, done: set[int], errors: Writing, code: str, message: str) -> None:
    """In a thread: an error line for each line that has no result."""
    with file:
        for raw in raw_lines(file, most_bytes):
            if raw.number not in done:
                _write(errors, [unanswered(line_of(raw).custom_id, code, message)])


async def _committed(output: _Output, job: Job, name: str, now: float, keep_s: int) -> StoredFile | None:
    if output.writing is None:
        return None
    await asyncio.to_thread(output.writing.commit)
    lives_s = job.output_lives_s or keep_s
    size = output.writing.num_bytes
    filename = f"{job.id}_{name}.jsonl"
    return StoredFile(output.writing.id, job.owner, filename, size, Purpose.BATCH_OUTPUT, int(now), int(now) + lives_s)
