"""Check the job runner while it runs. At every event that its core hears, and at every command:

- a line runs once at a time, and not again after its answer, nor when the store has its result;
- no line of a job runs that has ended, or after the runner has read that the job is cancelled;
- when a job ends, none of its lines runs, and then no request is left.

At the end (simulator/job_runner.py): every job has ended, every line has one result, which is its own answer unless the
job was cancelled or its window was over, and the runner holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from alignedserve.jobs.messages import (
    AssembleJob,
    DropLines,
    JobCommand,
    JobEvent,
    JobSaved,
    LeaseLost,
    LineEnded,
    LineOutcome,
    OpenJobsRead,
    RunLine,
)
from alignedserve.store.job import JobStatus

_Line = tuple[str, int]


class JobStates(Protocol):
    """Tells what the store has of jobs, and which requests of lines are open."""

    def is_open(self, job: str, /) -> bool: ...

    def has_result(self, job: str, line: int, /) -> bool: ...

    def open_lines(self, job: str, /) -> list[str]: ...


class JobRules:
    """Watches the lives of the job runner; `breaks` is called with what is wrong."""

    def __init__(self, breaks: Callable[[str], None]) -> None:
        self._breaks = breaks
        self.begins_life()

    def begins_life(self) -> None:
        self._running: set[_Line] = set()
        self._answered: set[_Line] = set()
        self._cancelled: set[str] = set()

    def told(self, event: JobEvent, states: JobStates) -> None:
        match event:
            case OpenJobsRead(jobs):
                self._cancelled |= {job.id for job in jobs if job.status is JobStatus.CANCELLING}
            case LineEnded(job, line, outcome):
                self._running.discard((job, line))
                if outcome is LineOutcome.DONE:
                    self._answered.add((job, line))
            case LeaseLost():
                self._answered.clear()  # their results were not written, and are no longer wanted
            case JobSaved(job) if not job.is_open and (left := states.open_lines(job.id)):
                self._breaks(f"{job.id} has ended, and {left} run on")

    def ordered(self, command: JobCommand, states: JobStates) -> None:
        match command:
            case RunLine(job, line):
                if why := self._why_not(job.id, line, states):
                    self._breaks(f"line {line} of {job.id} runs, but {why}")
                self._running.add((job.id, line))
            case AssembleJob(job) if left := [line for other, line in self._running if other == job.id]:
                self._breaks(f"{job.id} ends, and its lines {sorted(left)} run on")
            case DropLines(job):
                self._running = {(other, line) for other, line in self._running if other != job}

    def _why_not(self, job: str, line: int, states: JobStates) -> str:
        reasons = {
            "it is running": (job, line) in self._running,
            "it has its answer": (job, line) in self._answered,
            "it has a result": states.has_result(job, line),
            "the job has ended": not states.is_open(job),
            "the job is cancelled": job in self._cancelled,
        }
        return next((why for why, holds in reasons.items() if holds), "")
