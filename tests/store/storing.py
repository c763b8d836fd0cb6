"""Two processes that use a store as a gateway and a job runner do, and tell what was acknowledged:

    python -m tests.store.storing DISK LIFE SEED

Each line of the file `told` on the disk is about one thing: "?" before a change to it, "!" after the change was
acknowledged, then the thing and its state. test_power_cut.py reads them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import msgspec

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import Conflict
from alignedserve.jobs.assembling import assemble
from alignedserve.store.job import Endpoint, Job, JobStatus, LineResult
from alignedserve.store.storage import Storage, open_storage
from alignedserve.store.store import Holder, ListPage, Purpose, StoredFile, StoredResponse

ME, GONE, LEASE = "key-a", "-", "lease"
TOLD = "told"
STEPS = 30
LATE = 4_000_000_000  # nothing expires while a test runs
_MOST_KEPT_BYTES = 10**9


def bytes_of(thing: str, size: int) -> bytes:
    """Return bytes that no other thing has."""
    return Random(thing).randbytes(size)


def result_of(job: str, line: int) -> LineResult:
    said = bytes_of(f"{job} {line}", 40 + line * 997 % 3_000).hex()
    return LineResult(line, True, f'{{"custom_id":"{line}","said":"{said}"}}', 10, 4, 3, 2)


def lines_of(job: str, num_lines: int) -> bytes:
    return "".join(f"{result_of(job, line).text}\n" for line in range(1, num_lines + 1)).encode()


def response_of(id: str, version: int) -> StoredResponse:
    answer = msgspec.Raw(msgspec.json.encode({"output": [], "said": bytes_of(f"{id} {version}", 900).hex()}))
    return StoredResponse(id, ME, 1_000, LATE, [], answer, str(version))


def state_of_file(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def state_of_job(status: JobStatus, num_lines: int) -> str:
    return f"{status.value}:{num_lines}"


class _Work:
    def __init__(self, storage: Storage, draw: Random, told: int) -> None:
        self.storage, self.store, self.draw, self._told = storage, storage.store, draw, told
        self.name, self.num_steps = f"{storage.holder.name}{storage.holder.life}", 0

    async def step(self) -> None:
        raise NotImplementedError

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self.name}-{self.num_steps}"

    def tell(self, mark: str, thing: str, state: str) -> None:
        os.write(self._told, f"\n{mark} {thing} {state}".encode())  # the line before may be torn

    @contextmanager
    def change(self, states: Mapping[str, str]) -> Iterator[None]:
        """Tell the states that things will have after the block, and then that they have them."""
        for mark in "?!":
            for thing, state in states.items():
                self.tell(mark, thing, state)
            if mark == "?":
                yield

    async def save(self, job: Job, num_lines: int, fence: int | None = None) -> None:
        """Save a job, unless the other process has changed it meanwhile."""
        with suppress(Conflict), self.change({job.id: state_of_job(job.status, num_lines)}):
            await self.store.save_job(job, fence)


class Gateway(_Work):
    """Uploads and deletes files, submits and cancels batches, keeps responses."""

    async def step(self) -> None:
        changes = (self.upload, self.upload, self.give_up, self.delete, self.submit, self.submit, self.cancel)
        await self.draw.choice((*changes, self.respond, self.respond, self.answer, self.forget))()

    async def upload(self) -> None:
        id = self.new_id("file")
        data = bytes_of(id, self.draw.choice((1, 700, 5_000, 70_000)))
        with self.change({id: state_of_file(data)}):
            writing = await self.storage.begin(id)
            for at in range(0, len(data), 30_000):
                await asyncio.to_thread(writing.write, data[at : at + 30_000])
            await asyncio.to_thread(writing.commit)
            await self.storage.add(StoredFile(id, ME, "x.jsonl", len(data), Purpose.BATCH, 1_000, LATE), writing)

    async def give_up(self) -> None:
        writing = await self.storage.begin(self.new_id("file"))
        await asyncio.to_thread(writing.write, bytes_of(writing.id, 9_000))
        if self.draw.random() < 0.5:
            await asyncio.to_thread(writing.commit)
        await self.storage.abandon(writing)

    async def delete(self) -> None:
        files = await self.store.files(ME, ListPage(100))
        if files and files.records:
            file = self.draw.choice(files.records)
            with self.change({file.id: GONE}):
                await self.storage.remove(file)

    async def submit(self) -> None:
        job = Job(self.new_id("batch"), ME, "file-1", Endpoint.CHAT, "24h", 1_000, LATE)
        with self.change({job.id: state_of_job(job.status, 0)}):
            await self.store.add_job(job)

    async def cancel(self) -> None:
        waiting = [job for job in await self.store.open_jobs() if job.status is JobStatus.VALIDATING]
        if waiting:
            await self.save(self.draw.choice(waiting).move(JobStatus.CANCELLING, 1_001), 0)

    async def respond(self) -> None:
        response = response_of(self.new_id("resp"), 0)
        with self.change({response.id: "0"}):
            await self.store.add_response(response, _MOST_KEPT_BYTES)

    async def answer(self) -> None:
        old = await self.store.response(ME, self._an_old_response())
        if old is not None:
            version = int(old.previous or 0) + 1
            with self.change({old.id: str(version)}):
                await self.store.save_response(response_of(old.id, version))

    async def forget(self) -> None:
        with self.change({(id := self._an_old_response()): GONE}):
            await self.store.remove_response(ME, id)

    def _an_old_response(self) -> str:
        return f"resp-{self.name}-{self.draw.randrange(self.num_steps)}"


class Runner(_Work):
    """Has the lease, adds the results of lines, and ends jobs with their files."""

    fence = 0

    async def step(self) -> None:
        if not self.fence or self.draw.random() < 0.1:
            self.fence = await self.store.lease(self.storage.holder, 1_000) or 0
            self.tell("!", LEASE, str(self.fence))
        for job in await self.store.open_jobs():
            await self.move(job, len(await self.store.done_lines(job.id)))

    async def move(self, job: Job, num_lines: int) -> None:
        chance = self.draw.random()
        if chance < 0.4:
            return
        if job.status is JobStatus.VALIDATING:
            await self.save(job.move(JobStatus.IN_PROGRESS, 1_001), 0, self.fence)
        elif job.status is JobStatus.IN_PROGRESS and chance < 0.9:
            lines = range(num_lines + 1, num_lines + 1 + self.draw.choice((1, 3, 60)))
            with self.change({job.id: state_of_job(job.status, lines[-1])}):
                await self.store.add_results(job.id, [result_of(job.id, line) for line in lines], self.fence)
        elif job.status is JobStatus.IN_PROGRESS:
            await self.save(job.move(JobStatus.FINALIZING, 1_002), num_lines, self.fence)
        else:
            await self.end(job, num_lines)

    async def end(self, job: Job, num_lines: int) -> None:
        status = JobStatus.CANCELLED if job.status is JobStatus.CANCELLING else JobStatus.COMPLETED
        ended, files = await assemble(self.storage, job, status, 10**6, 1_003, LATE)
        states = {file.id: state_of_file(lines_of(job.id, num_lines)) for file in files}
        with self.change(states | {job.id: state_of_job(status, num_lines)}):
            await self.store.save_job(ended, self.fence, files)


def jobs_on(disk: Path, seed: int) -> JobsConfig:
    """Return where the store is on this disk. No folder is there yet."""
    files = str(disk / "elsewhere" / "files") if seed % 2 else None
    return JobsConfig(directory=str(disk / "above" / "jobs"), files=files)


async def main(role: str, disk: str, life: str, seed: str) -> None:
    storage = await open_storage(jobs_on(Path(disk), int(seed)), Holder(role, int(life)))
    await storage.sweep()
    kind = {"gateway": Gateway, "runner": Runner}[role]
    work = kind(storage, Random(f"{role} {seed}"), os.open(Path(disk, TOLD), os.O_WRONLY | os.O_APPEND))
    for _ in range(STEPS):
        work.num_steps += 1
        await work.step()
    await storage.close()


if __name__ == "__main__":
    is_runner = os.fork()
    asyncio.run(main("runner" if is_runner else "gateway", *sys.argv[1:]))
    if is_runner:
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
