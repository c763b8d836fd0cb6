"""Let candidates join the requests that decode: in their order, as soon as there is a seat and memory."""

from __future__ import annotations

from alignedserve.decode_worker.parts.preempting import Preempting
from alignedserve.decode_worker.parts.seats import Seats
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, CopyIn
from alignedserve.protocol.events import CopiedIn, Event, MemberLost
from alignedserve.protocol.messages import Member
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running

_WEIGHT = 0.1  # of the newest join in the mean


class Joining(CorePart):
    def __init__(self, stores: Stores, seats: Seats, preempting: Preempting) -> None:
        self._limits, self._roster, self._pool, self._pace = stores.limits, stores.roster, stores.pool, stores.pace
        self._here, self._candidates, self._line = stores.here, stores.candidates, stores.line
        self._batch, self._memory, self._queue = stores.batch, stores.memory, stores.queue
        self._order, self._holds = stores.order, stores.holds
        self._notes, self._faults, self._copy_numbers = stores.notes, stores.faults, stores.copy_numbers
        self._retirement = stores.retirement
        self._seats, self._preempting, self._decisions = seats, preempting, stores.decisions
        self._beside = stores.copies_beside
        self._from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when their pool was lost
        self.mean_join_s = 0.0  # from a batch's arrival until a member joins
        self.num_switches = 0  # batches of which a member has joined

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case CopiedIn(number, intact) if number in self._here.joining:
                return self._end_copy(number, intact)
            case MemberLost(member) if member == self._pool.member:
                self._from_lost_pool = frozenset(self._here.joining)
        return []

    # --- The next candidate

    def next_candidate(self, now: float) -> JoinCandidate | None:
        """Return the candidate that joins next, if it may join now.

        Prompts of chats, and requests that had to leave and wait here, come before best-effort candidates; other
        prompts come after them. A candidate that had to leave joins again when another request has ended: otherwise the
        two would take turns."""
        first = self._candidates.first(now)
        if first is None or (first.evicted is not None and self._here.is_short) or self._retirement.is_reserved:
            return None
        if self._pace.policy.swaps:
            return None if self._prompt_is_before(first, now) else first
        return None if self._queue.waiting.come_first and not (first.is_pinned or first.is_rt) else first

    def _prompt_is_before(self, candidate: JoinCandidate, now: float) -> bool:
        """Return whether a prompt of a higher level waits for memory."""
        prompt, level = self._order.first_waiting(self._queue.waiting, now), self._order.scheduler.level
        return prompt is not None and level(prompt, now) < level(self._as_running(candidate), now)

    def _as_running(self, candidate: JoinCandidate) -> Running:
        return candidate.as_running(self._pace.policy, self._limits.page_size)

    def takes_prompts(self, now: float) -> bool:
        """Return whether prompts may be seated on free memory: no candidate waits for it, nor a request that has just
        left for the pool for lack of it."""
        return self.next_candidate(now) is None and not self._here.is_short

    def cannot_wait(self, candidate: JoinCandidate, now: float) -> bool:
        """Return whether the candidate cannot wait for memory that comes free by itself: it was pinned for that, or its
        slack has run out since."""
        if not (candidate.is_rt and self._pace.policy.is_rt_first):
            return False
        return candidate.is_pinned or self._line.is_urgent(candidate, now)

    def seat(self, now: float) -> list[Command]:
        """Seat candidates, which have waited already, and then prompts."""
        self._here.forget_shortage()  # others may take the seats of requests that have ended
        commands = self._seat_candidates(now)
        if self.takes_prompts(now):
            commands += self._seats.seat_prompts(now)
        return commands

    def _seat_candidates(self, now: float) -> list[Command]:
        """Seat candidates in their order; no candidate overtakes the first."""
        self._line.arrange(now)
        commands: list[Command] = []
        while (first := self.next_candidate(now)) is not None:
            running = self._as_running(first)
            room = self._memory.room_for(running)
            if self.cannot_wait(first, now):
                commands += self._preempting.yield_to(running, room, now)
            elif self._pace.policy.swaps:
                commands += self._preempting.swap_for(running, room, now) or ()
            seat = self._memory.seat if first.source is not None else self._memory.seat_from_pool
            if not self._seats.has_seat(running) or not seat(running, room, self._queue.waiting, now):
                break
            self._candidates.take(first)
            self._note_seat(first, running)
            if first.source is None and running.request.deaths:
                # Its first step may end this process before a frame that is sent then has left: the router hears of it
                # now, while its KV is still being copied, and charges the death to it.
                self._notes.note("joined", first.key)
            running.came_with_kv = True
            self._tag(first, running, now)
            if first.is_rt and first.evicted is None:
                self._pace.coming.joined(running.request.slo.tbt_s, now)
            commands += self._roster.drop(first.key[0], first.key[1] - 1)
            if first.source is None:
                commands += self.copy_in(running, first.entry.pages, running.fetched_from)
            else:
                commands += self._pull(first, running, first.source)
        return commands

    def _note_seat(self, candidate: JoinCandidate, running: Running) -> None:
        source = candidate.source or self._pool.member
        self._decisions.note(Kind.JOINING, running.request, "" if source is None else source.name, running.prefix)

    def _tag(self, candidate: JoinCandidate, running: Running, now: float) -> None:
        """Count the request to the batch that runs where it is in its band; the first member of the next batch begins
        a batch switch."""
        is_found = 0 < candidate.found_for == self._batch.number
        found = self._batch.number if is_found else self._batch.tag(running.num_held, self._here.with_kv)
        running.batch = candidate.batch or found
        if candidate.batch:
            if candidate.batch != self._batch.number:
                self.num_switches += 1
                self._batch.begins(candidate.batch)
            self.mean_join_s += _WEIGHT * (now - candidate.since - self.mean_join_s)

    # --- Its KV

    def _pull(self, candidate: JoinCandidate, running: Running, source: Member) -> list[Command]:
        """Have the prefill worker send the KV to the pairs of the request."""
        transfer = self._here.transfers.begin(candidate, running, source)
        if candidate.evicted is None:
            self._notes.note("joined", candidate.key)  # from now on it is lost with this worker
        return [transfer.command, transfer.pull]

    def copy_in(self, running: Running, pages: tuple[int, ...], start: int = 0) -> list[Command]:
        """Copy the request's pages of the pool to its pairs, from the page that begins with token `start` on."""
        assert self._pool.member is not None, "entries are lost with their pool"
        number = next(self._copy_numbers)
        self._here.joining[number] = running
        tokens, right = running.kept_tokens, running.from_right
        holder, lacking = self._pool.member.holder, pages[start // self._limits.page_size :]
        copy = CopyIn(number, holder, lacking, running.pairs, tokens, start, right, self._beside)
        return [*self._memory.copies(), copy]

    def _end_copy(self, number: int, intact: bool) -> list[Command]:
        """Let a request run whose KV is here. A copy is right or counts as nothing: then the request's owner starts the
        next attempt, which prefills it again."""
        running = self._here.joining.pop(number)
        if intact:
            self._here.residents[running.request.id] = running
            self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(self._here.residents))
            self._notes.note("joined", running.key)
            self._memory.pages.publish(running)
            return self._holds.release(running.key) if running.dropped else []  # the next copy is of other tokens
        self._memory.release(running)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="its KV in the pool was not intact")
        refused = [] if number in self._from_lost_pool else self._refuse(running)
        return [*refused, *self._holds.release(running.key)]

    def _refuse(self, running: Running) -> list[Command]:
        """Have the pool forget what it has of a request: its next attempt may find the rest on a device, and commit it
        with the same pages again."""
        self._faults.num_refused += 1
        return self._pool.tell_spoiled(running.known)
