"""The interface of a store to the gateway and the job runner.

Every method returns when its writes are as durable as the store makes them (`describe` says how durable that is), or
raises StoreError. A record belongs to an owner; other owners cannot read it by its id.

The job runner that has the **lease** is the active job runner. The lease's number rises with each new holder, and the
runner's writes carry it. So a runner that was frozen while another took over is Fenced, however late it wakes up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from alignedserve.errors import AlignedServeError, StoreUnfit
from alignedserve.store.job import Forecast, Job, LineCounts, LineResult

MOST_TOGETHER = 16 << 20  # characters of results that are read or written together, where one result has not more


class Purpose(str, Enum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True)
class StoredFile:
    """A file without its bytes, which `blobs` has under its id."""

    id: str
    owner: str
    filename: str
    bytes: int
    purpose: Purpose
    created_at: int
    expires_at: int | None = None

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True)
class ListPage:
    """The part of a list that a client asks for."""

    limit: int = 20
    after: str | None = None  # the page begins after the record with this id
    newest_first: bool = True


Record = TypeVar("Record", StoredFile, Job)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Listing(Generic[Record]):
    records: tuple[Record, ...]
    has_more: bool
    num_passed: int = 0  # records that this process read and left out


@dataclass(frozen=True)
class OwnerUsage:
    """The amounts that an owner has in the store, or may have at most."""

    files: int = 0
    bytes: int = 0  # of files, and of the results of open jobs, which become files
    open_jobs: int = 0


class OverQuota(AlignedServeError):
    """An owner would have more than its quota; `usage` is what it has now."""

    def __init__(self, usage: OwnerUsage) -> None:
        super().__init__(f"this owner has {usage} and may not have more")
        self.usage = usage


@dataclass(frozen=True)
class StoreDescription:
    """A store's kind and version, and what its writes survive, in plain words."""

    kind: str
    version: str
    schema: int
    guarantees: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def check_schema(where: object, found: int, known: int) -> None:
    """Raise StoreUnfit where a later version has changed the store."""
    if found > known:
        what = f"{where} has schema {found}, this AlignedServe knows up to {known}"
        raise StoreUnfit(
            f"{what}: serve with a later version, or name another store with --jobs-directory or --jobs-store"
        )


@dataclass(frozen=True)
class Holder:
    """A process in one of its lives: its earlier lives hold nothing any more."""

    name: str
    life: int
    model: str = ""  # that its deployment serves
    keys: str = ""  # a digest of the names of its deployment's keys


@dataclass(frozen=True)
class LastLease:
    """The lease as its last holder took it."""

    model: str  # that its deployment serves
    holder: str | None  # None: nobody holds it now
    keys: str = ""  # a digest of the names of its deployment's keys


class Store(Protocol):
    async def close(self) -> None: ...

    async def describe(self) -> StoreDescription: ...

    # --- Files

    async def begin_file(self, id: str, holder: Holder, now: float) -> None:
        """List the file as begun, before its bytes are written, until it is added or forgotten."""

    async def forget_file(self, id: str) -> None:
        """Unlist a file that was begun or removed, when its bytes are gone."""

    async def orphans(self, holder: Holder, before: float) -> Sequence[str]:
        """Return the listed files whose bytes may be removed.

        They were begun by an earlier life of the holder, or by any process before this instant, and never added; or
        they were removed, by any process, and their bytes may still be there."""

    async def add_file(self, file: StoredFile, quota: OwnerUsage | None = None) -> None:
        """Add a file, unless it is there already; raise OverQuota if its owner would have more than the quota."""

    async def file(self, owner: str, id: str) -> StoredFile | None: ...

    async def files(
        self, owner: str, page: ListPage, purpose: Purpose | None = None, now: float = 0.0
    ) -> Listing[StoredFile] | None:
        """Return the owner's files that have not expired; None if the page begins after a file that does not exist."""

    async def remove_file(self, owner: str, id: str) -> bool:
        """Remove the file and list it as one whose bytes must go; return whether the file was there."""

    async def expired_files(self, now: float) -> Sequence[StoredFile]: ...

    async def usage(self, owner: str) -> OwnerUsage: ...

    # --- Jobs

    async def add_job(self, job: Job, most_open: int | None = None) -> None:
        """Add a job; raise OverQuota if its owner already has `most_open` open jobs."""

    async def job(self, owner: str, id: str) -> Job | None: ...

    async def jobs(self, owner: str, page: ListPage, now: float = 0.0) -> Listing[Job] | None:
        """Return the owner's jobs that are still kept; None if the page begins after a job that does not exist."""

    async def forget_jobs(self, now: float) -> None:
        """Delete the jobs that are no longer kept."""

    async def open_jobs(self, owner: str | None = None) -> Sequence[Job]:
        """Return the open jobs of all owners, or of one, in order of their submission."""

    async def ended_jobs(self, most: int) -> Sequence[Job]:
        """Return the jobs of all owners that ended last and are still kept, the last one first."""

    async def save_job(self, job: Job, fence: int | None = None, files: Sequence[StoredFile] = ()) -> Job:
        """Save a job in place of the revision that it was made from, and add its new files; return the saved job.

        When a job has ended, the results of its lines are deleted, since its files have them. Raise Conflict if the
        job was changed meanwhile. A job runner gives the number of its lease as the fence; a gateway gives none.
        """

    # --- Lines

    async def add_results(self, job: str, results: Sequence[LineResult], fence: int) -> int:
        """Add the results of lines that have none yet; return how many were added."""

    def results(self, job: str) -> AsyncIterator[LineResult]:
        """Yield the results in the order of the lines."""

    async def done_lines(self, job: str) -> frozenset[int]:
        """Return the lines that have a result."""

    async def counts(self, job: str) -> LineCounts: ...

    async def set_forecasts(self, forecasts: Mapping[str, Forecast]) -> None:
        """Save the forecasts: job -> its forecast."""

    async def forecast(self, job: str) -> Forecast | None: ...

    # --- Responses

    async def add_response(self, response: StoredResponse, most_bytes: int) -> None:
        """Add a response; the oldest of its owner go, so that all together have at most `most_bytes`."""

    async def save_response(self, response: StoredResponse) -> bool:
        """Save a response that has changed, unless it was removed; return whether it was there."""

    async def response(self, owner: str, id: str) -> StoredResponse | None: ...

    async def remove_response(self, owner: str, id: str) -> bool:
        """Remove a response; return whether it was there."""

    async def forget_responses(self, now: float) -> None:
        """Delete the responses that have expired."""

    # --- The lease

    async def lease(self, holder: Holder, for_s: float) -> int | None:
        """Take or renew the lease; return its number, or None if another holder has it."""

    async def release(self, holder: Holder) -> None: ...

    async def last_lease(self) -> LastLease | None:
        """Return the lease; None if nobody has taken it yet."""

    # --- For operators

    async def find_faults(self) -> Sequence[str]:
        """Return what is damaged or inconsistent in the store."""

    def records(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield all records of all owners: the kind (file, job or result) and the record."""


@dataclass(frozen=True)
class StoredResponse:
    """A response with the input that it answers. Instants are whole seconds since 1970.

    What may have megabytes stays JSON as written: to decode an answer with log-probabilities takes seconds, in which
    nothing else runs, and six times the memory."""

    id: str
    owner: str  # the id of the key that asked for it; other keys do not see it
    created_at: int
    expires_at: int
    input: list[msgspec.Raw]  # the items of its own turn
    answer: msgspec.Raw  # as clients see it
    previous: str | None = None  # the response that it continues
    job: str | None = None  # the job that makes it in the background
    seen: list[msgspec.Raw] | None = None  # its output; None: written by a version before, and read from the answer

    @property
    def status(self) -> str:
        return _field(self.answer, "status", str)

    @property
    def output(self) -> list[msgspec.Raw]:
        """The items of the answer as models see them: without log-probabilities."""
        if self.seen is not None:
            return self.seen
        return seen_items(_field(self.answer, "output", list[dict[str, msgspec.Raw]]))

    @property
    def items(self) -> list[msgspec.Raw]:
        """The items of its turn, as later turns of the conversation see them."""
        return [*self.input, *self.output]

    def with_answer(self, fields: dict[str, Any]) -> StoredResponse:
        """Return the response with these fields of its answer changed."""
        answer = msgspec.json.decode(self.answer, type=dict[str, msgspec.Raw]) | fields
        seen = seen_items(fields["output"]) if "output" in fields else self.seen
        return replace(self, answer=msgspec.Raw(msgspec.json.encode(answer)), seen=seen)

    def has_expired(self, now: float) -> bool:
        return self.expires_at <= now


def _field(tree: msgspec.Raw, name: str, kind: type[Value]) -> Value:
    """Return a field of an object in JSON, and decode nothing else."""
    return msgspec.json.decode(msgspec.json.decode(tree, type=dict[str, msgspec.Raw])[name], type=kind)


def seen_items(items: Sequence[Mapping[str, Any]]) -> list[msgspec.Raw]:
    """Return the items of an answer as models see them: without log-probabilities, which may have megabytes."""
    return [msgspec.Raw(msgspec.json.encode(_without_logprobs(item))) for item in items]


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = item.get("content")
    if isinstance(parts, msgspec.Raw):
        parts = msgspec.json.decode(parts, type=list[dict[str, msgspec.Raw]])
    if not isinstance(parts, list):
        return item
    return {**item, "content": [{name: part[name] for name in part if name != "logprobs"} for part in parts]}
