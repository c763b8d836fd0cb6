"""The job runner's core: decides which lines of which jobs run now, and moves jobs through their states.

    OpenJobsRead ─▶ CheckJob ─▶ SaveJob(IN_PROGRESS) ─▶ IndexJob ─▶ RunLine, RunLine, ...
                       └─▶ SaveJob(FAILED)                             ├─ all done ────▶ SaveJob(FINALIZING)
                                                                       │                 ─▶ AssembleJob(COMPLETED)
                                                                       ├─ window over ─▶ AssembleJob(EXPIRED)
                                                                       └─ cancelled ───▶ AssembleJob(CANCELLED)

All of its state can be read from the store: a job runner that starts again finds the open jobs, and continues with the
lines that have no result. A job waits for its command in phase WAITING. If the command fails (JobCommandFailed), the
job continues from the state in which the store has it then.

A line that may have ended the job runner runs alone, and fails if it surely has (open_lines.py). The jobs of a key have
as many lines open together as the key allows; those of a key that was revoked, or lost the scope, are cancelled.

A line is open from its RunLine until its result is stored, so that results which cannot be written hold up the lines
after them. The deadline of a line is paced: the open lines together get their part of the time that the job has left.
So the lines of a job with ample time are not urgent, and those of a job in a hurry have near deadlines.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from heapq import heappop, heappush

from alignedserve.core import Estimate
from alignedserve.gateway.access.keys import ANONYMOUS
from alignedserve.jobs.messages import (
    AssembleJob,
    CheckJob,
    DropLines,
    IndexJob,
    JobChecked,
    JobCommand,
    JobCommandFailed,
    JobEvent,
    JobIndexed,
    JobSaved,
    LeaseLost,
    LeaseTaken,
    Line,
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
from alignedserve.jobs.rate import Rate
from alignedserve.jobs.shares import JobDemand, finishes, shares
from alignedserve.jobs.window import FIRST, LineWindow
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.store.job import Forecast, Job, JobStatus, LineResult, Problem

TICK_S = 1.0  # between two checks of windows and forecasts
FORECAST_S = 2.0  # between two forecasts
STEADY_S, STEADY_SHARE = 10.0, 0.02  # a job is late that looks late for this time, or share of its window
ALONE_AT, GIVEN_UP_AT = 2, 4  # of a line's blame for deaths of job runners (open_lines.py)
RETRIES = 5  # of a line, after failures that may pass
MOST_BACKOFF_S = 60.0
LEAST_JCT_S = 1.0
PRIOR_TOKENS = 512.0  # assumed for a line's prompt and output while no line has ended
# A job should end when AIM of its window is over, and early enough that LAST_LINES times the time of a line are left.
AIM, LAST_LINES = 0.9, 1.25
LEARNING = 0.1  # the weight of a new line in the mean time of a line
ENOUGH_LINES = 8  # lines of a job that must have ended before their lengths predict the others
_REMEMBERED = 256  # lengths of outputs
_TICK = "tick"
KEY_REVOKED = Problem("key_revoked", "the API key that asked for this batch has been revoked, or lost the scope for it")
OVER_QUOTA = Problem("quota_exceeded", "your files and the results of your batches take all their room")
KEY_NEEDED = Problem("key_needed", "this batch was asked for without an API key, and now the server takes keys only")


class JobPhase(Enum):
    NEW = "new"  # its next command must be chosen
    WAITING = "waiting"  # for the answer to a command
    RUNNING = "running"


@dataclass
class _OpenLine:
    opened_at: float
    has_place: bool = False  # whether the line has a place on a decode worker, or no longer waits for a place


@dataclass
class _OpenJob:
    job: Job
    phase: JobPhase = JobPhase.NEW
    pending: array[int] = field(default_factory=partial(array, "I"))  # lines that can run, the next line last
    waits_until: float = 0.0  # for places and tokens of its key
    later: list[tuple[float, int]] = field(default_factory=list)  # a heap: (when to try it again, line)
    running: dict[int, _OpenLine] = field(default_factory=dict)  # number -> open line
    tries: dict[int, int] = field(default_factory=dict)  # failed line -> tries
    passed_over: Counter[int] = field(default_factory=Counter)  # blamed line -> how often the key had no place
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # of outputs
    num_ended: int = 0  # lines that ended in this job runner
    num_tokens: int = 0  # of these lines, prompts and outputs
    rate: Rate | None = None
    looks_late_since: float | None = None
    is_late: bool = False  # by the last forecast

    @property
    def window_s(self) -> float:
        return self.job.expires_at - self.job.created_at

    def aim(self, line_s: float) -> float:
        """Return when the job should end, so that the lines that open last also end in time."""
        return self.job.expires_at - max((1 - AIM) * self.window_s, LAST_LINES * line_s)

    def may_run(self, now: float) -> bool:
        return self.phase is JobPhase.RUNNING and now >= self.waits_until

    @property
    def num_left(self) -> int:
        return len(self.pending) + len(self.later) + len(self.running)

    @property
    def tokens_per_line(self) -> float | None:
        return self.num_tokens / self.num_ended if self.num_ended else None

    @property
    def estimate(self) -> Estimate | None:
        """The length of an output, estimated from the job's other outputs (algorithms §3)."""
        if len(self.lengths) < ENOUGH_LINES:
            return None
        ordered = sorted(self.lengths)
        mean = max(1, round(sum(ordered) / len(ordered)))
        return Estimate(mean, max(mean, ordered[int(0.9 * (len(ordered) - 1))]))


class LineFate(Enum):
    """The result of one try of a line."""

    COMPLETED = "completed"
    FAILED = "failed"  # for good
    RETRIED = "retried"  # the line failed, and is tried again later
    REFUSED = "refused"  # no room, or the key had no place or tokens left: the line is tried again


@dataclass(frozen=True)
class JobFigures:
    """The counts of jobs for metrics. Jobs that have ended count since the job runner started."""

    open: Mapping[JobStatus, int]
    ended: Mapping[JobStatus, int]
    num_waiting: int  # lines of open jobs
    num_running: int
    tries: Mapping[LineFate, int]
    num_late: int  # jobs that are expected to end after their window
    deadline_s: float | None  # until the nearest end of a window


class RunnerCore:
    def __init__(
        self,
        most_open: int,
        retries: int,
        lines_of: Callable[[str], int] | None = None,
        weight_of: Callable[[str], int] = lambda _: 1,
    ) -> None:
        """`lines_of` returns how many lines of the caller behind a job's owner may be open at once: 0 where its key, or
        the scope for such jobs, has been revoked; `weight_of` returns a caller's weight among callers."""
        self._retries, self._lines_of, self._weight_of = retries, lines_of or (lambda _: most_open), weight_of
        self._window = LineWindow(most_open)
        self._jobs: dict[str, _OpenJob] = {}
        self._saved_as_ended: set[str] = set()  # a read of open jobs that began before may still tell of them
        self._is_active = False
        self._blame: dict[Line, int] = {}  # for deaths of job runners
        self._rate: Rate | None = None  # tokens of all jobs
        self._line_s = 0.0  # mean time of a line from its RunLine to its end
        self._forecast_at = 0.0  # when forecasts were last published
        self._is_ticking = False
        self._ended: Counter[JobStatus] = Counter()
        self._tries: Counter[LineFate] = Counter()

    def handle(self, event: JobEvent, now: float, wall: float | None = None) -> list[JobCommand]:
        """Return what is to be done after this event.

        `now` never jumps: rates, waits and timers are reckoned by it. `wall` is the wall clock, by which users set the
        windows of jobs; None: the two clocks say the same.
        """
        wall = now if wall is None else wall
        commands: list[JobCommand] = []
        match event:
            case LeaseTaken(blame):
                self._is_active, self._blame = True, dict(blame)
            case LeaseLost():
                self._is_active = False
                commands += [DropLines(id) for id in self._jobs]
                self._jobs.clear()
            case OpenJobsRead(jobs, full) if self._is_active:
                commands += self._update_jobs(jobs, full, wall)
            case JobChecked(id) if opened := self._jobs.get(id):
                commands += self._start_job(opened, event, wall)
            case JobIndexed(id, lines) if opened := self._jobs.get(id):
                commands += self._begin_lines(opened, lines, now, wall)
            case JobSaved(job) if opened := self._jobs.get(job.id):
                opened.job, opened.phase = job, JobPhase.NEW
                commands += self._continue_job(opened, wall)
            case JobCommandFailed(id) if opened := self._jobs.get(id):
                opened.phase = JobPhase.NEW
            case LineRuns(id, line) if (opened := self._jobs.get(id)) and line in opened.running:
                self._place(opened.running[line], now)
            case LineEnded(id, line) if (opened := self._jobs.get(id)) and line in opened.running:
                commands += self._end_line(opened, event, now)
            case ResultsStored(id, lines) if opened := self._jobs.get(id):
                for line in lines:
                    opened.running.pop(line, None)
                    self._blame.pop((id, line), None)
                commands += self._finalize_if_done(opened, wall)
            case TimerFired():
                self._is_ticking = False
                commands += self._check_time(now, wall)
        commands += self._open_lines(now, wall)
        if self._jobs and not self._is_ticking:
            self._is_ticking = True
            commands.append(SetTimer(_TICK, now + TICK_S))
        return commands

    @property
    def num_open(self) -> int:
        """The number of open lines."""
        return sum(len(opened.running) for opened in self._jobs.values())

    @property
    def open_lines(self) -> list[Line]:
        return [(id, line) for id, opened in self._jobs.items() for line in opened.running]

    @property
    def blame(self) -> Mapping[Line, int]:
        return self._blame

    @property
    def held(self) -> dict[str, int]:
        """Return the counts of what the core holds now; all are zero when no job is open."""
        return {"jobs": len(self._jobs), "lines": self.num_open}

    def figures(self, wall: float) -> JobFigures:
        """Return what metrics show."""
        jobs = self._jobs.values()
        return JobFigures(
            Counter(opened.job.status for opened in jobs),
            self._ended,
            sum(len(opened.pending) + len(opened.later) for opened in jobs),
            self.num_open,
            self._tries,
            sum(opened.is_late for opened in jobs),
            min((opened.job.expires_at - wall for opened in jobs), default=None),
        )

    # --- Jobs

    def _update_jobs(self, jobs: Sequence[Job], full: Collection[str], wall: float) -> list[JobCommand]:
        open_ids = {job.id for job in jobs}
        self._saved_as_ended &= open_ids
        self._blame = {line: weight for line, weight in self._blame.items() if line[0] in open_ids}
        # Jobs may have ended in the store though their last command failed: its answer was lost.
        ended = [id for id, opened in self._jobs.items() if opened.phase is JobPhase.NEW and id not in open_ids]
        commands: list[JobCommand] = [DropLines(id) for id in ended]
        for id in ended:
            del self._jobs[id]
        for job in jobs:
            if job.id in self._saved_as_ended:
                continue
            opened = self._jobs.setdefault(job.id, _OpenJob(job))
            if job.revision >= opened.job.revision:
                opened.job = job
            if opened.phase is JobPhase.RUNNING and job.status is JobStatus.CANCELLING:
                commands += self._stop(opened, AssembleJob(opened.job, JobStatus.CANCELLED))
            elif opened.phase is JobPhase.RUNNING and not self._lines_of(job.owner):
                commands += self._stop(opened, _revoked(opened.job, wall))
            elif opened.phase is JobPhase.RUNNING and job.owner in full:
                problems = (OVER_QUOTA,)
                commands += self._stop(opened, SaveJob(job.move(JobStatus.CANCELLING, wall, problems=problems)))
            elif opened.phase is JobPhase.NEW:
                commands += self._continue_job(opened, wall)
        return commands

    def _continue_job(self, opened: _OpenJob, wall: float) -> list[JobCommand]:
        """Return the next command for a job in phase NEW."""
        job = opened.job
        if not job.is_open:
            self._ended[job.status] += 1
            self._saved_as_ended.add(job.id)
            del self._jobs[job.id]
            return []
        opened.phase = JobPhase.WAITING
        match job.status:
            case JobStatus.CANCELLING:
                return [AssembleJob(job, JobStatus.CANCELLED)]
            case JobStatus.FINALIZING:
                return [AssembleJob(job, JobStatus.COMPLETED)]
            case _ if wall >= job.expires_at:
                return [AssembleJob(job, JobStatus.EXPIRED)]
            case _ if not self._lines_of(job.owner):
                return [_revoked(job, wall)]
            case JobStatus.VALIDATING:
                return [CheckJob(job)]
        return [IndexJob(job)]

    def _start_job(self, opened: _OpenJob, checked: JobChecked, wall: float) -> list[JobCommand]:
        """Save the job as in progress, or as failed if its file has problems, unless it was cancelled meanwhile."""
        if opened.job.status is not JobStatus.VALIDATING:
            return self._continue_job(opened, wall)
        if checked.problems:
            return [SaveJob(opened.job.move(JobStatus.FAILED, wall, problems=checked.problems))]
        return [SaveJob(opened.job.move(JobStatus.IN_PROGRESS, wall, total=checked.total, model=checked.model))]

    def _begin_lines(self, opened: _OpenJob, lines: Sequence[int], now: float, wall: float) -> list[JobCommand]:
        """Let the job's lines run, unless it was cancelled meanwhile."""
        if opened.job.status is not JobStatus.IN_PROGRESS:
            return self._continue_job(opened, wall)
        opened.phase, opened.pending, opened.rate = JobPhase.RUNNING, array("I", reversed(lines)), Rate(now)
        return self._finalize_if_done(opened, wall)

    def _finalize_if_done(self, opened: _OpenJob, wall: float) -> list[JobCommand]:
        if opened.phase is not JobPhase.RUNNING or opened.num_left:
            return []
        opened.phase = JobPhase.WAITING
        return [SaveJob(opened.job.move(JobStatus.FINALIZING, wall))]

    def _stop(self, opened: _OpenJob, end: AssembleJob | SaveJob) -> list[JobCommand]:
        """End the job by this command, with the results that it has, without waiting for its open lines."""
        opened.phase = JobPhase.WAITING
        del opened.pending[:]
        opened.later.clear()
        opened.running.clear()
        return [DropLines(opened.job.id), end]

    # --- Lines

    def _end_line(self, opened: _OpenJob, ended: LineEnded, now: float) -> list[JobCommand]:
        if ended.outcome in (LineOutcome.REFUSED, LineOutcome.LIMITED):
            if ended.outcome is LineOutcome.REFUSED:
                self._window.refuse(self.num_open, ended.retry_after_s, now)
            else:
                opened.waits_until = now + ended.retry_after_s
            del opened.running[ended.line]
            self._tries[LineFate.REFUSED] += 1
            if ended.outcome is LineOutcome.LIMITED and self._runs_alone(opened, ended.line):
                # It is tried again later, each time after a longer wait: while it is due, no other line opens.
                opened.passed_over[ended.line] += 1
                wait_s = max(ended.retry_after_s, min(MOST_BACKOFF_S, 2.0 ** opened.passed_over[ended.line]))
                heappush(opened.later, (now + wait_s, ended.line))
            else:
                opened.pending.append(ended.line)
            return []
        assert ended.result is not None
        self._window.end()
        tries = opened.tries.get(ended.line, 0)
        if ended.outcome is LineOutcome.FAILED and tries < self._retries:
            del opened.running[ended.line]
            self._blame.pop((opened.job.id, ended.line), None)
            self._tries[LineFate.RETRIED] += 1
            opened.tries[ended.line] = tries + 1
            heappush(opened.later, (now + max(ended.retry_after_s, min(MOST_BACKOFF_S, 2.0**tries)), ended.line))
            return []
        self._tries[LineFate.COMPLETED if ended.result.is_ok else LineFate.FAILED] += 1
        opened.tries.pop(ended.line, None)
        opened.passed_over.pop(ended.line, None)
        line = opened.running[ended.line]
        if ended.result.is_ok:  # an error comes soon, and so says nothing about the wait for places
            self._place(line, now)
        line.has_place = True  # the line no longer waits, although the result is not stored yet
        self._learn(opened, ended.result, now - line.opened_at, now)
        return [StoreResult(opened.job.id, ended.result)]

    def _place(self, line: _OpenLine, now: float) -> None:
        if not line.has_place:
            line.has_place = True
            self._window.place(now - line.opened_at)

    def _learn(self, opened: _OpenJob, result: LineResult, took_s: float, now: float) -> None:
        """Update lengths, rates and times from the result of a line."""
        tokens = result.input_tokens + result.output_tokens
        if not result.is_ok or opened.rate is None:
            return
        opened.lengths.append(max(1, result.output_tokens))
        opened.num_ended += 1
        opened.num_tokens += tokens
        opened.rate.add(tokens, now)
        self._line_s += LEARNING * (took_s - self._line_s)
        if self._rate is None:  # counted from now: with the time before the first line's end, the rate would be too low
            self._rate = Rate(now)
        else:
            self._rate.add(tokens, now)

    def _open_lines(self, now: float, wall: float) -> list[JobCommand]:
        """Run lines while there is room, each time a line of the job that is furthest below its share."""
        commands: list[JobCommand] = []
        for opened in self._jobs.values():
            while opened.later and opened.later[0][0] <= now:
                opened.pending.append(heappop(opened.later)[1])
        num_open = self.num_open
        if (blamed := self._blamed_line(now)) is not None:
            may_run = not num_open and self._window.may_open(0, 0, now)
            return [self._run_line(*blamed, now, wall)] if may_run else []
        num_running = sum(line.has_place for opened in self._jobs.values() for line in opened.running.values())
        share: dict[str, float] | None = None
        lines = Counter[str]()  # open, by caller
        for opened in self._jobs.values():
            lines[opened.job.caller] += len(opened.running)
        while self._window.may_open(num_open, num_running, now) and (ready := list(self._ready(now, lines))):
            share = share or shares(list(self._demands()), self._tokens_per_s(now), wall)
            opened = min(ready, key=lambda opened: _lines_per_share(opened, share))
            commands.append(self._run_line(opened, opened.pending[-1], now, wall))
            lines[opened.job.caller] += 1
            num_open += 1
        if not num_open:
            self._rate = None
        return commands

    def _ready(self, now: float, lines: Mapping[str, int]) -> Iterator[_OpenJob]:
        for opened in self._jobs.values():
            caller = opened.job.caller
            if opened.pending and opened.may_run(now) and lines[caller] < self._lines_of(opened.job.owner):
                yield opened

    def _blamed_line(self, now: float) -> tuple[_OpenJob, int] | None:
        """Return a line that is to run alone and runs or can run next, if there is one: nothing else runs meanwhile."""
        for id, line in sorted(self._blame, key=lambda blamed: (self._blame[blamed], blamed)):
            opened = self._jobs.get(id)
            if opened is None or not self._runs_alone(opened, line) or not opened.may_run(now):
                continue
            if line in opened.running or line in opened.pending:
                return opened, line
        return None

    def _runs_alone(self, opened: _OpenJob, line: int) -> bool:
        return self._blame.get((opened.job.id, line), 0) >= ALONE_AT

    def _run_line(self, opened: _OpenJob, line: int, now: float, wall: float) -> RunLine:
        num_left = opened.num_left
        if opened.pending[-1] == line:
            opened.pending.pop()
        else:
            opened.pending.remove(line)
        opened.running[line] = _OpenLine(now)
        left_s = opened.job.expires_at - wall
        jct_s = max(LEAST_JCT_S, left_s * min(1.0, max(FIRST, len(opened.running)) / num_left))
        is_given_up = self._blame.get((opened.job.id, line), 0) >= GIVEN_UP_AT
        return RunLine(opened.job, line, jct_s, opened.estimate, is_given_up)

    # --- Time and forecasts

    def _check_time(self, now: float, wall: float) -> list[JobCommand]:
        """Stop the jobs whose window is over; publish forecasts if it is time."""
        expired = [
            opened
            for opened in self._jobs.values()
            if opened.phase is JobPhase.RUNNING and wall >= opened.job.expires_at
        ]
        commands = [
            command for opened in expired for command in self._stop(opened, AssembleJob(opened.job, JobStatus.EXPIRED))
        ]
        if now - self._forecast_at >= FORECAST_S:
            self._forecast_at = now
            commands += self._publish_forecasts(now, wall)
        return commands

    def _publish_forecasts(self, now: float, wall: float) -> list[JobCommand]:
        tokens_per_s = self._tokens_per_s(now)
        expected_ends = finishes(list(self._demands()), tokens_per_s, wall) if tokens_per_s else {}
        forecasts: dict[str, Forecast] = {}
        for opened in self._jobs.values():
            if opened.rate is None or opened.phase is not JobPhase.RUNNING:
                continue
            finish_at = expected_ends.get(opened.job.id)
            opened.is_late = self._is_late(opened, finish_at, now)
            forecasts[opened.job.id] = Forecast(wall, opened.rate.per_s(now) or 0.0, finish_at, opened.is_late)
        return [PublishForecasts(forecasts)] if forecasts else []

    def _is_late(self, opened: _OpenJob, finish_at: float | None, now: float) -> bool:
        """Return whether the job has looked late for some time: the first lines take long, and little is known then.

        A job without an expected end is late if none of its lines has ended for a good part of its window: then the
        system has no room for it."""
        if finish_at is None:
            assert opened.rate is not None
            return now - opened.rate.began_at > max(STEADY_S, (1 - AIM) * opened.window_s)
        if finish_at <= opened.job.expires_at:
            opened.looks_late_since = None
            return False
        opened.looks_late_since = now if opened.looks_late_since is None else opened.looks_late_since
        return now - opened.looks_late_since >= min(STEADY_S, STEADY_SHARE * opened.window_s)

    def _tokens_per_s(self, now: float) -> float | None:
        return self._rate.per_s(now) if self._rate is not None else None

    def _demands(self) -> Iterator[JobDemand]:
        """Yield the demands of running jobs; a job whose lines have no known length gets the mean of other jobs."""
        known = [tokens for opened in self._jobs.values() if (tokens := opened.tokens_per_line) is not None]
        usual = sum(known) / len(known) if known else PRIOR_TOKENS
        for opened in self._jobs.values():
            if opened.phase is JobPhase.RUNNING and opened.num_left:
                job, tokens = opened.job, opened.num_left * (opened.tokens_per_line or usual)
                aim, of_caller = opened.aim(self._line_s), (job.caller, self._weight_of(job.caller))
                yield JobDemand(job.id, job.expires_at, aim, job.weight, tokens, *of_caller)


def _revoked(job: Job, wall: float) -> SaveJob:
    """Return the command that cancels a job of a key that has been revoked, or lost the scope."""
    problem = KEY_NEEDED if job.caller == ANONYMOUS.id else KEY_REVOKED
    return SaveJob(job.move(JobStatus.CANCELLING, wall, problems=(problem,)))


def _lines_per_share(opened: _OpenJob, share: dict[str, float]) -> tuple[bool, float, float, str]:
    """Return the key of jobs by open lines per share; jobs without a share come last, by deadline."""
    due = share[opened.job.id]
    return due <= 0, (len(opened.running) + 1) / due if due > 0 else 0.0, opened.job.expires_at, opened.job.id
