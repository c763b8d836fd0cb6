"""Prompts that have run: each is offered to a decode worker, or goes to the pool.

    through ── Offer ──▶ offered ── Pull ──▶ sending ── sent ──▶ gone
      │                     │  └── Decline      └── failed, and Decline ──▶ to the pool, as if never offered
      │                     ├── no memory for prompts, but written ────────▶ to the pool: a Commit, no copy
      │                     └── the decode worker is lost ─────────────────▶ to the pool
      └── to the pool: waits for pages ── pages at hand ──▶ copied ──▶ Commit

A prompt is offered where the router has named a decode worker that KV can be sent to, unless the Pull, which is heard
after the next step, would come too late. A real-time request that could not wait for a batch is offered as pinned.
Every other prompt is written to pages of the pool and committed; the Commit names the decode worker, since the pool
pins too. An offered prompt is also written to the pool if pages are free at once. Before the Pull that makes the way to
the pool short; after it the pool keeps the pages for the decode worker (Commit, is_there).

On a node without decode workers, whose pool no worker reads, all prompts are offered, and wait on this device until a
decode worker of another node has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, Send, SendKv
from alignedserve.protocol.events import MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Commit, Decline, LeasePages, Member, Offer, Release
from alignedserve.scheduling.policy import Handoff
from alignedserve.scheduling.slo import StepTimes, Work
from alignedserve.worker.arriving import PromptQueue
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import Notes, WorkerLog
from alignedserve.worker.owners import Owners
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

_MOST_SENT = 1000  # remembered, for a receiver that says later that nothing came


@dataclass(eq=False)
class Candidate:
    running: WorkerRequest
    decode: Member  # the decode worker that it is offered to
    is_pinned: bool
    transfer: tuple[str, int] | None = None  # that reads its pairs: holder of the receiver, number
    was_pulled: bool = False
    is_declined: bool = False  # while a transfer reads its pairs
    copy: Copy | None = None  # to the pool, under way or written
    is_kept: bool = False  # the pool has been told of the copy
    has_asked: bool = False  # for pages

    @property
    def key(self) -> Attempt:
        return self.running.key

    @property
    def is_here(self) -> bool:
        """Return whether it is wanted; otherwise only its blocks are still in use."""
        return self.running.state is State.OFFERED

    @property
    def is_over(self) -> bool:
        """Return whether it is not wanted here, and nothing reads its pairs any more."""
        return not self.is_here and self.transfer is None and self.copy is None

    @property
    def written(self) -> Copy | None:
        return self.copy if self.copy is not None and self.copy.is_written else None


class Candidates:
    """The prompts that are offered, and the decode workers that KV can be sent to.

    Blocks stay taken while a transfer or a copy reads them, whatever has become of the request.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._peers: dict[str, Member] = {}  # decode workers that KV can be sent to
        self._all: list[Candidate] = []
        self._last: Counter[str] = Counter()  # receiver -> the number of its last Pull
        self._sent: dict[Attempt, None] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(list(self._all))

    @property
    def here(self) -> list[Candidate]:
        return [candidate for candidate in self._all if candidate.is_here]

    def meet(self, peer: Member) -> None:
        self._peers[peer.name] = peer

    def peer(self, name: str) -> Member | None:
        return self._peers.get(name)

    @property
    def has_peers(self) -> bool:
        return bool(self._peers)

    def has_peer_on(self, node: str) -> bool:
        return any(peer.node == node for peer in self._peers.values())

    def any_peer(self, before: str = "") -> Member | None:
        """Return the decode worker to which least is offered, if any; `before` only where there is no other."""
        offered = Counter(candidate.decode.name for candidate in self.here)
        peers = self._peers.values()
        return min(peers, key=lambda peer: (peer.name == before, offered[peer.name], peer.name), default=None)

    def lose(self, peer: Member) -> list[Candidate]:
        """Forget a decode worker that is lost, and return what was offered to it."""
        self._peers.pop(peer.name, None)
        return [candidate for candidate in self.here if candidate.decode == peer]

    def add(self, running: WorkerRequest, decode: Member, is_pinned: bool) -> Candidate:
        self._requests.move(running, State.OFFERED)
        candidate = Candidate(running, decode, is_pinned)
        self._all.append(candidate)
        return candidate

    def remove(self, candidate: Candidate) -> None:
        self._all.remove(candidate)

    def find(self, attempt: Attempt) -> Candidate | None:
        return next((candidate for candidate in self._all if candidate.is_here and candidate.key == attempt), None)

    def find_copied(self, running: WorkerRequest) -> Candidate | None:
        """Return the candidate of this request that is being copied to the pool."""
        same = (candidate for candidate in self._all if candidate.running is running)
        return next((candidate for candidate in same if candidate.copy is not None), None)

    # --- Transfers

    def is_late(self, receiver: str, number: int) -> bool:
        """Return whether a Pull was repeated, or came after a later one: its receiver waits for it no longer."""
        if number <= self._last[receiver]:
            return True
        self._last[receiver] = number
        return False

    def send(self, candidate: Candidate | None, receiver: str, number: int) -> SendKv:
        """Return the command to send a candidate; it sends nothing where that is gone, or under way already."""
        if candidate is None or candidate.transfer is not None:
            return SendKv(number, receiver, (), ())
        candidate.transfer, candidate.was_pulled = (receiver, number), True
        running = candidate.running
        return SendKv(number, receiver, running.pairs, running.kept_tokens)

    def end_transfer(self, receiver: str, number: int) -> Candidate | None:
        """Return the candidate whose pairs were sent; None where there were none to send."""
        transfer = (receiver, number)
        found = next((candidate for candidate in self._all if candidate.transfer == transfer), None)
        if found is not None:
            found.transfer = None
        return found

    def let_go(self, candidate: Candidate) -> None:
        """Note that a candidate is with its decode worker, as far as this worker can tell."""
        self._requests.move(candidate.running, State.ABANDONED)
        self._sent[candidate.key] = None
        if len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]

    def was_sent(self, attempt: Attempt) -> bool:
        return attempt in self._sent


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
        self.candidates, self.known = Candidates(self), KnownPages(pool, notes)


class Commits(CorePart):
    """Prompts that go to the pool: they wait for pages, are copied, and are committed."""

    def __init__(
        self, here: PromptRequests, memory: DeviceMemory, pool: PoolLink, log: WorkerLog, owners: Owners
    ) -> None:
        self._here, self._pool, self._memory, self._writer = here, pool, memory, pool.writer
        self._names, self._reuse, self._outputs = pool.writer.names, memory.pace.policy.reuse, owners.outputs
        self._candidates, self._known, self._decisions = here.candidates, here.known, log.decisions

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
        return self.commit(copy, running.decode)

    def commit(self, copy: Copy, to: str, is_there: bool = False) -> list[Command]:
        """Hand the pages of a copy on to the pool, with the decode worker that the router named."""
        self._writer.hand_on(copy)
        if not is_there:
            self._decisions.note(Kind.COMMITTED, copy.running.request, tokens=copy.running.prefix)
        entry = copy.running.entry(copy.known + copy.pages, self.names_of(copy.running))
        return self._pool.send(Commit(entry, len(copy.known), to, is_there))

    def pool_lost(self, event: MemberLost, now: float) -> None:
        """Prompts that were being copied wait to be copied anew, once there is a pool."""
        offered = {id(candidate.running) for candidate in self._candidates}
        again = [running for running in self._writer.lose_pool() if id(running) not in offered]
        for running in reversed(again):
            self._here.move(running, State.THROUGH, first=True)

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for running in self._here.drop_from((State.THROUGH,), request, attempt):
            self._writer.forget_parts(running)
            self._memory.leave(running.pairs)
            commands += self._known.leave(running)
        return commands


_DECODE_STEPS = 4  # that pass between an Offer and the next token: three, and what they may take longer than the mean


class Offers(CorePart):
    """Prompts that are offered to decode workers, and what becomes of them."""

    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        owners: Owners,
        commits: Commits,
    ) -> None:
        self._here, self._pool, self._pace, self._memory = here, pool, memory.pace, memory
        self._writer, self._outputs = pool.writer, owners.outputs
        self._notes, self._faults, self._decisions = log.notes, log.faults, log.decisions
        self._candidates, self._commits, self._known = here.candidates, commits, here.known
        self._is_to_repeat = False  # offers that were not pulled: the offer, or its answer, may have been lost
        self._expected_wait_s: float | None = None  # in the pool
        self._decode_step_s = 0.0

    def members_changed(self, event: MemberJoined | MemberLost, now: float) -> None:
        self._memory.reconsider()  # prompts that wait for pages may need none now

    def leased(self, lease: LeasePages, frame: Received, now: float) -> None:
        self._expected_wait_s, self._decode_step_s = lease.wait_s, lease.step_s

    def declined(self, message: Decline, frame: Received, now: float) -> list[Command]:
        return self._decline((message.request, message.attempt), message.is_failed)

    # --- To a decode worker

    def take(self, running: WorkerRequest, is_busy: bool, now: float) -> list[Command]:
        """Offer a prompt whose last chunk has run, or let it wait for pages. `is_busy`: whether prompts are left."""
        by_pool = self._pace.policy.handoff is Handoff.POOL
        decode = None if by_pool else self._candidates.peer(running.decode)
        if decode is None or self._cannot_be_pulled(running, is_busy, now):
            self._commits.add(running)
            return []
        return [self._first_offer(self._candidates.add(running, decode, self._cannot_wait(running, now)))]

    def _cannot_wait(self, running: WorkerRequest, now: float) -> bool:
        """Return whether a real-time request would miss its next token if it waited for a batch of the pool."""
        return self._expected_wait_s is not None and self._must_join_within(self._expected_wait_s, running, now)

    def _cannot_be_pulled(self, running: WorkerRequest, is_busy: bool, now: float) -> bool:
        """Return whether a real-time request would miss its next token if it was pulled.

        Workers hear messages between two steps. So it takes a decode step until the Offer is read, a step of prompts
        until the Pull is read, a decode step until what has come is seen, and one to run it. For a request that
        goes by the pool the worker hears only the Batch.
        """
        step_s = self._pace.times.most_s if is_busy else 0.0
        return self._must_join_within(step_s + _DECODE_STEPS * self._decode_step_s, running, now)

    def _must_join_within(self, seconds: float, running: WorkerRequest, now: float) -> bool:
        """Return whether a real-time request misses its next token if a decode step ends only so much later."""
        if not running.promise.is_rt:
            return False
        work = Work(transfer_s=running.num_held * self._pace.copy_token_s)
        return running.promise.standing(now, work, StepTimes()).slack_s <= seconds

    @property
    def needs_no_pool(self) -> bool:
        """Return whether KV can be sent to decode workers, and none of them reads the pool of this node, or is to."""
        if self._pace.policy.handoff is Handoff.DEVICE:
            return self._candidates.has_peers
        pool = self._pool.member
        return self._candidates.has_peers and (pool is None or not self._candidates.has_peer_on(pool.node))

    def offer_all(self, now: float) -> list[Command]:
        """Offer all prompts that wait for pages where no pool is of use to them."""
        commands: list[Command] = []
        while self._commits.waiting and self.needs_no_pool:
            running = next(iter(self._commits.waiting))
            decode = self._candidates.peer(running.decode) or self._candidates.any_peer()
            assert decode is not None, "a prompt that needs no pool needs a decode worker"
            commands.append(self._first_offer(self._candidates.add(running, decode, is_pinned=False)))
        return commands

    def _first_offer(self, candidate: Candidate) -> Command:
        self._decisions.note(Kind.OFFERED, candidate.running.request, candidate.decode.name)
        return self._offer(candidate)

    def _offer(self, candidate: Candidate) -> Command:
        entry = candidate.running.entry((), self._commits.names_of(candidate.running))
        return Send(candidate.decode.name, Offer(entry, candidate.is_pinned, has_pool=not self.needs_no_pool))

    def offer_again(self, now: float) -> list[Command]:
        """Repeat all offers where one of them may have been lost."""
        if not self._is_to_repeat:
            return []
        self._is_to_repeat = False
        return [self._offer(candidate) for candidate in self._candidates.here]

    def ask_again(self) -> None:
        self._is_to_repeat = True

    def repeat(self, to: str) -> list[Command]:
        return [self._offer(candidate) for candidate in self._candidates.here if candidate.decode.name == to]

    def send(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        """Send the KV that a decode worker pulls, or nothing where it is not here any more."""
        candidate = self._candidates.find(attempt)
        sends = self._candidates.send(candidate, receiver, number)
        if candidate is None or candidate.written is None:
            return [sends]
        return [sends, *self._keep_too(candidate, candidate.written)]

    def end_transfer(self, receiver: str, number: int, ok: bool) -> list[Command]:
        """Let a request go that was pulled, or keep it where the transfer failed."""
        candidate = self._candidates.end_transfer(receiver, number)
        if candidate is None:
            return []
        self._faults.num_failed_transfers += not ok
        if candidate.is_here and candidate.is_declined:
            return self.turn_to_pool(candidate)
        commands: list[Command] = []
        if candidate.is_here and (ok or candidate.is_kept):
            self._candidates.let_go(candidate)
            self._outputs.forget([candidate.key[0]])  # its decode worker has the whole output
            if candidate.copy is None and not candidate.is_kept:
                self._writer.forget_parts(candidate.running)
                commands += self._known.release(candidate.key, candidate.running.known)
        self._clear(candidate)
        return commands

    def lose_decode(self, decode: Member) -> list[Command]:
        """Let all prompts that were offered to a decode worker go to the pool."""
        offered = self._candidates.lose(decode)
        return [command for candidate in offered for command in self.turn_to_pool(candidate)]

    def _decline(self, attempt: Attempt, is_failed: bool) -> list[Command]:
        candidate = self._candidates.find(attempt)
        if candidate is not None:
            return self.turn_to_pool(candidate)
        if is_failed and self._candidates.was_sent(attempt):
            self._notes.note("lost", attempt)  # no worker has it: its owner is to start the next attempt
        return []

    # --- To the pool

    def turn_to_pool(self, candidate: Candidate) -> list[Command]:
        """Let a candidate go to the pool after all: at once, where it is written as a whole already."""
        if candidate.transfer is not None:
            candidate.is_declined = True
            return []
        running, copy = candidate.running, candidate.copy
        if candidate.is_kept:  # for that decode worker, which knows no more of it
            self._outputs.drop(*running.key)
            self._notes.note("lost", running.key)
            self._candidates.let_go(candidate)
            self._clear(candidate)
            return []
        self._candidates.remove(candidate)
        if copy is not None:
            self._here.move(running, State.LEAVING)
        if self.needs_no_pool and (other := self._candidates.any_peer(before=candidate.decode.name)) is not None:
            running.decode = other.name  # the way there may be broken
        if copy is None:
            self._commits.add(running)
        elif copy.is_written:
            self._writer.settle(copy)
            return self._commits.end_copy(copy)
        return []

    def make_place(self, pairs: int) -> list[Command]:
        """Let written candidates go on by the pool, pinned ones last, until so many pairs are free."""
        here = () if self.needs_no_pool else self._candidates.here
        movable = [candidate for candidate in here if candidate.written is not None and candidate.transfer is None]
        movable.sort(key=lambda candidate: candidate.is_pinned)
        commands: list[Command] = []
        for candidate in movable:
            if self._memory.num_free >= pairs:
                break
            commands += self.turn_to_pool(candidate)
        return commands

    def write(self, pool: Member, spoken_for: int) -> list[Command]:
        """Write candidates to pages that are at hand or free at once, but for so many best-effort pages."""
        commands: list[Command] = []
        for candidate in () if self.needs_no_pool else self._candidates.here:
            if candidate.copy is not None or candidate.is_kept:
                continue
            running, service = candidate.running, candidate.running.request.service
            wanted = self._commits.unwritten(running)
            at_hand = self._writer.num_at_hand(service) - (spoken_for if service is ServiceClass.BE else 0)
            if wanted <= at_hand:
                commands.append(self._writer.begin(running, pool, running.prefix, service, aside=True))
                candidate.copy = self._writer.copies[-1]
            elif candidate.has_asked and not self._writer.is_awaited(service):
                self._writer.forget_parts(running)  # it gets no more
            elif not candidate.has_asked and self._commits.first(service) is None:
                asks = self._writer.ask_if_any(pool, service, wanted)
                candidate.has_asked = bool(asks)
                commands += asks
        return commands

    def end_copy(self, candidate: Candidate, number: int, copy: Copy) -> list[Command]:
        """Keep what is written of a candidate until it is pulled or goes to the pool."""
        if self._is_void(copy):
            self._void(candidate, copy)
            return []
        if not candidate.was_pulled:
            self._writer.keep(number, copy)
            return []
        return self._keep_too(candidate, copy)

    def _keep_too(self, candidate: Candidate, copy: Copy) -> list[Command]:
        """Let the pool keep what is written of a candidate for the decode worker that has pulled it."""
        self._writer.settle(copy)
        if self._pool.member is None or copy.running.known != copy.known:
            self._void(candidate, copy)
            return []
        candidate.copy, candidate.is_kept = None, True
        self._clear(candidate)
        return self._commits.commit(copy, candidate.decode.name, is_there=True)

    def _is_void(self, copy: Copy) -> bool:
        return not copy.wanted or self._pool.member is None or copy.running.known != copy.known

    def _void(self, candidate: Candidate, copy: Copy) -> None:
        """Take the pages of a copy back that nothing can be done with."""
        self._writer.take_back(copy)
        candidate.copy = None
        self._clear(candidate)

    def pool_lost(self, event: MemberLost, now: float) -> None:
        """Forget copies to pages that are gone; what is still being written stays taken until that has ended."""
        for candidate in self._candidates:
            if candidate.copy is not None and candidate.copy.wanted:
                candidate.copy = None
            candidate.is_kept = candidate.has_asked = False
            self._clear(candidate)

    def _clear(self, candidate: Candidate) -> None:
        if candidate.is_over:
            self._candidates.remove(candidate)
            self._here.move(candidate.running, State.GONE)
            self._memory.give(candidate.running.pairs)

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget candidates. Those that are being copied, the writer forgets too, and releases their pages."""
        here = self._candidates.here
        leaving = [candidate for candidate in here if candidate.running.is_of(request, attempt)]
        for candidate in leaving:
            self._here.move(candidate.running, State.ABANDONED)
            self._writer.forget_parts(candidate.running)
            if (written := candidate.written) is not None:
                self._writer.settle(written)
                self._writer.take_back(written)
                candidate.copy = None
            self._clear(candidate)
        left = [candidate.running for candidate in leaving if candidate.copy is None and not candidate.is_kept]
        return [command for running in left for command in self._known.leave(running)]

    @property
    def awaits_answer(self) -> bool:
        return bool(self._candidates.here)
