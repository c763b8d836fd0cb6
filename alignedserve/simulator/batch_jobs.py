"""Batch jobs in a simulated deployment: the job runner's own core asks for their lines beside a workload.

    job runner's core ─▶ RunLine ─▶ a best-effort request like any other ─▶ LineRuns, LineEnded
                      ─▶ CheckJob, IndexJob, SaveJob, StoreResult, AssembleJob ─▶ the store's answers, a moment later

The store is a dictionary that nothing happens to; what may happen to a real one is what tests/jobs and tests/store ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from alignedserve.core import Request, Sampling, ServiceClass, Slo
from alignedserve.jobs.messages import (
    AssembleJob,
    CheckJob,
    DropLines,
    IndexJob,
    JobChecked,
    JobCommand,
    JobEvent,
    JobIndexed,
    JobSaved,
    LeaseTaken,
    LineEnded,
    LineOutcome,
    LineRuns,
    OpenJobsRead,
    PublishForecasts,
    ResultsStored,
    RunLine,
    SaveJob,
    StoreResult,
)
from alignedserve.jobs.state import RETRIES, RunnerCore
from alignedserve.protocol.commands import Deliver, Reject, SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.simulator.clients import Asking
from alignedserve.simulator.machines.clock import Priority
from alignedserve.simulator.machines.engine import STOP
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT, Settings, gateways_of
from alignedserve.simulator.workload import Arrival
from alignedserve.simulator.workload.tape import words
from alignedserve.store.job import Endpoint, Forecast, Job, JobStatus, LineCounts, LineResult

LOOK_S = 0.5  # between two looks at the store
WRITE_S = 0.005  # until the store has what it is given
RUNS_AT = 2  # tokens: a line has a place
_LINE = "line"  # how the ids of lines' requests begin


@dataclass(frozen=True)
class Submission:
    """A job, and how long its lines are."""

    name: str
    lines: int
    window_s: int
    prompt: tuple[int, int] = (512, 1024)  # least and most tokens
    output: tuple[int, int] = (32, 128)
    weight: float = 1.0
    after_s: float = 0.0  # the first arrivals


@dataclass
class JobProgress:
    """What a client would see of a job in the end, and what it was told on the way."""

    job: Job
    forecasts: list[Forecast] = field(default_factory=list)
    ended_at: float | None = None

    @property
    def left_s(self) -> float:
        """Of its window, when it ended."""
        assert self.ended_at is not None, f"{self.job.id} has not ended"
        return self.job.expires_at - self.ended_at

    @property
    def late_after_s(self) -> float | None:
        """When it was first said that it would not be through, after it was submitted."""
        return next((told.at - self.job.created_at for told in self.forecasts if told.is_late), None)


@dataclass
class _OpenLine:
    job: str
    number: int
    num_prompt: int
    num_tokens: int = 0


class _Beside:
    """The workload's load, which knows nothing of lines."""

    def __init__(self, load: Asking) -> None:
        self._load = load

    @property
    def notes(self) -> tuple[str, ...]:
        return self._load.notes

    @property
    def expected(self) -> int | None:
        return None

    def start(self, now: float) -> list[Arrival]:
        return self._load.start(now)

    def arrived(self, request: str) -> list[Arrival]:
        return [] if request.startswith(_LINE) else self._load.arrived(request)

    def ended(self, request: str, now: float, answer: tuple[int, ...] | None) -> list[Arrival]:
        return [] if request.startswith(_LINE) else self._load.ended(request, now, answer)


class JobsSimulation(Simulation):
    """It ends when the workload has, and all jobs."""

    def __init__(self, settings: Settings, jobs: Sequence[Submission], most_open: int = 256) -> None:
        super().__init__(settings)
        self.clients.load = _Beside(self.clients.load)
        self._runner = RunnerCore(most_open, RETRIES)
        self._submitted = {one.name: one for one in jobs}
        self._draws = {one.name: Random(f"{settings.seed}/{one.name}") for one in jobs}
        self._lines: dict[str, _OpenLine] = {}  # of open requests
        self._serial = 0
        self.progress: dict[str, JobProgress] = {}
        self._results: dict[str, dict[int, LineResult]] = {one.name: {} for one in jobs}
        for one in jobs:
            self.clients.num_open += 1
            at = FIRST_ARRIVAL_AT + one.after_s
            self.world.agenda.at(at, Priority.CLIENT, partial(self._submit, one))
        self.world.agenda.at(FIRST_ARRIVAL_AT, Priority.CLIENT, self._start)

    def counts(self, job: str) -> LineCounts:
        return sum((one.counts for one in self._results[job].values()), LineCounts())

    # --- The store

    def _submit(self, one: Submission) -> None:
        now = int(self.world.agenda.now)
        job = Job(one.name, "me", f"file-{one.name}", Endpoint.CHAT, "", now, now + one.window_s, weight=one.weight)
        self.progress[one.name] = JobProgress(job)

    def _start(self) -> None:
        self._tell_core(LeaseTaken())
        self._look()

    def _look(self) -> None:
        self._tell_core(OpenJobsRead(tuple(one.job for one in self.progress.values() if one.job.is_open)))
        if self.clients.num_open:
            self.world.agenda.at(self.world.agenda.now + LOOK_S, Priority.CLIENT, self._look)

    def _save(self, job: Job) -> None:
        saved = replace(job, revision=job.revision + 1)
        progress = self.progress[job.id]
        progress.job = saved
        if not saved.is_open:
            progress.ended_at = self.world.agenda.now
            self.clients.num_open -= 1
        self._tell_core(JobSaved(saved))

    # --- The job runner

    def _tell_core(self, fact: JobEvent) -> None:
        for order in self._runner.handle(fact, self.world.agenda.now):
            self._do(order)

    def _soon(self, fact: JobEvent) -> None:
        self.world.agenda.at(self.world.agenda.now + WRITE_S, Priority.CLIENT, partial(self._tell_core, fact))

    def _do(self, order: JobCommand) -> None:
        now, agenda = self.world.agenda.now, self.world.agenda
        match order:
            case SetTimer(name, at):
                agenda.at(at, Priority.TIMER, partial(self._tell_core, TimerFired(name)))
            case CheckJob(job):
                self._soon(JobChecked(job.id, self._submitted[job.id].lines, "simulated"))
            case IndexJob(job):
                numbers = range(1, self._submitted[job.id].lines + 1)
                self._soon(JobIndexed(job.id, tuple(one for one in numbers if one not in self._results[job.id])))
            case SaveJob(job):
                agenda.at(now + WRITE_S, Priority.CLIENT, partial(self._save, job))
            case AssembleJob(job, status):
                agenda.at(now + WRITE_S, Priority.CLIENT, partial(self._assemble, job, status))
            case RunLine():
                self._run_line(order)
            case StoreResult(name, result):
                self._results[name][result.line] = result
                self._soon(ResultsStored(name, (result.line,)))
            case DropLines(name):
                self._drop(name)
            case PublishForecasts(forecasts):
                for name, forecast in forecasts.items():
                    self.progress[name].forecasts.append(forecast)

    def _assemble(self, job: Job, status: JobStatus) -> None:
        self._save(job.move(status, self.world.agenda.now, counts=self.counts(job.id)))

    # --- Its lines

    def _run_line(self, order: RunLine) -> None:
        submitted, draw = self._submitted[order.job.id], self._draws[order.job.id]
        self._serial += 1
        request = Request(
            id=f"{_LINE}-{self._serial}",
            owner=gateways_of(self.settings)[0],
            attempt=0,
            prompt=words(draw, draw.randint(*submitted.prompt)),
            emitted=(),
            sampling=Sampling(),
            max_tokens=submitted.output[1],
            stop_tokens=(STOP,),
            service=ServiceClass.BE,
            slo=Slo(jct_s=order.jct_s),
            arrival_at=self.world.agenda.now,
            estimate=order.estimate,
        )
        self._lines[request.id] = _OpenLine(order.job.id, order.line, len(request.prompt))
        self.clients.expect([Arrival(request, draw.randint(*submitted.output), leaves_after_s=None)])

    def deliver(self, command: Deliver) -> None:
        super().deliver(command)
        line = self._lines.get(command.request)
        if line is None:
            return
        before, line.num_tokens = line.num_tokens, line.num_tokens + len(command.tokens)
        if before < RUNS_AT <= line.num_tokens:
            self._tell_core(LineRuns(line.job, line.number))
        if command.finish is not None:
            del self._lines[command.request]
            result = LineResult(line.number, True, "", line.num_prompt, 0, line.num_tokens)
            self._tell_core(LineEnded(line.job, line.number, LineOutcome.DONE, result))

    def reject(self, command: Reject) -> None:
        super().reject(command)
        if (line := self._lines.pop(command.request, None)) is not None:
            ended = LineEnded(line.job, line.number, LineOutcome.REFUSED, retry_after_s=command.retry_after_s)
            self._tell_core(ended)

    def _drop(self, job: str) -> None:
        for id in [id for id, line in self._lines.items() if line.job == job]:
            del self._lines[id]
            self.clients.leave(id)
