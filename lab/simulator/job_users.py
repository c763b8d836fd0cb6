"""Users of batch jobs in a simulation: they submit jobs to a real store, which has faults, may cancel them, and check
what they get.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from alignedserve.errors import Conflict, StoreError
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.machines.engine import story_from
from alignedserve.lab.simulator.machines.event_loop import VirtualLoop
from alignedserve.lab.simulator.machines.faults import JOBS
from alignedserve.lab.simulator.machines.world import World
from alignedserve.store.blobs import Blobs
from alignedserve.store.job import Endpoint, Job, JobStatus
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Purpose, StoredFile

MODEL = "simulated"
_ME = "me"  # the owner of all jobs
_LOOK_S = 0.25  # between two looks of users at their jobs
_AGAIN_S = 0.5  # until a user tries again what the store refused
_UNDONE = {"batch_expired", "batch_cancelled"}  # the errors of lines that did not run
_ENDS, _DEATHS = ("Kill", "HangLoop", "HangStep", "Poison"), 3  # faults by which a line may seem to end its workers
T = TypeVar("T")


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a user submits, and perhaps cancels."""

    name: str
    at: float
    lines: tuple[Arrival, ...]
    window_s: int
    cancel_at: float | None = None
    weight: float = 1.0

    @property
    def file(self) -> bytes:
        bodies = ({"model": MODEL, "job": self.name, "line": number} for number in range(1, len(self.lines) + 1))
        fields = {"method": "POST", "url": Endpoint.COMPLETIONS.value}
        rows = (json.dumps({"custom_id": str(body["line"]), **fields, "body": body}) for body in bodies)
        return "\n".join(rows).encode()

    def line(self, number: int) -> Arrival:
        return self.lines[number - 1]

    def output(self, number: int) -> tuple[int, ...]:
        """Return the tokens that the line is to be answered with."""
        line = self.line(number)
        return story_from(line.request, line.length, tagged=False).output


class JobUsers:
    def __init__(self, world: World, seed: int, jobs: Sequence[SubmittedJob], on_end: Callable[[], None]) -> None:
        """`on_end` is called for each job when a user sees that it has ended."""
        self.jobs = {job.name: job for job in jobs}
        self.ended: dict[str, Job] = {}
        self.store, self.blobs = FaultyStore(world), Blobs("memory://simulated")
        self.blobs.make()
        self._agenda, self._on_end, self._fault_counts = world.agenda, on_end, world.fault_counts
        self._loop = self.store.of_users = VirtualLoop(world.agenda, f"{seed}/users")
        for job in jobs:
            self._plan(job.at, partial(self._add, job))
            if job.cancel_at is not None:
                self._plan(job.cancel_at, partial(self._cancel, job))
        self._agenda.at(0.0, Priority.CLIENT, self._look)

    def leave(self) -> None:
        """End what the users do, and remove all that is stored: the next simulation has another store."""
        self._loop.kill()
        for file in self.blobs.sizes():
            self.blobs.remove(file)
        self.store.disconnect()

    def problems(self) -> Iterable[str]:
        """Return what is wrong with the jobs at the end."""
        return [f"{job.name}: {problem}" for job in self.jobs.values() for problem in self._problems_of(job)]

    # --- Submit and cancel

    def _plan(self, at: float, work: Callable[[], Awaitable[None]]) -> None:
        self._agenda.at(at, Priority.CLIENT, lambda: self._loop.begin(self._until_it_works(work)))

    async def _until_it_works(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await work()
            except Conflict:
                pass
            except StoreError:
                await self._loop.until(self._agenda.now + _AGAIN_S)

    async def _add(self, job: SubmittedJob) -> None:
        id, data, now = f"file-{job.name}", job.file, int(job.at)
        writing = self.blobs.begin(id)
        writing.write(data)
        writing.commit()
        await self.store.add_file(StoredFile(id, _ME, f"{job.name}.jsonl", len(data), Purpose.BATCH, now))
        ends_at = now + job.window_s
        await self.store.add_job(Job(job.name, _ME, id, Endpoint.COMPLETIONS, "24h", now, ends_at, weight=job.weight))

    async def _cancel(self, submitted: SubmittedJob) -> None:
        job = await self.store.job(_ME, submitted.name)
        if job is None:
            raise StoreError("it was not submitted yet")
        if job.status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
            await self.store.save_job(job.move(JobStatus.CANCELLING, self._agenda.now))

    def _look(self) -> None:
        for name in [name for name in self.jobs if name not in self.ended]:
            job = self.store.find(name)
            if job is not None and not job.is_open:
                self.ended[name] = job
                self._on_end()
        if len(self.ended) < len(self.jobs):
            self._agenda.at(self._agenda.now + _LOOK_S, Priority.CLIENT, self._look)

    # --- Check

    def _may_convict(self) -> bool:
        """Return whether faults have ended enough processes for a line to be taken for the cause."""
        return sum(self._fault_counts[kind] for kind in _ENDS) >= _DEATHS

    def _problems_of(self, submitted: SubmittedJob) -> Iterable[str]:
        job = self.ended.get(submitted.name)
        if job is None:
            return ["it never ended"]
        if job.status is JobStatus.FAILED or (job.status is JobStatus.CANCELLED and submitted.cancel_at is None):
            return [f"it is {job.status.value}"]
        answers, errors = self._rows(job.output_file_id), self._rows(job.error_file_id)
        done, wanted = sorted(int(row["custom_id"]) for row in answers + errors), list(range(1, job.total + 1))
        unexpected = [row for row in errors if job.status is JobStatus.COMPLETED or not _is_undone(row)]
        if self._may_convict():
            unexpected = [row for row in unexpected if "request_ends_workers" not in json.dumps(row["response"])]
        wrong = [
            row["custom_id"]
            for row in answers
            if tuple(row["response"]["body"]["tokens"]) != submitted.output(int(row["custom_id"]))
        ]
        checks = {
            f"it has results of the lines {done}, not of {wanted}": done != wanted,
            f"it counts {job.counts.completed} answers, and has {len(answers)}": job.counts.completed != len(answers),
            f"lines ended with errors: {unexpected!s:.200}": bool(unexpected),
            f"the lines {wrong} have other answers than their own": bool(wrong),
            f"it has {job.total} lines": job.status is JobStatus.COMPLETED and job.total != len(submitted.lines),
        }
        return [problem for problem, is_there in checks.items() if is_there]

    def _rows(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        with self.blobs.open(file) as opened:
            return [json.loads(row) for row in opened.read().splitlines()]


def _is_undone(row: dict[str, Any]) -> bool:
    return row["error"] is not None and row["error"]["code"] in _UNDONE


class FaultyStore(SqliteStore):
    """The store, in memory, with its faults. All lives of the job runner and all users share one connection.

    Its lease is for real seconds, which change nothing: every life of the job runner has the same name.
    """

    def __init__(self, world: World) -> None:
        super().__init__(Path(":memory:"))
        self._world, self._trouble = world, world.trouble
        self.of_users: VirtualLoop | None = None  # the other loop that uses it is the job runner's
        self._connect()

    def disconnect(self) -> None:
        assert self._connection is not None
        self._connection.close()

    def find(self, job: str) -> Job | None:
        """Return the job as it is stored now."""
        found = self._execute("SELECT record FROM jobs WHERE id = ?", job).fetchone()
        return None if found is None else msgspec.json.decode(found[0], type=Job)

    def has_result(self, job: str, line: int) -> bool:
        found = self._execute("SELECT 1 FROM results WHERE job = ? AND line = ?", job, line).fetchone()
        return found is not None

    async def _run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        runner = None if loop is self.of_users else self._world.alive(JOBS)
        if runner is not None and (torn := self._trouble.torn_write()) is not None:
            if torn.applies:
                await super()._run(work)
            self._world.end_later(runner, loop.time(), torn.back_after_s)
            await loop.create_future()  # it hears nothing any more
        if slow_s := self._trouble.store_slow_s(loop.time()):
            await loop.until(loop.time() + slow_s)
        away = self._trouble.store_away(loop.time())
        if away is None:
            return await super()._run(work)
        if away.hangs:
            await loop.until(away.at + away.for_s)
            return await super()._run(work)
        await super()._run(work if away.applies else lambda: None)
        raise StoreError("the store is away")
