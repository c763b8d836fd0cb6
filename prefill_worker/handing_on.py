"""Prompts that have run: each goes to the pool, or is offered to a decode worker where no pool is of use.

    through ─┬─ waits for pages ── pages at hand ──▶ copied ──▶ Commit
             └─ Offer ──▶ departing (worker/offering.py) ──▶ gone
                             └── Decline, or the decode worker is lost ──▶ as if never offered

A prompt is written to pages of the pool and committed; the Commit names the decode worker, since the pool pins
requests that cannot wait. No pool is of use to a node without decode workers, nor where the policy has KV stay on its
device until a decode worker pulls it (DistServe §4.3): there all prompts are offered, and wait on this device until a
decode worker has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import MemberJoined, MemberLost
from alignedserve.protocol.messages import Attempt, Commit, Member, Release
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.arriving import PromptQueue
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import Notes, WorkerLog
from alignedserve.worker.offering import Departure, Departures, Offering
from alignedserve.worker.owners import Owners
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class Peers:
    """The decode workers that KV can be sent to directly."""

    def __init__(self, departures: Departures) -> None:
        self._departures = departures
        self._all: dict[str, Member] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def meet(self, peer: Member) -> None:
        self._all[peer.name] = peer

    def lose(self, peer: Member) -> None:
        self._all.pop(peer.name, None)

    def get(self, name: str) -> Member | None:
        return self._all.get(name)

    def has_one_on(self, node: str) -> bool:
        return any(peer.node == node for peer in self._all.values())

    def any(self, before: str = "") -> Member | None:
        """Return the decode worker to which least is offered, if any; `before` only where there is no other."""
        offered = Counter(departure.to.name for departure in self._departures.wanted)
        peers = self._all.values()
        return min(peers, key=lambda peer: (peer.name == before, offered[peer.name], peer.name), default=None)


class KnownPages:
    """Releases the pages that the pool keeps for prompts of this worker because other prompts began alike."""

    def __init__(self, pool: PoolLink, notes: Notes) -> None:
        self._pool, self._notes = pool, notes

    def release(self, attempt: Attempt, pages: tuple[int, ...]) -> list[Command]:
        """Tell the pool that it need not keep these pages for this attempt."""
        return self.let_go(attempt) if pages else []

    def let_go(self, attempt: Attempt) -> list[Command]:
        """Tell the pool that it need not keep any page for this attempt."""
        return self._pool.send(Release(*attempt))

    def leave(self, running: WorkerRequest) -> list[Command]:
        """Release the pages of a prompt that is dropped: from now on there is less to run."""
        self._notes.has_less_to_run = True
        return self.release(running.key, running.known)


class PromptRequests(Requests):
    """The requests on a prefill worker, with what belongs to some states."""

    queue: PromptQueue  # prompts that wait for a seat

    def __init__(self, pool: PoolLink, notes: Notes) -> None:
        super().__init__()
        self.departures, self.known = Departures(), KnownPages(pool, notes)
        self.peers = Peers(self.departures)


class Commits(CorePart):
    """Prompts that go to the pool: they wait for pages, are copied, and are committed."""

    def __init__(
        self, here: PromptRequests, memory: DeviceMemory, pool: PoolLink, log: WorkerLog, owners: Owners
    ) -> None:
        self._here, self._pool, self._memory, self._writer = here, pool, memory, pool.writer
        self._names, self._reuse, self._outputs = pool.writer.names, memory.pace.policy.reuse, owners.outputs
        self._known, self._decisions = here.known, log.decisions

    @property
    def waiting(self) -> Collection[WorkerRequest]:
        """Return the prompts that are through and wait for pages."""
        return self._here.among(State.THROUGH)

    @property
    def target(self) -> Member | None:
        """Return the pool that may be written to now."""
        return self._writer.target(self._pool.member)

    def add(self, running: WorkerRequest) -> None:
        """Let a prompt that is through wait for pages."""
        self._decisions.note(Kind.WRITES, running.request, tokens=running.prefix, number=len(self.waiting))
        self._here.move(running, State.THROUGH)

    def first(self, service: ServiceClass) -> WorkerRequest | None:
        """Return the prompt of this class that has waited longest for pages."""
        return next((running for running in self.waiting if running.request.service is service), None)

    def unwritten(self, running: WorkerRequest) -> int:
        """Return how many pages are to be written of a prompt that is through."""
        return self._writer.pages_for(running, running.prefix)

    def names_of(self, running: WorkerRequest) -> tuple[int, ...]:
        """Return the names of the full pages of a prompt that is through; none where prompts are not reused."""
        return self._names.pages_of(running, running.prefix) if self._reuse else ()

    def end_copy(self, copy: Copy) -> list[Command]:
        """Commit a prompt whose copy has ended, or take its pages back."""
        running = copy.running
        if not copy.wanted or self._pool.member is None:
            self._here.move(running, State.GONE)
            self._memory.give(running.pairs)
            self._writer.take_back(copy)
            return []
        if running.known != copy.known:  # the pool has taken them back: now all is to be copied
            self._writer.take_back(copy)
            self._here.move(running, State.THROUGH, first=True)
            self._memory.reconsider()
            return []
        self._memory.pages.note_in_pool(running)
        self._here.move(running, State.GONE)
        self._memory.give(running.pairs)
        self._outputs.forget([running.request.id])  # the decode worker gets the whole output, and keeps it
        self._writer.hand_on(copy)
        self._decisions.note(Kind.COMMITTED, running.request, tokens=running.prefix)
        entry = running.entry(copy.known + copy.pages, self.names_of(running))
        return self._pool.send(Commit(entry, len(copy.known), running.decode))

    def pool_lost(self, event: MemberLost, now: float) -> None:
        """Prompts that were being copied wait to be copied anew, once there is a pool."""
        for running in reversed(self._writer.lose_pool()):
            self._here.move(running, State.THROUGH, first=True)

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for running in self._here.drop_from((State.THROUGH,), request, attempt):
            self._writer.forget_parts(running)
            self._memory.leave(running.pairs)
            commands += self._known.leave(running)
        return commands


class Offers(CorePart):
    """Offers prompts to decode workers where no pool is of use."""

    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        owners: Owners,
        commits: Commits,
    ) -> None:
        self._pool, self._policy, self._memory, self._writer = pool, memory.pace.policy, memory, pool.writer
        self._peers, self._commits, self._known = here.peers, commits, here.known
        ways = here.peers.get, self._goes_on, self._left
        self.offering = Offering(here, here.departures, memory, log, owners.outputs, *ways, may_be_declined=False)

    def members_changed(self, event: MemberJoined | MemberLost, now: float) -> None:
        self._memory.reconsider()  # prompts that wait for pages may need none now

    @property
    def needs_no_pool(self) -> bool:
        """Return whether KV can be sent to decode workers, and none of them reads the pool of this node, or is to."""
        pool, keeps = self._pool.member, self._policy.handoff is Handoff.DEVICE
        return bool(self._peers) and (keeps or pool is None or not self._peers.has_one_on(pool.node))

    def offer_all(self, now: float) -> list[Command]:
        """Offer all prompts that wait for pages where no pool is of use to them."""
        commands: list[Command] = []
        while self._commits.waiting and self.needs_no_pool:
            running = next(iter(self._commits.waiting))
            decode = self._peers.get(running.decode) or self._peers.any()
            assert decode is not None, "a prompt that needs no pool needs a decode worker"
            self._commits.names_of(running)  # the offer tells them
            commands.append(self.offering.offer(running, decode))
        return commands

    def _goes_on(self, departure: Departure) -> None:
        """Let a prompt wait for pages or another decode worker, as if it had not been offered."""
        running = departure.running
        if self.needs_no_pool and (other := self._peers.any(before=departure.to.name)) is not None:
            running.decode = other.name  # the way there may be broken
        self._commits.add(running)

    def _left(self, running: WorkerRequest, to: str) -> list[Command]:
        self._writer.forget_parts(running)  # its pages go back
        return self._known.release(running.key, running.known) if to else self._known.leave(running)
