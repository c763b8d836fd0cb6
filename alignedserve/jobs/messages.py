"""The messages between the job runner's core and its shell: events in the past tense, commands in the imperative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from alignedserve.core import Estimate
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.store.job import Forecast, Job, JobStatus, LineResult, Problem

Line: TypeAlias = tuple[str, int]  # job, number

# --- Events


@dataclass(frozen=True)
class LeaseTaken:
    """The event that this job runner has become the active one.

    `blame` is that of the lines that were open when one died (open_lines.py)."""

    blame: Mapping[Line, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LeaseLost:
    """The event that another job runner is the active one, or that this cannot be known."""


@dataclass(frozen=True)
class OpenJobsRead:
    """The store was read for all open jobs, and for the owners of those that run."""

    jobs: tuple[Job, ...]
    full: frozenset[str] = frozenset()  # owners that have more bytes than their quota


@dataclass(frozen=True)
class JobChecked:
    """A CheckJob has ended, with the number of lines and the model, or with the problems."""

    job: str
    total: int
    model: str | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class JobIndexed:
    """An IndexJob has ended, with the lines that have no result, in their order."""

    job: str
    lines: Sequence[int]


@dataclass(frozen=True)
class JobSaved:
    """A SaveJob or an AssembleJob has ended."""

    job: Job


@dataclass(frozen=True)
class JobCommandFailed:
    """A command for this job had no effect: the job was changed meanwhile, or a file or the store cannot be used now.

    The state in which the job is read next decides what to do."""

    job: str


@dataclass(frozen=True)
class LineRuns:
    """The line has a second token, and so a place on a decode worker."""

    job: str
    line: int


class LineOutcome(Enum):
    DONE = "done"  # answered, perhaps with an error that another try would meet again
    FAILED = "failed"  # another try may succeed
    REFUSED = "refused"  # there was no room, so the line was not tried
    LIMITED = "limited"  # the key has no place or too few tokens left now, so the line was not tried


@dataclass(frozen=True)
class LineEnded:
    job: str
    line: int
    outcome: LineOutcome
    result: LineResult | None = None  # to be stored if this was the last try; None if the line was not tried
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class ResultsStored:
    """The results of these lines are in the store."""

    job: str
    lines: tuple[int, ...]


JobEvent: TypeAlias = (
    LeaseTaken
    | LeaseLost
    | OpenJobsRead
    | JobChecked
    | JobIndexed
    | JobSaved
    | JobCommandFailed
    | LineRuns
    | LineEnded
    | ResultsStored
    | TimerFired
)

# --- Commands


@dataclass(frozen=True)
class CheckJob:
    """Check whether the job's file is valid. `JobChecked` answers."""

    job: Job


@dataclass(frozen=True)
class IndexJob:
    """Find the places of the lines without a result in the job's file. `JobIndexed` answers."""

    job: Job


@dataclass(frozen=True)
class SaveJob:
    """Save the job in place of the revision that it was made from. `JobSaved` answers."""

    job: Job


@dataclass(frozen=True)
class RunLine:
    """Run the line. `LineEnded` answers, unless a DropLines follows."""

    job: Job
    line: int
    jct_s: float
    estimate: Estimate | None
    is_given_up: bool = False  # whether the line has ended the job runner, and fails instead


@dataclass(frozen=True)
class DropLines:
    """Stop the job's running lines; their results are not wanted."""

    job: str


@dataclass(frozen=True)
class StoreResult:
    """Write the line's result into the store. `ResultsStored` answers."""

    job: str
    result: LineResult


@dataclass(frozen=True)
class AssembleJob:
    """Make the job's files from its results, and end the job with this status. `JobSaved` answers."""

    job: Job
    status: JobStatus


@dataclass(frozen=True)
class PublishForecasts:
    """Write the jobs' forecasts into the store, where clients can see them."""

    forecasts: Mapping[str, Forecast]  # job -> its forecast


JobCommand: TypeAlias = (
    CheckJob | IndexJob | SaveJob | RunLine | DropLines | StoreResult | AssembleJob | PublishForecasts | SetTimer
)
