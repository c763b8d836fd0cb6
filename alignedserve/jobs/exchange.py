"""What passes between the job runner's core and its shell: facts in the past tense, orders in the imperative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from alignedserve.core import Estimate
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.store.job import Forecast, Job, LineResult, Problem, Status

# --- Facts


@dataclass(frozen=True)
class LeaseTaken:
    """From now on this runner is the active one."""


@dataclass(frozen=True)
class LeaseLost:
    """Another one is, or nobody can tell."""


@dataclass(frozen=True)
class Found:
    """All jobs that are open, as the store has them."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Checked:
    """A Check has ended: the number of lines and the model, or the problems."""

    job: str
    total: int
    model: str | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Indexed:
    """An Index has ended: the lines that have no result, in their order."""

    job: str
    lines: Sequence[int]


@dataclass(frozen=True)
class Saved:
    """A Save or an Assemble has ended."""

    job: Job


@dataclass(frozen=True)
class Undone:
    """An order for this job came to nothing: it was changed meanwhile, or something cannot be read or written now. What
    is to be done follows from how it is found next."""

    job: str


@dataclass(frozen=True)
class LineRuns:
    """It has its second token."""

    job: str
    line: int


class Outcome(Enum):
    DONE = "done"  # answered, also with an error that another try would meet again
    FAILED = "failed"  # another try may fare better
    REFUSED = "refused"  # no room: it was not tried at all


@dataclass(frozen=True)
class LineEnded:
    job: str
    line: int
    outcome: Outcome
    result: LineResult | None = None  # to be kept if this was its last try; None where it was not tried
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Kept:
    """The results of these lines are in the store."""

    job: str
    lines: tuple[int, ...]


Fact: TypeAlias = (
    LeaseTaken | LeaseLost | Found | Checked | Indexed | Saved | Undone | LineRuns | LineEnded | Kept | TimerFired
)

# --- Orders


@dataclass(frozen=True)
class Check:
    """Is the job's file valid? `Checked` answers."""

    job: Job


@dataclass(frozen=True)
class Index:
    """Find where the lines of its file are that have no result. `Indexed` answers."""

    job: Job


@dataclass(frozen=True)
class Save:
    """In the store, in place of the revision that it was made from. `Saved` answers."""

    job: Job


@dataclass(frozen=True)
class Run:
    """Ask for the line's tokens. `LineEnded` answers, in every case but after a Drop."""

    job: Job
    line: int
    jct_s: float
    estimate: Estimate | None


@dataclass(frozen=True)
class Drop:
    """Nothing that still comes of the job's lines is wanted."""

    job: str


@dataclass(frozen=True)
class Keep:
    """The line's result, in the store. `Kept` answers."""

    job: str
    result: LineResult


@dataclass(frozen=True)
class Assemble:
    """Make the job's files of its results, and end it with this status. `Saved` answers."""

    job: Job
    status: Status


@dataclass(frozen=True)
class Tell:
    """Whoever looks at the jobs: how each gets on."""

    forecasts: Mapping[str, Forecast]  # by job


Order: TypeAlias = Check | Index | Save | Run | Drop | Keep | Assemble | Tell | SetTimer
