"""Tests of the job runner's core, driven by a simulated system: whatever happens, each line ends with one result."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Estimate
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
from alignedserve.jobs.state import ENOUGH_LINES, LineFate, RunnerCore
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.store.job import Endpoint, Job, JobStatus, LineResult, Problem
from tests.conftest import examples

HOUR = 3_600


def job(name: str, created_at: int = 0, window_s: int = HOUR, weight: float = 1.0) -> Job:
    return Job(name, "me", "file-1", Endpoint.CHAT, "1h", created_at, created_at + window_s, weight=weight)


def result(line: int, tokens: int = 10, is_ok: bool = True) -> LineResult:
    return LineResult(line, is_ok, "{}", 0, 0, tokens)


@dataclass
class System:
    """A store, a file of `lines` for each job, and workers that run `places` lines at once, each for `line_s`.

    Crashes, refusals and failures come exactly where a seed wants them, and hours pass in no time.
    """

    lines: dict[str, int]
    seed: int = 0
    places: int = 16
    line_s: float = 1.0
    trouble: float = 0.0  # probability that an action fails
    now: float = 0.0
    wall_ahead_s: float = 0.0  # of `now`
    jobs: dict[str, Job] = field(default_factory=dict)
    results: dict[str, dict[int, LineResult]] = field(default_factory=dict)
    forecasts: dict[str, Any] = field(default_factory=dict)
    ran: list[RunLine] = field(default_factory=list)
    most_open: int = 0
    core: RunnerCore = field(init=False)
    ends_at: dict[tuple[str, int], float] = field(default_factory=dict)  # when each running line ends
    waiting: list[RunLine] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.start()

    def start(self) -> None:
        """Begin a new life of the runner, which knows nothing of the one before."""
        self.core = RunnerCore(most_open=64, retries=2)
        self.ends_at.clear()
        self.waiting.clear()
        self.timers.clear()
        self.told(LeaseTaken())

    @property
    def wall(self) -> float:
        return self.now + self.wall_ahead_s

    def add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.results[job.id] = {}

    def told(self, fact: JobEvent) -> None:
        for order in self.core.handle(fact, self.now, self.wall):
            self.perform(order)

    def goes_wrong(self) -> bool:
        return self.draw.random() < self.trouble

    def perform(self, order: JobCommand) -> None:
        match order:
            case SetTimer(name, at):
                self.timers[name] = at
            case CheckJob(job):
                self.told(
                    JobCommandFailed(job.id) if self.goes_wrong() else JobChecked(job.id, self.lines[job.id], "demo")
                )
            case IndexJob(job):
                lines = [line for line in range(1, self.lines[job.id] + 1) if line not in self.results[job.id]]
                self.told(JobCommandFailed(job.id) if self.goes_wrong() else JobIndexed(job.id, tuple(lines)))
            case SaveJob(job):
                self.save(job)
            case AssembleJob(job, status):
                self.save(job.move(status, self.now))
            case RunLine():
                assert order.line not in self.results[order.job.id], "a line that has a result runs again"
                self.ran.append(order)
                self.waiting.append(order)
                self.most_open = max(self.most_open, self.core.num_open)
            case StoreResult(name, result):
                assert result.line not in self.results[name], "a line has two results"
                self.results[name][result.line] = result
                self.told(ResultsStored(name, (result.line,)))
            case DropLines(name):
                self.waiting = [run for run in self.waiting if run.job.id != name]
                self.ends_at = {key: at for key, at in self.ends_at.items() if key[0] != name}
            case PublishForecasts(forecasts):
                self.forecasts |= forecasts

    def save(self, job: Job) -> None:
        if self.goes_wrong() or self.jobs[job.id].revision != job.revision:
            return self.told(JobCommandFailed(job.id))
        self.jobs[job.id] = replace(job, revision=job.revision + 1)
        return self.told(JobSaved(self.jobs[job.id]))

    def cancel(self, name: str) -> None:
        job = self.jobs[name].move(JobStatus.CANCELLING, self.now)
        self.jobs[name] = replace(job, revision=job.revision + 1)

    def step(self, seconds: float = 0.25) -> None:
        self.now += seconds
        if self.goes_wrong():
            self.start()
        self.told(OpenJobsRead(tuple(job for job in self.jobs.values() if job.is_open)))
        for name in [name for name, at in self.timers.items() if at <= self.now]:
            del self.timers[name]
            self.told(TimerFired(name))
        for key in [key for key, at in self.ends_at.items() if at <= self.now]:
            if key in self.ends_at:
                del self.ends_at[key]
                self.ended(*key)
        while self.waiting and len(self.ends_at) < self.places:
            run = self.waiting.pop(0)
            self.ends_at[run.job.id, run.line] = self.now + self.line_s
            self.told(LineRuns(run.job.id, run.line))

    def ended(self, name: str, line: int) -> None:
        if self.goes_wrong():
            self.told(LineEnded(name, line, LineOutcome.REFUSED, retry_after_s=0.5))
        elif self.goes_wrong():
            self.told(LineEnded(name, line, LineOutcome.FAILED, result(line, is_ok=False)))
        else:
            self.told(LineEnded(name, line, LineOutcome.DONE, result(line)))

    def run(self, until: float) -> None:
        while self.now < until and any(job.is_open for job in self.jobs.values()):
            self.step()

    def statuses(self) -> dict[str, str]:
        return {name: job.status.value for name, job in self.jobs.items()}


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.floats(0, 0.08), st.lists(st.integers(1, 150), min_size=1, max_size=4))
def test_whatever_goes_wrong_every_line_has_one_result(seed: int, trouble: float, sizes: list[int]) -> None:
    system = System({str(number): size for number, size in enumerate(sizes)}, seed, trouble=trouble)
    for name in system.lines:
        system.add(job(name, window_s=100 * HOUR))
    system.run(until=10 * HOUR)
    assert set(system.statuses().values()) == {"completed"}
    for name, size in system.lines.items():
        assert sorted(system.results[name]) == list(range(1, size + 1))
    assert set(system.core.held.values()) == {0}


@pytest.mark.parametrize("step_s", [-5 * HOUR, 5 * HOUR])
def test_lines_go_on_as_before_when_the_wall_clock_steps(step_s: float) -> None:
    """Failures make lines wait, and refusals make all wait: none of them waits until the clock has caught up."""
    steady, stepped = (System({"a": 200}, seed=3, trouble=0.05) for _ in range(2))
    for system in (steady, stepped):
        system.add(job("a", window_s=100 * HOUR))
        for _ in range(20):
            system.step()
    stepped.wall_ahead_s = step_s
    for system in (steady, stepped):
        system.run(until=HOUR)
    assert stepped.statuses() == {"a": "completed"}
    assert (stepped.now, len(stepped.ran)) == (steady.now, len(steady.ran))


def test_the_window_of_a_job_ends_by_the_wall_clock() -> None:
    system = System({"a": 500})
    system.add(job("a", window_s=2 * HOUR))
    system.step()
    system.wall_ahead_s = 2 * HOUR
    system.run(until=100)
    assert system.statuses() == {"a": "expired"}


def test_a_job_passes_its_states_and_an_invalid_job_fails_as_a_whole() -> None:
    core = RunnerCore(64, 2)
    new_job = job("a")
    assert core.handle(OpenJobsRead((new_job,)), 0.0) == []  # without the lease the core does nothing
    core.handle(LeaseTaken(), 0.0)
    assert CheckJob(new_job) in core.handle(OpenJobsRead((new_job,)), 0.0)
    problems = (Problem("invalid_json", "no", 3),)
    failed = core.handle(JobChecked("a", 5, None, problems), 1.0)
    assert failed == [SaveJob(new_job.move(JobStatus.FAILED, 1.0, problems=problems))]
    core.handle(JobSaved(new_job.move(JobStatus.FAILED, 1.0)), 1.0)
    assert core.held == {"jobs": 0, "lines": 0}


def test_without_room_few_lines_wait_and_with_room_many_run() -> None:
    narrow, wide = (System({"a": 500}, places=places) for places in (0, 32))
    for system in (narrow, wide):
        system.add(job("a"))
        for _ in range(40):
            system.step()
    assert narrow.most_open == 8
    assert wide.most_open == 64


def test_after_a_refusal_each_line_that_ends_allows_one_more_until_all_may_be_open_again() -> None:
    system = System({"a": 500}, places=32)
    system.add(job("a"))
    for _ in range(20):
        system.step()
    refused = system.ends_at.popitem()[0]
    system.told(LineEnded(*refused, LineOutcome.REFUSED, retry_after_s=0.0))
    system.most_open = 0
    for _ in range(20):
        system.step()
    assert system.most_open == 64


@pytest.mark.parametrize("line_s", [0.0, 1.0])
def test_where_lines_have_their_places_soon_more_may_wait_and_where_they_do_not_few(line_s: float) -> None:
    """Lines of one token never count as running: a window of eight would leave a large system idle."""

    class Fast(System):
        def step(self, seconds: float = 0.05) -> None:
            super().step(seconds)

        def told(self, fact: JobEvent) -> None:
            if not isinstance(fact, LineRuns):
                super().told(fact)

    system = Fast({"a": 1_000}, places=4 if line_s else 64, line_s=line_s)
    system.add(job("a"))
    for _ in range(100):
        system.step()
    assert system.most_open == (8 if line_s else 64)


@pytest.mark.parametrize("status", [JobStatus.VALIDATING, JobStatus.IN_PROGRESS])
def test_a_job_that_is_cancelled_while_its_file_is_read_runs_no_line(status: JobStatus) -> None:
    core, new_job = RunnerCore(64, 2), replace(job("a"), status=status)
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead((new_job,)), 0.0)
    cancelled = replace(new_job.move(JobStatus.CANCELLING, 0.5), revision=1)
    core.handle(OpenJobsRead((cancelled,)), 0.5)
    read = JobChecked("a", 5, "demo") if status is JobStatus.VALIDATING else JobIndexed("a", (1, 2))
    assert core.handle(read, 1.0) == [AssembleJob(cancelled, JobStatus.CANCELLED)]


def test_a_job_that_ended_is_forgotten_where_the_answer_to_its_end_was_lost() -> None:
    core, new_job = RunnerCore(64, 2), job("a")
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead((replace(new_job, status=JobStatus.FINALIZING),)), 0.0)
    core.handle(JobCommandFailed("a"), 0.0)
    assert core.held["jobs"] == 1, "it is not known whether it has ended"
    assert DropLines("a") in core.handle(OpenJobsRead(()), 1.0)
    assert core.held == {"jobs": 0, "lines": 0}


def test_a_job_that_ended_does_not_begin_again_where_a_read_from_before_its_end_comes_late() -> None:
    core, finalizing = RunnerCore(64, 2), replace(job("a"), status=JobStatus.FINALIZING)
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead((finalizing,)), 0.0)
    core.handle(JobSaved(finalizing.move(JobStatus.COMPLETED, 1.0)), 1.0)
    read_before = replace(finalizing, status=JobStatus.IN_PROGRESS)
    assert core.handle(OpenJobsRead((read_before,)), 1.1) == []
    core.handle(OpenJobsRead(()), 1.5)
    assert core.held == {"jobs": 0, "lines": 0}


def test_a_line_that_ends_again_after_its_result_was_stored_changes_nothing() -> None:
    core = RunnerCore(8, 2)
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead((replace(job("a"), status=JobStatus.IN_PROGRESS),)), 0.0)
    core.handle(JobIndexed("a", (1, 2)), 0.0)
    ended = LineEnded("a", 1, LineOutcome.DONE, result(1))
    assert core.handle(ended, 1.0) == [StoreResult("a", result(1))]
    core.handle(ResultsStored("a", (1,)), 2.0)
    assert core.handle(ended, 3.0) == []
    assert core.held == {"jobs": 1, "lines": 1}


def test_the_jobs_of_a_key_have_as_many_lines_open_as_it_allows_and_hold_up_no_others() -> None:
    core = RunnerCore(8, 2, lines_of=lambda owner: 3 if owner.startswith("ann") else 8)
    owners = {"a": "ann", "b": "ann/responses", "c": "bob"}
    jobs = tuple(replace(job(name), owner=owner, status=JobStatus.IN_PROGRESS) for name, owner in owners.items())
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead(jobs), 0.0)
    ran = Counter[str]()
    for name in owners:
        for order in core.handle(JobIndexed(name, tuple(range(1, 101))), 0.0):
            ran += Counter([order.job.caller] if isinstance(order, RunLine) else [])
    assert ran == {"ann": 3, "bob": 5}
    core.handle(LineEnded("a", 1, LineOutcome.DONE, result(1)), 1.0)
    orders = core.handle(ResultsStored("a", (1,)), 1.0)
    assert [order.job.caller for order in orders if isinstance(order, RunLine)] == ["ann"]


def test_a_blamed_line_whose_key_has_no_place_holds_up_others_less_and_less() -> None:
    """It runs alone, so that nothing opens from when it is due until all open lines have ended."""
    core = RunnerCore(8, 2)
    core.handle(LeaseTaken({("a", 1): 2}), 0.0)
    jobs = tuple(replace(job(name), owner=name, status=JobStatus.IN_PROGRESS) for name in "ab")
    core.handle(OpenJobsRead(jobs), 0.0)
    core.handle(JobIndexed("a", (1,)), 0.0)
    core.handle(JobIndexed("b", tuple(range(1, 2_001))), 0.0)
    waits, now, tried_at = list[float](), 0.0, 0.0
    while len(waits) < 8:
        now += 0.5
        for id, line in core.open_lines:
            if id == "a":
                waits.append(now - tried_at)
                tried_at = now
                core.handle(LineEnded("a", line, LineOutcome.LIMITED, retry_after_s=1.0), now)
            else:
                core.handle(LineEnded(id, line, LineOutcome.DONE, result(line)), now)
                core.handle(ResultsStored(id, (line,)), now)
        core.handle(TimerFired("tick"), now)
    assert [round(wait) for wait in waits[1:]] == [2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(("owner", "code"), [("ann", "key_revoked"), ("anonymous/responses", "key_needed")])
def test_a_job_that_no_key_has_any_more_says_why_it_is_cancelled(owner: str, code: str) -> None:
    core = RunnerCore(8, 2, lines_of=lambda _: 0)
    core.handle(LeaseTaken(), 0.0)
    (save, _) = core.handle(OpenJobsRead((replace(job("a"), owner=owner),)), 0.0)
    assert isinstance(save, SaveJob)
    assert (save.job.status, [problem.code for problem in save.job.problems]) == (JobStatus.CANCELLING, [code])


def test_a_job_whose_key_was_revoked_while_it_ended_ends_as_it_was_to() -> None:
    """Nothing of it is left to run."""
    core, ending = RunnerCore(8, 2, lines_of=lambda _: 0), replace(job("a"), status=JobStatus.FINALIZING)
    core.handle(LeaseTaken(), 0.0)
    assert AssembleJob(ending, JobStatus.COMPLETED) in core.handle(OpenJobsRead((ending,)), 0.0)


def running() -> tuple[RunnerCore, list[int]]:
    """Return a core that has begun a job of a hundred lines, and the lines that run."""
    core = RunnerCore(8, 2)
    core.handle(LeaseTaken(), 0.0)
    core.handle(OpenJobsRead((job("a"),)), 0.0)
    core.handle(JobChecked("a", 100, "demo"), 0.0)
    core.handle(JobSaved(replace(job("a"), status=JobStatus.IN_PROGRESS)), 0.0)
    orders = core.handle(JobIndexed("a", tuple(range(1, 101))), 0.0)
    ran = [order.line for order in orders if isinstance(order, RunLine)]
    assert ran == list(range(1, 9))
    return core, ran


def test_after_a_refusal_each_line_that_ends_makes_room_for_one_more() -> None:
    core, (*others, refused) = running()
    core.handle(LineEnded("a", refused, LineOutcome.REFUSED, retry_after_s=0.5), 1.0)
    for line in others:
        core.handle(LineEnded("a", line, LineOutcome.DONE, result(line)), 1.0)
    more = core.handle(ResultsStored("a", tuple(others)), 2.0)
    assert len([order for order in more if isinstance(order, RunLine)]) == 8


def test_what_cannot_be_written_holds_up_the_lines_after_it() -> None:
    core, ran = running()
    for line in ran:
        assert core.handle(LineEnded("a", line, LineOutcome.DONE, result(line)), 1.0) == [
            StoreResult("a", result(line))
        ]
    more = core.handle(ResultsStored("a", (1, 2)), 2.0)
    assert [order.line for order in more if isinstance(order, RunLine)] == [9, 10]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_is_done_is_kept_when_a_job_is_stopped(end: str) -> None:
    system = System({"a": 500})
    system.add(job("a", window_s=20))
    for _ in range(40):
        system.step()
    if end == "cancelled":
        system.cancel("a")
    system.run(until=100)
    assert system.statuses() == {"a": end}
    assert 50 < len(system.results["a"]) < 500
    assert system.now == pytest.approx(10.5 if end == "cancelled" else 20, abs=1.5)
    assert system.core.held == {"jobs": 0, "lines": 0}


def test_a_line_that_keeps_failing_ends_with_its_error_and_the_others_go_on() -> None:
    class Poisoned(System):
        def ended(self, name: str, line: int) -> None:
            outcome = LineOutcome.FAILED if line == 3 else LineOutcome.DONE
            self.told(LineEnded(name, line, outcome, result(line, is_ok=line != 3)))

    system = Poisoned({"a": 20})
    system.add(job("a"))
    system.run(until=60)
    assert system.statuses() == {"a": "completed"}
    assert Counter(run.line for run in system.ran)[3] == 3
    assert [line for line, result in system.results["a"].items() if not result.is_ok] == [3]
    tries = {LineFate.COMPLETED: 19, LineFate.RETRIED: 2, LineFate.FAILED: 1}
    assert system.core.figures(system.wall).tries == tries


def test_a_refusal_is_no_try() -> None:
    class Busy(System):
        def ended(self, name: str, line: int) -> None:
            if self.now < 100:
                return self.told(LineEnded(name, line, LineOutcome.REFUSED, retry_after_s=1.0))
            return super().ended(name, line)

    system = Busy({"a": 20})
    system.add(job("a"))
    system.run(until=300)
    assert system.statuses() == {"a": "completed"}
    assert all(result.is_ok for result in system.results["a"].values())
    assert len(system.ran) < 200  # the core asked again, but not all the time
    assert system.core.figures(system.wall).tries[LineFate.REFUSED] == len(system.ran) - 20


def test_a_job_whose_key_has_no_tokens_left_waits_for_them_and_others_go_on() -> None:
    class Limited(System):
        def ended(self, name: str, line: int) -> None:
            if name == "poor" and self.now < 100:
                return self.told(LineEnded(name, line, LineOutcome.LIMITED, retry_after_s=20.0))
            return super().ended(name, line)

    system = Limited({"poor": 20, "rich": 200})
    system.add(job("poor"))
    system.add(job("rich"))
    system.run(until=95)
    assert system.statuses() == {"poor": "in_progress", "rich": "completed"}
    assert sum(run.job.id == "poor" for run in system.ran) <= 120  # the core asked again, but not all the time
    system.run(until=300)
    assert system.statuses()["poor"] == "completed"
    assert all(result.is_ok for result in system.results["poor"].values())


def test_jobs_share_the_places_by_weight() -> None:
    system = System({"light": 2_000, "heavy": 2_000})
    system.add(job("light", window_s=100 * HOUR))
    system.add(job("heavy", window_s=100 * HOUR, weight=3.0))
    for _ in range(160):
        system.step()
    light, heavy = (len(system.results[name]) for name in ("light", "heavy"))
    assert heavy / light == pytest.approx(3, rel=0.25)


def test_windows_are_kept_and_a_job_whose_window_cannot_be_kept_says_so_early() -> None:
    """16 lines a second: 960 by the first deadline, 1,760 by the second; the third job needs four times the time that
    it has."""
    system = System({"soon": 500, "later": 700, "hopeless": 8_000})
    system.add(job("hopeless", window_s=120, weight=100.0))
    system.add(job("later", window_s=110))
    system.add(job("soon", window_s=60))
    while system.now < 15:
        system.step()
    assert system.forecasts["hopeless"].is_late
    assert not system.forecasts["soon"].is_late
    assert not system.forecasts["later"].is_late
    shown = system.core.figures(system.wall)
    assert (shown.open, shown.num_late) == ({JobStatus.IN_PROGRESS: 3}, 1)
    assert shown.deadline_s == pytest.approx(60 - system.wall)
    assert shown.num_waiting + shown.num_running + shown.tries[LineFate.COMPLETED] == 9_200
    system.run(until=200)
    assert system.statuses() == {"soon": "completed", "later": "completed", "hopeless": "expired"}
    assert len(system.results["hopeless"]) > 100
    ended = system.core.figures(system.wall)
    assert ended.ended == {JobStatus.COMPLETED: 2, JobStatus.EXPIRED: 1}
    assert (ended.open, ended.num_late, ended.deadline_s) == ({}, 0, None)


def test_windows_are_kept_where_a_line_takes_a_good_part_of_them() -> None:
    """All lines together take 83 s at 5.3 lines a second. Output before the first line has ended gives no rate,
    and a line that opens less than a line's duration before the end of the window does not finish in it."""
    system = System({"soon": 220, "middle": 110, "later": 110}, places=45, line_s=8.5)
    system.add(job("later", window_s=120, weight=5.0))
    system.add(job("middle", window_s=90))
    system.add(job("soon", window_s=60))
    system.run(until=121)
    assert system.statuses() == dict.fromkeys(("soon", "middle", "later"), "completed")


def test_where_no_line_ends_at_all_that_is_said_too() -> None:
    system = System({"a": 10}, places=0)
    system.add(job("a"))
    while system.now < 0.15 * HOUR:
        system.step()
    assert system.forecasts["a"].is_late
    assert system.forecasts["a"].finish_at is None


def test_lines_are_due_at_the_pace_that_their_job_needs() -> None:
    relaxed, hurried = (System({"a": 400}) for _ in range(2))
    relaxed.add(job("a", window_s=24 * HOUR))
    hurried.add(job("a", window_s=60))
    for system in (relaxed, hurried):
        for _ in range(20):
            system.step()
    assert min(run.jct_s for run in relaxed.ran) > 60
    assert max(run.jct_s for run in hurried.ran) < 10


def test_finished_lines_tell_how_long_the_others_will_be() -> None:
    system = System({"a": 100})
    system.add(job("a"))
    system.run(until=60)
    assert system.ran[0].estimate is None
    assert system.ran[-1].estimate == Estimate(10, 10)
    assert sum(run.estimate is None for run in system.ran) >= ENOUGH_LINES


def test_a_runner_that_loses_the_lease_drops_all_and_says_nothing_more() -> None:
    system = System({"a": 100})
    system.add(job("a"))
    for _ in range(10):
        system.step()
    system.told(LeaseLost())
    assert system.core.held == {"jobs": 0, "lines": 0}
    assert system.ends_at == {}
    num_ran = len(system.ran)
    for _ in range(10):
        system.step()
    assert len(system.ran) == num_ran
