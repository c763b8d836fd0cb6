"""What a prefill worker does with a prompt that is through: it is offered to a decode worker, or goes to the pool.

Offered it is where the router has named a decode worker that KV can be sent to (candidates.py), unless it would be late
for it: that worker's Pull is heard after the next step only. A real-time request that could not wait for a batch is
offered as pinned. All else, and what is declined, is written to pages of the pool and committed; the Commit says which
decode worker was named, for the pool pins too.

A node without decode workers has no pool. There all is offered, to the decode worker that was named or to another, and
waits on our device until that has room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from alignedserve.core import CacheKind, Role, ServiceClass, units_for
from alignedserve.prefill_worker.candidates import Candidate, Candidates
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import CopiedOut, Event, KvSent, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Commit, Decline, LeasePages, Member, Offer, Pull, Release, holder
from alignedserve.scheduling.policy import Entries
from alignedserve.scheduling.slo import StepTimes, Work
from alignedserve.worker.core import WorkerCore, WorkerSetup
from alignedserve.worker.page_writer import Copy, PageNames, PageWriter
from alignedserve.worker.step.running import Running

_DECODE_STEPS = 4  # that pass between an Offer and the next token: three, and what they may take longer than the mean


class OfferingCore(WorkerCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._names = PageNames(setup.limits.page_size, setup.root)
        self._writer = PageWriter(setup.limits.page_size)
        self._committing: deque[Running] = deque()  # waits for pages
        self._candidates, self._direct = Candidates(), setup.direct
        self._asked_for: dict[Running, None] = {}  # real-time prompts that run, and pages for them
        self._offers_again = False  # what was offered and not pulled: the offer, or its answer, may have been lost
        self._expected_wait_s: float | None = None  # in the pool
        self._decode_step_s = 0.0

    @property
    def _kind(self) -> CacheKind:
        """Of all its requests, which it has only until others have them."""
        return CacheKind.HIDDEN if self._policy.entries is Entries.HIDDEN else CacheKind.KV

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(message=LeasePages() as lease):
                self._expected_wait_s, self._decode_step_s = lease.wait_s, lease.step_s
                if self._writer.answered(lease):
                    self._is_stuck = False
                return []
            case CopiedOut(number):
                return self._copy_ended(number)
            case Received(sender, Pull(number, request, attempt), incarnation):
                return self._pulled(holder(sender, incarnation), number, (request, attempt))
            case Received(message=Decline(request, attempt, is_failed)):
                return self._declined((request, attempt), is_failed)
            case KvSent(number, to, ok):
                return self._sent(to, number, ok)
            case MemberJoined(member) if member.role is Role.DECODE:
                if self._direct and member.transport:
                    self._candidates.met(member)
                return []
            case MemberLost(member) if member.role is Role.DECODE:
                return [command for one in self._candidates.lost(member) for command in self._not_taken(one)]
        return super()._happened(event)

    # --- To a decode worker

    def _through(self, running: Running) -> list[Command]:
        """Its last chunk has run, and its first token is with its owner."""
        decode = self._candidates.peer(running.decode)
        if decode is None or self._kind is CacheKind.HIDDEN or self._cannot_be_pulled(running):
            self._committing.append(running)
            return []
        return [self._offer(self._candidates.add(running, decode, self._cannot_wait(running)))]

    def _cannot_wait(self, running: Running) -> bool:
        """For a batch of the pool: a real-time request that would miss its next token."""
        return self._expected_wait_s is not None and self._must_join_within(self._expected_wait_s, running)

    def _cannot_be_pulled(self, running: Running) -> bool:
        """In time: workers hear what they are told between two steps. So it takes a decode step until the Offer is
        read, one of prompts until the Pull is, a decode step until what has come is seen, and one to run it. Of what
        goes by the pool there is nothing to hear but the Batch."""
        is_busy = bool(self._waiting) or any(True for _ in self._prompts_ahead())
        step_s = self._recent.now.most_s if is_busy else 0.0
        return self._must_join_within(step_s + _DECODE_STEPS * self._decode_step_s, running)

    def _must_join_within(self, seconds: float, running: Running) -> bool:
        """A real-time request that would miss its next token, if it took so long until a decode step is through."""
        if not running.promise.is_rt:
            return False
        work = Work(tokens=running.promise.tokens_due, transfer_s=running.prefix * self._copy_token_s)
        return running.promise.standing(self._now, work, StepTimes()).slack_s <= seconds

    @property
    def _needs_no_pool(self) -> bool:
        """There is none here, and there are decode workers that KV can be sent to."""
        return self._pool is None and self._kind is CacheKind.KV and self._candidates.any_peer() is not None

    def _offer_all(self) -> list[Command]:
        """Where there is no pool, all that would go there."""
        commands: list[Command] = []
        while self._needs_no_pool and self._committing:
            running = self._committing.popleft()
            decode = self._candidates.peer(running.decode) or self._candidates.any_peer()
            assert decode is not None, "it needs no pool"
            commands.append(self._offer(self._candidates.add(running, decode, is_pinned=False)))
        return commands

    def _offer(self, candidate: Candidate) -> Command:
        entry = candidate.running.entry((), self._names_of(candidate.running))
        return Send(candidate.decode.name, Offer(entry, candidate.is_pinned, has_pool=self._pool is not None))

    def _offer_again(self) -> list[Command]:
        if not self._offers_again:
            return []
        self._offers_again = False
        return [self._offer(one) for one in self._candidates.here]

    def _say_again(self, to: str) -> list[Command]:
        offers = [self._offer(one) for one in self._candidates.here if one.decode.name == to]
        return [*super()._say_again(to), *offers]

    def _pulled(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        if self._candidates.is_late(receiver, number):
            return []
        candidate = self._candidates.of(attempt)
        sends = self._candidates.send(candidate, receiver, number)
        if candidate is None or candidate.written is None:
            return [sends]
        return [sends, *self._keep_too(candidate, candidate.written)]

    def _sent(self, receiver: str, number: int, ok: bool) -> list[Command]:
        candidate = self._candidates.ended(receiver, number)
        if candidate is None:
            return []
        failed: list[Command] = []
        if not ok:
            self.num_failed_transfers += 1
            failed = [self._figures]
        if candidate.is_here and candidate.is_declined:
            return [*failed, *self._not_taken(candidate)]
        if candidate.is_here and (ok or candidate.is_kept):
            self._candidates.gone(candidate)
            self._outputs.forget([candidate.key[0]])  # its decode worker has the whole output
            if candidate.copy is None and not candidate.is_kept:
                self._writer.forget_parts(candidate.running)
                failed += self._let_go(candidate.key, candidate.running.known)
        self._clear(candidate)
        return failed

    def _declined(self, attempt: Attempt, is_failed: bool) -> list[Command]:
        candidate = self._candidates.of(attempt)
        if candidate is not None:
            return self._not_taken(candidate)
        if is_failed and self._candidates.was_sent(attempt):
            self._notes.moved("lost", attempt)  # nobody has it: its owner is to start the next attempt
        return []

    def _not_taken(self, candidate: Candidate) -> list[Command]:
        """It goes to the pool: at once, where it is written as a whole already."""
        if candidate.transfer is not None:
            candidate.is_declined = True
            return []
        running, copy = candidate.running, candidate.copy
        if candidate.is_kept:  # for that decode worker, which knows no more of it
            self._outputs.drop(*running.key)
            self._notes.moved("lost", running.key)
            self._candidates.gone(candidate)
            self._clear(candidate)
            return []
        self._candidates.remove(candidate)
        if self._needs_no_pool and (other := self._candidates.any_peer(before=candidate.decode.name)) is not None:
            running.decode = other.name  # the way there may be broken
        if copy is None:
            self._committing.append(running)
        elif copy.is_written:
            self._writer.settle(copy)
            return self._copied(copy)
        return []

    def _clear(self, candidate: Candidate) -> None:
        if candidate.is_over:
            self._candidates.remove(candidate)
            self._give(candidate.running.pairs)

    def _leave_candidates(self, request: str, attempt: int) -> list[Running]:
        """Nobody wants these any more. What is being copied of them, the writer is told of too."""
        leaving = [one for one in self._candidates.here if one.running.is_of(request, attempt)]
        for one in leaving:
            one.is_here = False
            self._writer.forget_parts(one.running)
            if (written := one.written) is not None:
                self._writer.settle(written)
                self._writer.take_back(written)
                one.copy = None
            self._clear(one)
        return [one.running for one in leaving if one.copy is None and not one.is_kept]

    def _make_place(self, pairs: int) -> list[Command]:
        """Prompts lack memory: what is written goes on by the pool, the pinned last, until so many pairs are free."""
        movable = [one for one in self._candidates.here if one.written is not None and one.transfer is None]
        movable.sort(key=lambda one: one.is_pinned)
        commands: list[Command] = []
        for one in movable:
            if self._blocks.num_free >= pairs:
                break
            commands += self._not_taken(one)
        return commands

    # --- To the pool

    @property
    def _writes_to(self) -> Member | None:
        return self._pool if self._pool is not None and self._writer.may_write(self._pool) else None

    def _write_candidates(self, pool: Member, spoken_for: int) -> list[Command]:
        """To pages that are at hand, but for so many best-effort ones; or that can be had at once."""
        commands: list[Command] = []
        for one in self._candidates.here:
            if one.copy is not None or one.is_kept:
                continue
            service, wanted = one.running.request.service, self._unwritten(one.running)
            at_hand = self._writer.num_at_hand(service) - (spoken_for if service is ServiceClass.BE else 0)
            if wanted <= at_hand:
                commands.append(self._writer.begin(one.running, pool, one.running.prefix, service, aside=True))
                one.copy = self._writer.copies[-1]
            elif one.has_asked and not self._writer.is_awaited(service):
                self._writer.forget_parts(one.running)  # it gets no more
            elif not one.has_asked and self._first_committing(service) is None:
                asks = self._writer.ask_if_any(pool, service, wanted)
                one.has_asked = bool(asks)
                commands += asks
        return commands

    def _write_parts(self, pool: Member, running: Iterable[Running]) -> list[Command]:
        """Of prompts that have more to run, what is full, to pages at hand for them: so that little is left to write
        after the last chunk."""
        commands: list[Command] = []
        size = self._limits.page_size
        for one in running:
            service = one.request.service
            if self._first_committing(service) is not None:
                continue  # what is at hand is for those who are through
            wanted = self._writer.pages_for(one, one.prefix // size * size)
            count = min(wanted, self._writer.num_at_hand(service))
            if count > 0:
                commands.append(self._writer.begin_part(one, pool, count, service))
        self._asked_for = {one: None for one in self._asked_for if one in running}
        return commands

    def _ask_for_chats(self, running: Collection[Running]) -> list[Command]:
        """Pages for those that run now, where others are to run after them: asked for when they are through, their KV
        would wait until another step has ended."""
        new = [one for one in running if one.promise.is_rt and one not in self._asked_for]
        pool = self._writes_to
        if not new or pool is None or self._first_committing(ServiceClass.RT) is not None:
            return []
        if not self._waiting and len(new) == len(running) and all(one.prefix <= one.num_cached for one in new):
            return []
        wanted = sum(self._writer.pages_for(one, one.num_tokens) for one in (*self._asked_for, *new))
        asks = self._writer.ask_if_any(pool, ServiceClass.RT, wanted)
        if asks or self._writer.num_at_hand(ServiceClass.RT) >= wanted:
            self._asked_for.update(dict.fromkeys(new))
        return asks

    def _give_up_parts(self, service: ServiceClass, running: Iterable[Running]) -> None:
        """Somebody who is through waits for pages: those who have some, and do not get the others before it does or
        would wait too, give them up; else two could wait for each other. Best-effort prompts that run have all."""
        running = running if service is ServiceClass.RT else ()
        for one in (*self._committing, *running):
            if one.request.service is service:
                self._writer.forget_parts(one)

    @property
    def _promised(self) -> int:
        """Pages for real-time prompts that run: they were asked for, and may not all have come."""
        return sum(self._writer.pages_for(one, one.num_tokens) for one in self._asked_for)

    def _put_back(self, running: Running) -> None:
        self._writer.forget_parts(running)
        super()._put_back(running)

    def _first_committing(self, service: ServiceClass) -> Running | None:
        return next((one for one in self._committing if one.request.service is service), None)

    def _unwritten(self, through: Running) -> int:
        return self._writer.pages_for(through, through.prefix)

    def _copy_ended(self, number: int) -> list[Command]:
        copy = self._writer.ended(number)
        if copy is None:
            return []
        candidate = self._candidates.copied(copy.running)
        if candidate is None:
            return self._copied(copy)
        if not copy.wanted or self._pool is None or copy.running.known != copy.known:
            self._writer.take_back(copy)
            candidate.copy = None
            self._clear(candidate)
            return []
        if not candidate.was_pulled:
            self._writer.keep(number, copy)
            return []
        return self._keep_too(candidate, copy)

    def _keep_too(self, candidate: Candidate, copy: Copy) -> list[Command]:
        """It was pulled: the pool keeps what is written for whoever has pulled it."""
        self._writer.settle(copy)
        candidate.copy = None
        if self._pool is None or copy.running.known != copy.known:
            self._writer.take_back(copy)
            self._clear(candidate)
            return []
        candidate.is_kept = True
        self._clear(candidate)
        return [self._commit(self._pool, copy, candidate.decode.name, is_there=True)]

    def _copied(self, copy: Copy) -> list[Command]:
        if not copy.wanted or self._pool is None:
            self._give(copy.running.pairs)
            self._writer.take_back(copy)
            return []
        if copy.running.known != copy.known:  # the pool has taken them back: now all is to be copied
            self._writer.take_back(copy)
            self._committing.appendleft(copy.running)
            self._is_stuck = False
            return []
        self._give(copy.running.pairs)
        self._outputs.forget([copy.running.request.id])  # the decode worker gets the whole output, and keeps it
        return [self._commit(self._pool, copy, copy.running.decode)]

    def _commit(self, pool: Member, copy: Copy, to: str, is_there: bool = False) -> Command:
        self._writer.handed_on(copy)
        entry = copy.running.entry(copy.known + copy.pages, self._names_of(copy.running))
        return Send(pool.name, Commit(entry, len(copy.known), to, is_there))

    def _names_of(self, running: Running) -> tuple[int, ...]:
        return self._names.pages_of(running, running.prefix) if self._policy.reuse else ()

    def _let_go(self, attempt: Attempt, pages: tuple[int, ...]) -> list[Command]:
        """The pool need not keep them for this attempt."""
        return [Send(self._pool.name, Release(*attempt))] if pages and self._pool is not None else []

    def _pool_lost(self) -> None:
        """Its pages are gone; what was being copied to them is copied anew once there is a pool."""
        self._asked_for.clear()
        candidates = {id(one.running) for one in self._candidates}
        again = [one for one in self._writer.pool_lost() if id(one) not in candidates]
        self._committing = deque([*again, *self._committing])
        for one in self._candidates:
            if one.copy is not None and one.copy.wanted:
                one.copy = None
            one.is_kept = one.has_asked = False
            self._clear(one)

    # --- What is here

    def _taken(self) -> Iterable[Running]:
        """All that are through and have pairs."""
        copied = [copy.running for copy in self._writer.copies]
        return [*self._committing, *copied, *self._candidates.seats]

    def _through_attempts(self) -> list[Attempt]:
        here = [one.running for one in self._candidates.here]
        candidates = {id(one.running) for one in self._candidates}
        copied = [copy.running for copy in self._writer.copies if copy.wanted and id(copy.running) not in candidates]
        return [running.key for running in (*self._committing, *copied, *here)]

    @property
    def _most_urgent_need(self) -> int:
        """Pairs that the prompt needs that has waited longest."""
        first = next(iter(self._waiting), None)
        return 0 if first is None else units_for(self._room_for(first), self._tokens_in_pair)
