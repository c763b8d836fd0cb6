"""Hand on the prompts that are through: a prompt is offered to a decode worker, or goes to the pool.

It is offered where the router has named a decode worker that KV can be sent to (candidates.py), unless it would be late
for it: that worker's Pull is heard after the next step only. A real-time request that could not wait for a batch is
offered as pinned. Every other prompt, and every prompt that is declined, is written to pages of the pool and committed;
the Commit says which decode worker was named, for the pool pins too.

A node without decode workers has no pool, or a pool from which no worker decodes, as long as they are dead. There all
prompts are offered, to the decode worker that was named or to another, and wait on this device until that worker has
room for them.
"""

from __future__ import annotations

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.candidates import Candidate, Candidates
from alignedserve.prefill_worker.committing import Commits
from alignedserve.prefill_worker.known_pages import KnownPages
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Decline, LeasePages, Member, Offer
from alignedserve.scheduling.policy import Handoff
from alignedserve.scheduling.slo import StepTimes, Work
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running

_DECODE_STEPS = 4  # that pass between an Offer and the next token: three, and what they may take longer than the mean


class Offers(CorePart):
    def __init__(self, common: Common, candidates: Candidates, commits: Commits, known: KnownPages) -> None:
        self._pool, self._pace, self._memory = common.pool, common.pace, common.memory
        self._writer, self._outputs = common.writer, common.owners.outputs
        self._notes, self._faults, self._decisions = common.notes, common.faults, common.decisions
        self._candidates, self._commits, self._known = candidates, commits, known
        self._is_to_repeat = False  # offers that were not pulled: the offer, or its answer, may have been lost
        self._expected_wait_s: float | None = None  # in the pool
        self._decode_step_s = 0.0

    def hear(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, MemberJoined | MemberLost):
            self._memory.reconsider()  # prompts that wait for pages may need none now
        match event:
            case Received(message=LeasePages() as lease):
                self._expected_wait_s, self._decode_step_s = lease.wait_s, lease.step_s
            case Received(message=Decline(request, attempt, is_failed)):
                return self._decline((request, attempt), is_failed)
            case MemberLost(member) if member == self._pool.member:
                self._lose_pool()
        return []

    # --- To a decode worker

    def take(self, running: Running, is_busy: bool, now: float) -> list[Command]:
        """Offer a prompt whose last chunk has run, or let it wait for pages. `is_busy`: whether prompts are left."""
        by_pool = self._pace.policy.handoff is Handoff.POOL
        decode = None if by_pool else self._candidates.peer(running.decode)
        if decode is None or self._cannot_be_pulled(running, is_busy, now):
            self._commits.add(running)
            return []
        return [self._first_offer(self._candidates.add(running, decode, self._cannot_wait(running, now)))]

    def _cannot_wait(self, running: Running, now: float) -> bool:
        """Return whether a real-time request would miss its next token if it waited for a batch of the pool."""
        return self._expected_wait_s is not None and self._must_join_within(self._expected_wait_s, running, now)

    def _cannot_be_pulled(self, running: Running, is_busy: bool, now: float) -> bool:
        """Return whether a real-time request would miss its next token if it was pulled.

        Workers hear messages between two steps. So it takes a decode step until the Offer is read, a step of prompts
        until the Pull is read, a decode step until what has come is seen, and one to run it. For a request that
        goes by the pool the worker hears only the Batch.
        """
        step_s = self._pace.times.most_s if is_busy else 0.0
        return self._must_join_within(step_s + _DECODE_STEPS * self._decode_step_s, running, now)

    def _must_join_within(self, seconds: float, running: Running, now: float) -> bool:
        """Return whether a real-time request misses its next token if a decode step ends only so much later."""
        if not running.promise.is_rt:
            return False
        work = Work(tokens=running.promise.tokens_due, transfer_s=running.num_held * self._pace.copy_token_s)
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
            running = self._commits.waiting.popleft()
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

    def _lose_pool(self) -> None:
        """Forget copies to pages that are gone; what is still being written stays taken until that has ended."""
        for candidate in self._candidates:
            if candidate.copy is not None and candidate.copy.wanted:
                candidate.copy = None
            candidate.is_kept = candidate.has_asked = False
            self._clear(candidate)

    def _clear(self, candidate: Candidate) -> None:
        if candidate.is_over:
            self._candidates.remove(candidate)
            self._memory.give(candidate.running.pairs)

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget candidates. Those that are being copied, the writer forgets too, and releases their pages."""
        here = self._candidates.here
        leaving = [candidate for candidate in here if candidate.running.is_of(request, attempt)]
        for candidate in leaving:
            candidate.is_here = False
            self._writer.forget_parts(candidate.running)
            if (written := candidate.written) is not None:
                self._writer.settle(written)
                self._writer.take_back(written)
                candidate.copy = None
            self._clear(candidate)
        left = [candidate.running for candidate in leaving if candidate.copy is None and not candidate.is_kept]
        return [command for running in left for command in self._known.leave(running)]

    def attempts(self) -> list[Attempt]:
        return [candidate.key for candidate in self._candidates.here]

    def occupants(self) -> list[Running]:
        return self._candidates.seats

    @property
    def awaits_answer(self) -> bool:
        return bool(self._candidates.here)
