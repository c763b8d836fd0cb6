"""What a worker knows of a request only while the request comes from elsewhere, or leaves for another worker.

While KV is copied to blocks, or read there, nothing else is written to these blocks: the request is in no step, and
keeps the blocks until the copy has ended, wanted or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from alignedserve.core import Entry
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Attempt, Member, Offer, Pull
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


@dataclass(eq=False)
class JoinCandidate:
    """A request that waits to join the decoding requests, or with KV on the way here."""

    running: WorkerRequest
    came: Entry  # from the pool or from another worker; with the pages, where the KV is in the pool
    source: Member | None  # the worker that has the KV; None where the pool has it
    due_at: float  # the next token
    since: float
    is_pinned: bool = False
    batch: int = 0  # the tag of the candidate batch; 0 of a candidate request
    found_for: int = 0  # the running batch, of about this length, that the pool found the candidate for
    partner: Member | None = None  # the worker that is to hold the KV for this worker; once it does, also the source
    is_refused: bool = False  # the partner had no room for the KV
    awaits_syntax: bool = False  # the syntax is being compiled: a step with the request would wait
    is_evicted: bool = False  # the request had to leave this worker; the source alone has the KV
    transfer: tuple[str, int] | None = None  # that writes to the blocks: holder of the source, number

    @property
    def is_rt(self) -> bool:
        return self.running.promise.is_rt

    @property
    def is_copied(self) -> bool:
        """Return whether the partner's KV is, or is to be, a copy of what the pool has."""
        return self.partner is not None and not self.is_evicted

    @property
    def key(self) -> Attempt:
        return self.running.key

    @property
    def entry(self) -> Entry:
        """Return the request as it came, with the newest estimate."""
        return replace(self.came, request=self.running.request)

    @property
    def pull(self) -> Command:
        """Ask the source for the KV."""
        assert self.source is not None, "the KV comes from another worker"
        assert self.transfer is not None, "the KV comes from another worker"
        return Send(self.source.name, Pull(self.transfer[1], *self.key))


@dataclass(eq=False)
class Departure:
    """A request that is to leave with its KV for another worker, and to go on there."""

    goes_on_there = True  # else the request comes back

    running: WorkerRequest  # with blocks
    to: Member
    number: int | None = None  # of the transfer, once pulled
    waits_there: bool = False  # for room, perhaps long: there is no other way, and no decline
    is_declined: bool = False  # by that worker, while a transfer still reads the blocks

    @property
    def entry(self) -> Entry:
        return self.running.entry((), self.running.names)

    @property
    def ask(self) -> Command:
        """Ask the other worker to pull the KV."""
        return Send(self.to.name, Offer(self.entry, not self.waits_there))

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.DEPARTING
