"""A batch job, from what a user submitted to the files with its results. Only the standard library is imported here.

    VALIDATING ─┬─▶ IN_PROGRESS ─┬─▶ FINALIZING ─▶ COMPLETED
                ├─▶ FAILED       ├─▶ EXPIRED                    its window is over: results so far are kept
                └────────────────┴─▶ CANCELLING ─▶ CANCELLED    results so far are kept

FAILED, COMPLETED, EXPIRED and CANCELLED are final. The move that ends a job also names its files, so a client that
sees the ids of the files can download them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any


class JobStatus(str, Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_NEXT: Mapping[JobStatus, tuple[JobStatus, ...]] = MappingProxyType(
    {
        JobStatus.VALIDATING: (JobStatus.IN_PROGRESS, JobStatus.FAILED, JobStatus.CANCELLING, JobStatus.EXPIRED),
        JobStatus.IN_PROGRESS: (JobStatus.FINALIZING, JobStatus.EXPIRED, JobStatus.CANCELLING),
        JobStatus.FINALIZING: (JobStatus.COMPLETED,),
        JobStatus.CANCELLING: (JobStatus.CANCELLED,),
    }
)
OPEN = frozenset(_NEXT)  # states of jobs for which the job runner has work to do
RESPONSES = "/responses"  # no key's name ends so: the jobs of a key's responses belong to an owner of their own


class Endpoint(str, Enum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Problem:
    """The reason why a job failed, and the line of its file, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class LineCounts:
    """Counts of a job's lines that have a result, of their tokens, and of what their answers used."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input tokens, those whose KV the pool had
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output tokens
    device_us: int = 0  # of workers' time
    millijoules: int = 0
    modelled_mj: int = 0  # of the millijoules, those that no counter told

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def __add__(self, other: LineCounts) -> LineCounts:
        names = (each.name for each in fields(LineCounts))
        return LineCounts(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class LineResult:
    """The result of a line, as a line of the output file or of the error file."""

    line: int  # its number in the input file, counted from 1
    is_ok: bool
    text: str  # JSON, without the end of the line
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    device_us: int = 0
    millijoules: int = 0
    modelled_mj: int = 0

    @property
    def counts(self) -> LineCounts:
        completed = int(self.is_ok)
        tokens = self.input_tokens, self.cached_tokens, self.output_tokens, self.reasoning_tokens
        return LineCounts(completed, 1 - completed, *tokens, self.device_us, self.millijoules, self.modelled_mj)


@dataclass(frozen=True)
class Forecast:
    """A job's speed and expected end, which the job runner publishes every few seconds."""

    at: float  # when the forecast was made
    tokens_per_s: float = 0.0  # of the job's own lines
    finish_at: float | None = None  # None: not known yet
    is_late: bool = False  # whether the job is expected to end after its window


@dataclass(frozen=True)
class Job:
    """A job as the store keeps it. Instants are whole seconds since 1970."""

    id: str
    owner: str  # the key that submitted it, or the owner of its responses; others do not see the job
    input_file_id: str
    endpoint: Endpoint
    window: str  # as the client wrote it, such as 24h
    created_at: int
    expires_at: int  # created_at + window: the deadline of its lines
    status: JobStatus = JobStatus.VALIDATING
    weight: float = 1.0
    salt: str = ""  # of the key: lines share KV with requests of the same key only
    output_lives_s: int | None = None  # how long the files with its results are kept; None: the usual time
    metadata: dict[str, str] | None = None
    model: str | None = None  # of its first line, once the file is checked
    total: int = 0  # number of lines, once the file is checked
    counts: LineCounts = field(default_factory=LineCounts)  # set when the job ends; until then the store counts
    problems: tuple[Problem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    kept_until: int | None = None  # set when the job ends; after this instant the job is no longer shown
    revision: int = 0  # the number of changes so far

    @property
    def caller(self) -> str:
        """Return the id of the key that submitted it."""
        return self.owner.removesuffix(RESPONSES)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def is_kept(self, now: float) -> bool:
        return self.kept_until is None or self.kept_until > now

    def move(self, to: JobStatus, at: float, **changes: Any) -> Job:
        """Return the job in its next state, with the instant of the move."""
        if to not in _NEXT.get(self.status, ()):
            raise ValueError(f"{self.id} cannot become {to.value}: it is {self.status.value}")
        instant: dict[str, Any] = {f"{to.value}_at": int(at)}
        return replace(self, status=to, **instant, **changes)
