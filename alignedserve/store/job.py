"""A batch job, from what a user submitted to the files with its results. Only the standard library is imported here.

    VALIDATING ─┬─▶ IN_PROGRESS ─┬─▶ FINALIZING ─▶ COMPLETED
                ├─▶ FAILED       ├─▶ EXPIRED            its window is over: what was done is kept
                └────────────────┴─▶ CANCELLING ─▶ CANCELLED    the same

FAILED, COMPLETED, EXPIRED and CANCELLED are the end. Files are named in the same move that ends a job, so whoever sees
their ids can download them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any


class Status(str, Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_NEXT: Mapping[Status, tuple[Status, ...]] = MappingProxyType(
    {
        Status.VALIDATING: (Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING, Status.EXPIRED),
        Status.IN_PROGRESS: (Status.FINALIZING, Status.EXPIRED, Status.CANCELLING),
        Status.FINALIZING: (Status.COMPLETED,),
        Status.CANCELLING: (Status.CANCELLED,),
    }
)
OPEN = frozenset(_NEXT)  # the job runner has something to do for these


class Endpoint(str, Enum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Problem:
    """Why a job failed, and in which line of its file, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class Counts:
    """Of the lines that have a result."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True)
class LineResult:
    """What came of one line: a line of the output file, or of the error file."""

    line: int  # of the input file, counted from 1
    is_ok: bool
    text: str  # JSON, without the end of the line
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def counts(self) -> Counts:
        completed = int(self.is_ok)
        return Counts(completed, 1 - completed, self.input_tokens, self.cached_tokens, self.output_tokens)


@dataclass(frozen=True)
class Forecast:
    """How a job gets on, as the job runner tells it now and then."""

    at: float  # when it was told
    tokens_per_s: float = 0.0  # of its own lines
    finish_at: float | None = None  # None: not known yet
    is_late: bool = False  # it will not be through before its window ends


@dataclass(frozen=True)
class Job:
    """What is kept of a job. Instants are whole seconds since 1970."""

    id: str
    owner: str  # the key that submitted it; nobody else sees it
    input_file_id: str
    endpoint: Endpoint
    window: str  # as it was written: 24h
    created_at: int
    expires_at: int  # created_at + window: the deadline of its lines
    status: Status = Status.VALIDATING
    weight: float = 1.0
    salt: str = ""  # of the key: its lines share KV with what that key asks elsewhere, and with nobody else
    output_lives_s: int | None = None  # the files with its results; None: as long as is usual
    metadata: dict[str, str] | None = None
    model: str | None = None  # of its first line, once it is valid
    total: int = 0  # lines, once it is valid
    counts: Counts = field(default_factory=Counts)  # final once it has ended; until then the store knows more
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
    kept_until: int | None = None  # once it has ended; then nobody sees it any more
    revision: int = 0  # how often it was changed

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def is_kept(self, now: float) -> bool:
        return self.kept_until is None or self.kept_until > now

    def moved(self, to: Status, at: float, **changes: Any) -> Job:
        """In its next state, with the instant noted."""
        if to not in _NEXT.get(self.status, ()):
            raise ValueError(f"{self.id} cannot become {to.value}: it is {self.status.value}")
        noted: dict[str, Any] = {f"{to.value}_at": int(at)}
        return replace(self, status=to, **noted, **changes)

    def to_tree(self) -> dict[str, Any]:
        return asdict(self) | {"endpoint": self.endpoint.value, "status": self.status.value}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Job:
        parts = {
            "endpoint": Endpoint(tree["endpoint"]),
            "status": Status(tree["status"]),
            "counts": Counts(**tree["counts"]),
            "problems": tuple(Problem(**one) for one in tree["problems"]),
        }
        return cls(**{**tree, **parts})
