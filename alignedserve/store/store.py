"""What the gateway and the job runner need of a store, whichever it is.

Every method returns once what it wrote is as durable as the store makes it (`about` says how durable that is), or
raises StoreError. A record belongs to an owner, and nobody else can read it by its id.

The job runner that has the **lease** is the active one. Its number rises with each new holder, and what the runner
writes carries it: a runner that was frozen while another took over is Fenced, however late it wakes up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from alignedserve.errors import AlignedServeError
from alignedserve.store.job import Counts, Forecast, Job, LineResult


class Purpose(str, Enum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True)
class StoredFile:
    """A file but for its bytes, which are in `blobs` under its id."""

    id: str
    owner: str
    filename: str
    bytes: int
    purpose: Purpose
    created_at: int
    expires_at: int | None = None

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def to_tree(self) -> dict[str, Any]:
        return asdict(self) | {"purpose": self.purpose.value}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> StoredFile:
        return cls(**(tree | {"purpose": Purpose(tree["purpose"])}))


@dataclass(frozen=True)
class Page:
    """Which part of a list is asked for."""

    limit: int = 20
    after: str | None = None  # the id before the first
    newest_first: bool = True


Record = TypeVar("Record", StoredFile, Job)


@dataclass(frozen=True)
class Listing(Generic[Record]):
    records: tuple[Record, ...]
    has_more: bool


@dataclass(frozen=True)
class Taken:
    """What an owner has, or may have."""

    files: int = 0
    bytes: int = 0
    open_jobs: int = 0


class OverQuota(AlignedServeError):
    """`taken` is what the owner has."""

    def __init__(self, taken: Taken) -> None:
        super().__init__(f"{taken} is all that this owner may have")
        self.taken = taken


@dataclass(frozen=True)
class About:
    """What a store is, and what its writes survive, in plain words."""

    kind: str
    version: str
    schema: int
    guarantees: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holder:
    """A process, and which of its lives: whatever an earlier one held or had begun is nobody's any more."""

    name: str
    life: int


class Store(Protocol):
    async def close(self) -> None: ...

    async def about(self) -> About: ...

    # --- Files

    async def begin_file(self, id: str, holder: Holder, now: float) -> None:
        """Its bytes are about to be written: noted until the file is there, or they are forgotten."""

    async def forget_file(self, id: str) -> None:
        """It was begun or removed, and its bytes are gone."""

    async def orphans(self, holder: Holder, before: float) -> Sequence[str]:
        """What an earlier life of the holder has begun, or anybody `before`, and never became a file; and what was
        removed, by anybody, whose bytes may still be there."""

    async def add_file(self, file: StoredFile, most: Taken | None = None) -> None:
        """OverQuota where its owner would then have more than this. A file that is there already is added once."""

    async def file(self, owner: str, id: str) -> StoredFile | None: ...

    async def files(
        self, owner: str, page: Page, purpose: Purpose | None = None, now: float = 0.0
    ) -> Listing[StoredFile] | None:
        """Those that have not expired by now. None: the file that it is to begin after does not exist."""

    async def remove_file(self, owner: str, id: str) -> bool:
        """Whether it was there. From the same move on it is noted as one whose bytes are to go."""

    async def expired_files(self, now: float) -> Sequence[StoredFile]: ...

    async def taken(self, owner: str) -> Taken: ...

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        """OverQuota where so many of its owner are open already."""

    async def job(self, owner: str, id: str) -> Job | None: ...

    async def jobs(self, owner: str, page: Page, now: float = 0.0) -> Listing[Job] | None:
        """Those that are kept still. None: the job that it is to begin after does not exist."""

    async def forget_jobs(self, now: float) -> None:
        """Those that are kept no longer."""

    async def open_jobs(self) -> Sequence[Job]:
        """Of all owners, in the order in which they came."""

    async def save_job(self, job: Job, fence: int | None = None, files: Sequence[StoredFile] = ()) -> Job:
        """In place of the revision that it was made from, together with files that are new; what is there then.

        With a job that has ended, the results of its lines go: its files have them. Conflict where it was changed
        meanwhile. Without a fence it is a gateway that writes.
        """

    # --- Lines

    async def add_results(self, job: str, results: Sequence[LineResult], fence: int) -> int:
        """Those of lines that have none yet; how many these were."""

    def results(self, job: str) -> AsyncIterator[LineResult]:
        """In the order of the lines."""

    async def done(self, job: str) -> frozenset[int]:
        """The lines that have a result."""

    async def counts(self, job: str) -> Counts: ...

    async def set_forecasts(self, forecasts: Mapping[str, Forecast]) -> None:
        """By job."""

    async def forecast(self, job: str) -> Forecast | None: ...

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        """Take or renew it; its number, or None where another holder has it."""

    async def release(self, holder: Holder) -> None: ...

    # --- For whoever looks after it

    async def faults(self) -> Sequence[str]:
        """What in it is damaged or does not fit together."""

    def everything(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """All records of all owners: (file, job or result; what is kept of it)."""
