"""Batch jobs in a simulated deployment: the job runner's own core sends their lines beside a workload.

    job runner's core ─▶ RunLine ─▶ a best-effort request like any other ─▶ LineRuns, LineEnded
                      ─▶ CheckJob, IndexJob, SaveJob, StoreResult, AssembleJob ─▶ the store's answers, a moment later

The store is a dictionary without faults; tests/jobs and tests/store test what can happen to a real store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from alignedserve.loads.workload import Arrival
from alignedserve.loads.workload.tape import STOP, words
from alignedserve.protocol.commands import Deliver, Reject, SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.simulator.clients import Asking
from alignedserve.simulator.machines.clock import Priority
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT, Settings, gateways_of
from alignedserve.store.job import Endpoint, Forecast, Job, JobStatus, LineCounts, LineResult

LOOK_S = 0.5  # between two reads of the open jobs from the store
WRITE_S = 0.005  # that a write to the store takes
RUNS_AT = 2  # tokens after which a line counts as running: it has a place then
_LINE = "line"  # the ids of lines' requests begin with this


@dataclass(frozen=True)
class Submission:
    """A job that a user submits, and the lengths of its lines."""

    name: str
    lines: int
    window_s: int
    prompt: tuple[int, int] = (512, 1024)  # least and most tokens
    output: tuple[int, int] = (32, 128)
    weight: float = 1.0
    after_s: float = 0.0  # from the first arrivals to its submission


@dataclass
class JobProgress:
    """The state of a job and the forecasts that its client has got."""

    job: Job
    forecasts: list[Forecast] = field(default_factory=list)
    ended_at: float | None = None

    @property
    def left_s(self) -> float:
        """Return the seconds that were left of the job's window when it ended."""
        assert self.ended_at is not None, f"{self.job.id} has not ended"
        return self.job.expires_at - self.ended_at

    @property
    def late_after_s(self) -> float | None:
        """Return the seconds from submission to the first forecast that the job would be late, if there was one."""
        return next((forecast.at - self.job.created_at for forecast in self.forecasts if forecast.is_late), None)


@dataclass
class _SimulatedLine:
    job: str
    number: int
    num_prompt: int
    num_tokens: int = 0


class _LoadWithoutLines:
    """The workload's load; it does not hear of the requests of lines."""

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
    """A simulation with batch jobs; it ends when the workload and all jobs have ended."""

    def __init__(self, settings: Settings, jobs: Sequence[Submission], most_open: int = 256) -> None:
        super().__init__(settings)
        self.clients.load = _LoadWithoutLines(self.clients.load)
        self._runner = RunnerCore(most_open, RETRIES)
        self._submitted = {submission.name: submission for submission in jobs}
        self._draws = {name: Random(f"{settings.seed}/{name}") for name in self._submitted}
        self._lines: dict[str, _SimulatedLine] = {}  # open request -> its line
        self._serial = 0
        self.progress: dict[str, JobProgress] = {}
        self._results: dict[str, dict[int, LineResult]] = {name: {} for name in self._submitted}
        for submission in jobs:
            self.clients.num_open += 1
            at = FIRST_ARRIVAL_AT + submission.after_s
            self.world.agenda.at(at, Priority.CLIENT, partial(self._submit, submission))
        self.world.agenda.at(FIRST_ARRIVAL_AT, Priority.CLIENT, self._start)

    def counts(self, job: str) -> LineCounts:
        return sum((result.counts for result in self._results[job].values()), LineCounts())

    # --- The store

    def _submit(self, submission: Submission) -> None:
        name, now = submission.name, int(self.world.agenda.now)
        expires_at = now + submission.window_s
        job = Job(name, "me", f"file-{name}", Endpoint.CHAT, "", now, expires_at, weight=submission.weight)
        self.progress[name] = JobProgress(job)

    def _start(self) -> None:
        self._tell_core(LeaseTaken())
        self._read_open_jobs()

    def _read_open_jobs(self) -> None:
        jobs = [progress.job for progress in self.progress.values()]
        self._tell_core(OpenJobsRead(tuple(job for job in jobs if job.is_open)))
        if self.clients.num_open:
            self.world.agenda.at(self.world.agenda.now + LOOK_S, Priority.CLIENT, self._read_open_jobs)

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
            self._perform(order)

    def _tell_core_later(self, fact: JobEvent) -> None:
        self.world.agenda.at(self.world.agenda.now + WRITE_S, Priority.CLIENT, partial(self._tell_core, fact))

    def _perform(self, order: JobCommand) -> None:
        now, agenda = self.world.agenda.now, self.world.agenda
        match order:
            case SetTimer(name, at):
                agenda.at(at, Priority.TIMER, partial(self._tell_core, TimerFired(name)))
            case CheckJob(job):
                self._tell_core_later(JobChecked(job.id, self._submitted[job.id].lines, "simulated"))
            case IndexJob(job):
                numbers, results = range(1, self._submitted[job.id].lines + 1), self._results[job.id]
                self._tell_core_later(JobIndexed(job.id, tuple(number for number in numbers if number not in results)))
            case SaveJob(job):
                agenda.at(now + WRITE_S, Priority.CLIENT, partial(self._save, job))
            case AssembleJob(job, status):
                agenda.at(now + WRITE_S, Priority.CLIENT, partial(self._assemble, job, status))
            case RunLine():
                self._run_line(order)
            case StoreResult(name, result):
                self._results[name][result.line] = result
                self._tell_core_later(ResultsStored(name, (result.line,)))
            case DropLines(name):
                self._drop(name)
            case PublishForecasts(forecasts):
                for name, forecast in forecasts.items():
                    self.progress[name].forecasts.append(forecast)

    def _assemble(self, job: Job, status: JobStatus) -> None:
        self._save(job.move(status, self.world.agenda.now, counts=self.counts(job.id)))

    # --- Lines of jobs

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
        self._lines[request.id] = _SimulatedLine(order.job.id, order.line, len(request.prompt))
        self.clients.expect([Arrival(request, draw.randint(*submitted.output), leaves_after_s=None)])

    @property
    def deliver(self) -> Callable[[Deliver], None]:
        return self._deliver

    def _deliver(self, command: Deliver) -> None:
        self.clients.deliver(command)
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
