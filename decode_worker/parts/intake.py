"""Take candidates in: from the pool in a batch, or offered by a prefill worker."""

from __future__ import annotations

from alignedserve.core import Entry, Role, units_for
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.cancelled import CancelledAttempts
from alignedserve.protocol.commands import Command, PrepareSyntax, Send
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, Received, SyntaxReady
from alignedserve.protocol.messages import Attempt, Batch, Cancel, Decline, Expect, Kept, Member, Offer, Release
from alignedserve.scheduling.policy import Room
from alignedserve.scheduling.promise import promise
from alignedserve.worker.parts.part import CorePart


class Intake(CorePart):
    def __init__(self, stores: Stores) -> None:
        self._limits, self._policy = stores.limits, stores.policy
        # KV comes from device to device to pairs that no other request may enter meanwhile.
        self._is_direct = stores.setup.direct and stores.policy.pairs.why_not_direct is None
        self._roster, self._pool, self._here, self._candidates = (
            stores.roster,
            stores.pool,
            stores.here,
            stores.candidates,
        )
        self._batch, self._memory, self._queue, self._holds = stores.batch, stores.memory, stores.queue, stores.holds
        self._retirement, self._notes, self._writer = stores.retirement, stores.notes, stores.writer
        self._decisions = stores.decisions
        self._cancelled = CancelledAttempts()

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(pool, Batch() as batch):
                return self._take_batch(pool, batch, now)
            case Received(sender, Offer() as offer):
                return self._consider(sender, offer, now)
            case Received(pool, Kept() as kept):
                return self._note_copy(pool, kept)
            case SyntaxReady(request, attempt):
                self._candidates.syntax_ready((request, attempt))
            case Received(message=Cancel(request, attempt)):
                self._cancelled.add(request, attempt)
            case MemberJoined(member) if member.role is Role.PREFILL:
                if self._is_direct and member.transport:
                    self._candidates.met(member)
            case MemberLost(member) if member.role is Role.PREFILL:
                self._candidates.buffers_lost(member)
                self._note_lost(self._candidates.lost(member))
            case MemberLost(member) if member == self._pool.member:
                self._here.transfers.pool_lost()
                self._note_lost(self._candidates.pool_lost())
        return []

    def _note_lost(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._notes.note("lost", attempt)

    # --- From the pool

    def _take_batch(self, pool: str, batch: Batch, now: float) -> list[Command]:
        """Take what the pool hands out as candidates.

        A pool that took this worker for dead may hand out again what is here: it goes on as it is. A pool that others
        took for dead may hand out an attempt whose next one is here already.
        """
        is_request = batch.is_pinned or batch.is_dynamic
        if not is_request and batch.entries:
            self._batch.comes([entry.num_held for entry in batch.entries])
        here, over = dict(sorted(self._roster.attempts())), list[Command]()
        for entry in batch.entries:
            key = name, attempt = entry.request.id, entry.request.attempt
            if here.get(name, -1) > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._holds.add(key)
            if here.get(name) == attempt:
                self._has_pages(key, entry, entry.pages)
            else:
                found_for = self._batch.tag(entry.num_held, self._here.with_kv) if batch.is_dynamic else 0
                number = 0 if is_request else self._batch.num_batches
                over += self._add(entry, None, batch.is_pinned, now, batch=number, found_for=found_for)
        return over

    def _has_pages(self, attempt: Attempt, entry: Entry | None, pages: tuple[int, ...]) -> bool:
        """Note the pool's pages of this attempt; return whether it is a candidate, or is being received."""
        is_waiting = self._candidates.has_pages(attempt, entry, pages)
        return is_waiting or self._here.transfers.has_pages(attempt, pages)

    def _add(
        self,
        entry: Entry,
        source: Member | None,
        is_pinned: bool,
        now: float,
        batch: int = 0,
        has_pool: bool = True,
        found_for: int = 0,
    ) -> list[Command]:
        """Add a candidate. It joins when its syntax is compiled."""
        due = promise(entry.request, self._policy, len(entry.output), entry.due)
        due.served(now)  # it waits from now on
        due_at = due.due_at(now)
        candidate = JoinCandidate(entry, source, is_pinned, due, due_at, now, batch, found_for, has_pool=has_pool)
        sender = source or self._pool.member
        how = "pinned" if is_pinned else "in a batch" if batch else "for the running batch" if found_for else "offered"
        name, ahead = "" if sender is None else sender.name, len(self._candidates)
        since_s = 0.0 if source else now - entry.request.arrival_at
        self._decisions.note(Kind.CANDIDATE, entry.request, name, entry.prefix, ahead, since_s, why=how)
        candidate.awaits_syntax = bool(entry.request.sampling.syntax)
        self._candidates.add(candidate)
        return [PrepareSyntax(entry.request)] if candidate.awaits_syntax else []

    def _note_copy(self, pool: str, kept: Kept) -> list[Command]:
        """Note that the pool has a copy of what came from a prefill worker: it lacks what is written from now on."""
        attempt = (kept.request, kept.attempt)
        is_here = attempt in self._roster.attempts()  # and not only its pairs, until what comes has come
        having = (*self._roster.occupants(), *self._candidates.evicted, *self._queue.waiting.named(kept.request))
        running = next((running for running in having if is_here and running.key == attempt), None)
        is_candidate = self._has_pages(attempt, None, kept.pages)
        if not (is_here or is_candidate):
            return [Send(pool, Release(*attempt))]
        self._holds.add(attempt)  # let go of too where what is on its way there is wanted no more
        if running is not None and running.num_lost:
            return self._holds.release(attempt)
        if running is not None and not self._writer.num_written(running):
            full = len(running.request.tokens) // self._limits.page_size  # of the prompt, as it was handed on
            running.known, running.names = kept.pages[:full], kept.names[:full] or running.names
            running.looked_up = -1  # where it waits it may be seated on them
        return []

    # --- From a prefill worker

    def _consider(self, sender: str, offer: Offer, now: float) -> list[Command]:
        """Take the offer, or decline it. A candidate that is not declined waits its turn at the sender.

        The sender repeats its offer until the request is pulled, or until it has an answer."""
        entry = offer.entry
        source, name, attempt = self._candidates.peer(sender), entry.request.id, entry.request.attempt
        here = max((known for request, known in self._roster.attempts() if request == name), default=-1)
        if here >= attempt or self._here.transfers.has_come((name, attempt)):
            is_asked = (name, attempt) in self._asked
            return [] if is_asked else [Send(sender, Cancel(name, attempt))]  # it has nothing to send any more
        if (name, attempt) in self._cancelled:
            return [Send(sender, Cancel(name, attempt))]  # the sender may not have heard of it
        is_taken = offer.is_pinned or not offer.has_pool or self._has_room_beyond(entry)
        if source is None or self._retirement.is_retiring or not is_taken:
            return [Send(sender, Decline(name, attempt))]
        return self._add(entry, source, offer.is_pinned, now, has_pool=offer.has_pool)

    @property
    def _asked(self) -> list[Attempt]:
        """Return the attempts that are candidates, or are being received."""
        return [*self.attempts(), *(transfer.running.key for transfer in self._here.transfers.wanted)]

    def _has_room_beyond(self, entry: Entry) -> bool:
        """Return whether there is room for this entry and for all candidates that wait already."""
        here, waiting = self._here, self._candidates
        if self._queue.waiting or here.had_shortage or here.num_seated + len(waiting) >= self._limits.max_batch:
            return False
        is_whole, size = self._policy.room is Room.WHOLE, self._limits.block_size
        entries = (entry, *(candidate.entry for candidate in waiting.waiting))
        tokens = [taken.request.most_tokens if is_whole else taken.num_held + 1 for taken in entries]
        return sum([units_for(each, size) for each in tokens]) <= self._memory.num_free

    # --- Candidates

    def expect(self, told: Expect, now: float) -> list[Command]:
        """Note the predicted length of a candidate."""
        self._candidates.expect(told, self._policy, now)
        return []

    def drop(self, request: str, attempt: int) -> list[Command]:
        dropped = self._candidates.drop(request, attempt)
        return [command for key in dropped for command in self._holds.release(key)]

    def attempts(self) -> list[Attempt]:
        return [candidate.key for candidate in self._candidates.waiting]
