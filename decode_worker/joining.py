"""Requests that get seats: candidates, copied from the pool or pulled from another worker, and waiting prompts.

candidate ── a seat: CopyIn, or Pull and ReceiveKv ──▶ joining or receiving ──▶ resident
waiting ──── a seat ──▶ prompt, after a copy of the pool's pages of the beginning
"""

from __future__ import annotations

from alignedserve.core import units_for
from alignedserve.decode_worker.leaving import Leaving
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, Send
from alignedserve.protocol.events import CopiedIn, KvReceived
from alignedserve.protocol.messages import Decline
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.slo import Rank, Standing, Work
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import JoinCandidate, WorkerRequest
from alignedserve.worker.step.states import State


class Seats(WorkerPart):
    """Gives seats: to candidates, which join the decoding requests in order, and to waiting prompts.

    KV in the pool is copied: all of a candidate, or the beginning of a prompt. KV on another worker is pulled."""

    def __init__(self, worker: Worker, leaving: Leaving) -> None:
        super().__init__(worker)
        self._leaving = leaving
        self._new: list[int] = []  # copies to prompts, not ordered yet
        self.num_reused_tokens = 0  # that were not computed because the pool had KV
        self.num_spoiled_pages = 0  # of the pool that were not intact

    def seat_all(self, now: float) -> list[Command]:
        """Seat candidates, which have waited already, and then prompts."""
        self._here.forget_shortage()  # others may take the seats of requests that have ended
        commands = self._seat_candidates(now)
        if self.takes_prompts(now):
            commands += self._seat_prompts(now)
        return commands

    # --- Candidates

    def next_candidate(self, now: float) -> JoinCandidate | None:
        """Return the candidate that joins next; None where none may join now.

        Prompts of chats, and requests that had to leave and wait here, come before best-effort candidates; other
        prompts come after. A candidate that had to leave joins again when another request has ended: otherwise the two
        would take turns."""
        first = self._candidates.first(now)
        if first is None or (first.is_evicted and self._here.is_short) or self._here.is_reserved:
            return None
        if (levels := self._scheduler.levels) is not None:  # a prompt of a higher level may wait for memory
            at = self._memory.context(now)
            prompt = levels.first_waiting(self._queue.waiting, at)
            is_before = prompt is not None and levels.level(prompt, at) < levels.level(first.running, at)
            return None if is_before else first
        return None if self._queue.waiting.come_first and not (first.is_pinned or first.is_rt) else first

    def takes_prompts(self, now: float) -> bool:
        """Return whether prompts may be seated on free memory: no candidate waits, and no request just left."""
        return self.next_candidate(now) is None and not self._here.is_short

    def cannot_wait(self, candidate: JoinCandidate, now: float) -> bool:
        """Return whether others have to leave for the candidate, which is pinned or has no slack left."""
        if not (candidate.is_rt and self._policy.is_rt_first):
            return False
        times, late = self._pace.times, self._policy.late
        return candidate.is_pinned or self._standing(candidate, now).rank(times, late) is Rank.URGENT_RT

    def _seat_candidates(self, now: float) -> list[Command]:
        """Seat candidates in order; no candidate overtakes the first."""
        commands, ordering, times, late = list[Command](), self._policy.ordering, self._pace.times, self._policy.late
        if not ordering.is_by_arrival:  # else candidates are sorted as they come
            sort = ordering.of_waits.sort
            self._candidates.arrange(
                self._steps.number, lambda requests: sort(requests, lambda of: self._standing(of, now), times, late)
            )
        while (first := self.next_candidate(now)) is not None:
            running = first.running
            room = self._memory.room_for(running)
            if self.cannot_wait(first, now):
                commands += self._leaving.yield_to(running, room, now)
            elif self._policy.swaps:
                commands += self._leaving.swap_for(running, room, now) or ()
            if not self._has_seat(running):
                break
            memory, is_pooled = self._memory, first.source is None
            if not (memory.seat_beside_others(running, has_kv=True) if is_pooled else memory.seat(running, room)):
                break
            if is_pooled:
                self._candidates.forget_copy(first)
            if not first.is_evicted:  # the wait here is over: what it did to the promise is forgotten
                due = promise(running.request, self._policy, len(running.output), first.came.due)
                self._queue.waiting.set_promise(running, due)
            source = first.source or self._pool.member
            self._decisions.note(Kind.JOINING, running.request, "" if source is None else source.name, running.prefix)
            running.came_with(running.prefix)
            self._tag(first, running, now)
            if first.is_rt and not first.is_evicted:
                self._pace.coming.joined(running.request.slo.tbt_s, now)
            commands += self._here.drop(first.key[0], first.key[1] - 1)
            if first.source is None:
                commands += self._copy_in(running, first.came.pages, running.fetched_from)
            else:  # the prefill worker is to send the KV to the blocks of the request
                self._here.move(running, State.RECEIVING)
                number = self._candidates.begin_transfer(first, first.source)
                if not first.is_evicted:
                    self._notes.note("joined", first.key)  # from now on lost with this worker
                receive = ReceiveKv(number, first.source.holder, running.blocks, running.kept_tokens)
                commands += (receive, first.pull)
        return commands

    def _standing(self, candidate: JoinCandidate, now: float) -> Standing:
        """Return the standing of a candidate, which needs a copy and a decode for its next token."""
        work = Work(transfer_s=candidate.running.num_held * self._pace.copy_token_s)
        return candidate.running.promise.standing(now, work, self._pace.times)

    def _tag(self, candidate: JoinCandidate, running: WorkerRequest, now: float) -> None:
        """Tag the request with the running batch where its length is in that batch's band. The first member of the next
        batch begins a batch switch."""
        is_found = 0 < candidate.found_for == self._batch.number
        found = self._batch.number if is_found else self._batch.tag(running.num_held, self._here.with_kv)
        running.batch = candidate.batch or found
        if candidate.batch:
            if candidate.batch != self._batch.number:
                self._counts.num_switches += 1
                self._batch.begins(candidate.batch)
            self._batch.joined(now - candidate.since)

    def _has_seat(self, running: WorkerRequest) -> bool:
        """Return whether there is a seat for the request: free, or of a best-effort request that may be displaced."""
        if self._here.num_seated < self._limits.max_batch:
            return True
        displaces = running.promise.is_rt and self._policy.is_rt_first
        others = len(self._here.best_effort) if displaces else 0
        return self._here.num_seated - others < self._limits.max_batch

    # --- Prompts

    def seat(self, prompt: WorkerRequest) -> None:
        """Give a prompt with blocks its seat; the prompt runs after a copy of the pages that the pool has."""
        has_left = len(prompt.output) > len(prompt.request.emitted)  # then recomputed without `schedule.evict`
        may_fetch = not prompt.kv.form and (self._policy.evict or not has_left) and self._pool.member is not None
        if self._pages.has_to_fetch(prompt) and may_fetch:
            self._new.append(self._here.begin_copy(prompt, State.FETCHING))
            if not self._memory.copies_beside:
                self._pace.fetched_s += prompt.fetch_s
            prompt.begin_fetch(self._limits.page_size)
        else:
            prompt.end_fetch()
            self._here.move(prompt, State.PROMPT)
        self._decisions.note(Kind.SEATED, prompt.request, tokens=prompt.prefix)
        self._notes.note("joined", prompt.key)

    def _seat_prompts(self, now: float) -> list[Command]:
        """Seat waiting prompts in order while there is room, where steps are planned without seating prompts.

        No prompt overtakes the first that does not wait for a page: otherwise a large prompt could wait for ever.
        No prompt is tried again while nothing has changed."""
        memory, scheduler, waiting = self._memory, self._scheduler, self._queue.waiting
        if not (waiting and self._policy.is_plain):
            return self.fetch()
        next_pages = memory.next_pages(waiting)
        while not memory.is_stuck:
            in_order = scheduler.seating_order(waiting, self._steps.newest)
            first = next((prompt for prompt in in_order if not next_pages.holds_up(prompt)), None)
            if first is None or self._here.num_seated >= scheduler.most_seated or not memory.seat_beside_others(first):
                break
            self.seat(first)
            next_pages.add(first)
        return self.fetch()

    # --- Copies from the pool

    def fetch(self) -> list[Command]:
        """Order the copies to newly seated prompts, behind copies of the requests that left the blocks."""
        new, self._new = self._new, []
        return [*self._memory.orders(), *map(self._fetch, new)] if new else []

    def _fetch(self, number: int) -> Command:
        """Return the order to copy what the device lacks of a prompt."""
        prompt = self._here.copies[number]
        blocks = prompt.blocks[: units_for(prompt.prefix, self._limits.block_size)]
        return self._copy(number, prompt.known, blocks, prompt.tokens(0, prompt.prefix), prompt.fetched_from)

    def _copy_in(self, running: WorkerRequest, pages: tuple[int, ...], start: int = 0) -> list[Command]:
        """Copy all of a request to its blocks from these pages, from the page that begins with token `start` on."""
        number = self._here.begin_copy(running, State.JOINING)
        # The copy, or the first step, may end this process before another frame gets out. So the router hears of the
        # request now, and charges the death to the request.
        self._notes.note("joined", running.key)
        return [*self._memory.orders(), self._copy(number, pages, running.blocks, running.kept_tokens, start)]

    def _copy(
        self, number: int, pages: tuple[int, ...], blocks: tuple[int, ...], tokens: tuple[int, ...], start: int
    ) -> CopyIn:
        assert self._pool.member is not None, "pages and entries are lost with their pool"
        lacking = pages[start // self._limits.page_size :]
        return CopyIn(number, self._pool.member.holder, lacking, blocks, tokens, start, self._memory.copies_beside)

    def copied_in(self, event: CopiedIn, now: float) -> list[Command]:
        """Let the request run, now that its copy has ended.

        No other request gets KV that is not intact: the pool forgets these pages, since the next attempt could commit
        them again, with the rest from a device. A prompt is recomputed. For a request that was to decode, the owner
        starts the next attempt, which begins with the prompt."""
        here, running = self._here, self._here.end_copy(event.number)
        if running is None:  # the copy was to a buffer of a form
            return []
        if running.state is State.ABANDONED:
            here.move(running, State.GONE)
            self._memory.release(running)
            return []
        is_prompt, pages = running.state is State.FETCHING, running.known
        if is_prompt:
            running.end_fetch()
            self._memory.reconsider()  # another prompt may have waited for these pages
        if event.intact:
            here.move(running, State.PROMPT if is_prompt else State.RESIDENT)
            if is_prompt:
                running.came_with(running.prefix)
                self.num_reused_tokens += running.prefix - running.fetched_from
            else:
                self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(here.residents))
            self._pages.publish(running)
            # A request that lacks its beginning is copied to other pages next time.
            is_let_go = self._memory.dropping.drop(running) if is_prompt else running.num_lost > 0
            return self._holds.release(running.key) if is_let_go else []
        if is_prompt:
            running.forget_known()
            self._queue.put_back(running)
        else:
            here.move(running, State.GONE)
            self._memory.release(running)
            self._notes.note("lost", running.key)
            self._decisions.note(Kind.LOST, running.request, why="its KV in the pool was not intact")
        if event.number in here.from_lost_pool:
            return [] if is_prompt else self._holds.release(running.key)
        self.num_spoiled_pages += len(pages)
        self._counts.num_refused += 1
        return [*self._pool.tell_spoiled(pages), *self._holds.release(running.key)]

    # --- KV from another worker

    def received(self, event: KvReceived, now: float) -> list[Command]:
        candidate = self._candidates.end_transfer(event.source, event.number, event.intact)
        self._memory.reconsider()
        self._counts.num_failed_transfers += not event.intact
        running = candidate.running
        if running.state is State.ABANDONED:
            self._here.move(running, State.GONE)
            self._memory.release(running)
            return []
        if not event.intact:
            return self._go_without(candidate)
        self._here.move(running, State.RESIDENT)
        self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(self._here.residents))
        self._memory.pages.publish(running)
        return self._holds.release(running.key) if running.num_lost else []

    def _go_without(self, candidate: JoinCandidate) -> list[Command]:
        """Recompute the request, copy it from the pool, or leave it to the sender or the owner."""
        running, source, attempt = candidate.running, candidate.source, candidate.key
        if candidate.is_evicted:
            self._queue.put_back(running)
            return []
        if candidate.came.pages and self._pool.member is not None:
            return self._copy_in(running, candidate.came.pages)
        self._here.move(running, State.GONE)
        self._memory.release(running)
        released = self._holds.release(attempt)
        is_sender_lost = source is None or self._candidates.peers.get(source.name) != source
        if source is None or is_sender_lost or candidate.is_copied:
            self._decisions.note(Kind.LOST, running.request, why="its KV did not come, and its sender has it no more")
            # The router believes the request here, so it does not charge the sender's end to the request.
            self._notes.note("cut" if is_sender_lost else "lost", attempt)
            return released
        self._notes.note("returned", attempt)
        return [*released, Send(source.name, Decline(*attempt, is_failed=True))]

    def repeat(self, to: str) -> list[Command]:
        source = self._candidates.peers.get(to)
        return [candidate.pull for candidate in self._here.coming if candidate.source == source]
