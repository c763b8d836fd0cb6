"""The seats of a decode worker: prompts that wait here are seated, and requests that are not wanted any more leave.

waiting ── a seat, and nothing known ────────────────────▶ prompt
   └────── a seat, and known pages ──▶ fetching ─────────▶ prompt, from its first unknown token on
                                          └── not intact: waiting, and computed anew; the pool hears Spoiled
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.core import units_for
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, CopyIn
from alignedserve.protocol.events import CopiedIn, Event, MemberLost, Received, StepDone
from alignedserve.protocol.messages import Attempt, Expect
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running


class Fetching(CorePart):
    """Copies what the pool has of a prompt to its pairs; the prompt runs from there on."""

    def __init__(self, stores: Stores) -> None:
        self._limits, self._policy, self._pool, self._memory = stores.limits, stores.policy, stores.pool, stores.memory
        self._here, self._queue, self._holds, self._pace = stores.here, stores.queue, stores.holds, stores.pace
        self._faults, self._copy_numbers, self._pages = stores.faults, stores.copy_numbers, stores.pages
        self._dropping, self._beside = stores.dropping, stores.copies_beside
        self._from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when their pool was lost
        self._new: list[int] = []  # copies that are not ordered yet
        self.num_reused_tokens = 0  # that were not computed because the pool had their KV
        self.num_spoiled_pages = 0  # of the pool that were not intact

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case CopiedIn(number, intact) if number in self._here.fetching:
                return self._end(number, intact)
            case MemberLost(member) if member == self._pool.member:
                self._from_lost_pool = frozenset(self._here.fetching)
        return []

    def seat(self, prompt: Running) -> None:
        """Let a prompt run that has got its pairs, after what the pool knows of it has been fetched."""
        if self._pages.has_to_fetch(prompt) and self._may_fetch(prompt) and self._pool.member is not None:
            number = next(self._copy_numbers)
            self._here.fetching[number] = prompt
            self._new.append(number)
            if not self._beside:
                self._pace.note_fetch(prompt)
            prompt.prefix = len(prompt.known) * self._limits.page_size  # a slot that it loses from now on is saved
        else:
            prompt.end_fetch()
            self._here.prompts[prompt.request.id] = prompt

    def _may_fetch(self, prompt: Running) -> bool:
        """Return whether it becomes KV, and is not to be computed anew because it had to leave (`schedule.evict`)."""
        has_left = len(prompt.output) > len(prompt.request.emitted)
        return not prompt.blocks and (self._policy.evict or not has_left)

    def fetch(self, now: float) -> list[Command]:
        """Order the copies to prompts that were seated since: behind those of requests that left them their pairs."""
        new, self._new = self._new, []
        return [*self._memory.copies(), *map(self._copy, new)] if new else []

    def _copy(self, number: int) -> Command:
        """Return the order to copy what the device lacks of a prompt."""
        assert self._pool.member is not None, "known pages are forgotten with their pool"
        prompt, limits = self._here.fetching.get(number) or self._here.abandoned[number], self._limits
        start = prompt.fetched_from
        tokens, pages = prompt.tokens(0, prompt.prefix), prompt.known[start // limits.page_size :]
        pairs = prompt.pairs[: units_for(len(tokens), limits.block_size)]
        return CopyIn(number, self._pool.member.holder, pages, pairs, tokens, start, prompt.from_right, self._beside)

    def _end(self, number: int, intact: bool) -> list[Command]:
        """Let the prompt run. KV that is not intact is computed anew, and no other request gets it."""
        prompt = self._here.fetching.pop(number)
        prompt.end_fetch()
        self._memory.reconsider()  # another prompt may have waited for these pages
        if intact:
            self._here.prompts[prompt.request.id] = prompt
            prompt.came_with_kv = True
            self.num_reused_tokens += prompt.prefix - prompt.fetched_from
            self._pages.count_cached(prompt)
            self._pages.publish(prompt)
            self._dropping.drop(prompt)
            return self._holds.release_all(self._dropping.take_let_go())
        pages, prompt.known = prompt.known, ()
        self._queue.put_back(prompt)
        if number in self._from_lost_pool:
            return []
        self.num_spoiled_pages += len(pages)
        self._faults.num_refused += 1
        return [*self._pool.tell_spoiled(pages), *self._holds.release(prompt.key)]


class Seats(CorePart):
    def __init__(self, stores: Stores, fetching: Fetching) -> None:
        self._roster, self._fetching = stores.roster, fetching
        self._limits, self._policy, self._here, self._memory = stores.limits, stores.policy, stores.here, stores.memory
        self._queue, self._order, self._holds, self._notes = stores.queue, stores.order, stores.holds, stores.notes
        self._decisions = stores.decisions

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case StepDone():
                self._memory.step_ended()
            case CopiedIn(number) if number in self._here.abandoned:
                self._memory.release(self._here.abandoned.pop(number))
            case Received(message=Expect(request=request)):
                if (resident := self._here.residents.get(request)) is not None:
                    self._order.moved(resident)
        return []

    def named(self, request: str) -> list[Running]:
        """Return the requests of this name that do not wait for a seat."""
        return [running for running in self._roster.occupants() if running.request.id == request]

    def seat(self, prompt: Running) -> None:
        """Give a prompt its seat, which has its pairs."""
        self._queue.waiting.remove(prompt)
        self._fetching.seat(prompt)
        self._decisions.note(Kind.SEATED, prompt.request, tokens=prompt.prefix)
        self._notes.note("joined", prompt.key)

    def seat_prompts(self, now: float) -> list[Command]:
        """Seat waiting prompts in their order, as far as there is room, where the step's choice does not seat them."""
        for prompt in self._first_come():
            is_blocked = not prompt.promise.is_rt and bool(self._memory.lacking())
            if is_blocked or not self._order.scheduler.has_seat(self._here.num_seated):
                break
            if not self._memory.seat_prompt(prompt, self._queue.waiting, now):
                break
            self.seat(prompt)
        return self._fetching.fetch(now)

    def _first_come(self) -> Iterator[Running]:
        """Yield waiting prompts that are seated without being chosen, in their order.

        No prompt overtakes the first one that does not wait for a page: otherwise a large prompt could wait for ever.
        Yield none while nothing has changed."""
        waiting = self._queue.waiting
        if not (self._policy.is_plain and waiting):
            return
        next_pages = self._memory.next_pages(waiting)
        while not self._memory.is_stuck:
            first = self._order.scheduler.first(waiting, lambda prompt: not next_pages.holds_up(prompt))
            if first is None:
                return
            yield first
            next_pages.add(first)

    def has_seat(self, running: Running) -> bool:
        """Return whether there is a seat for the request, free or of a best-effort request that it may displace."""
        if self._here.num_seated < self._limits.max_batch:
            return True
        displaces = running.promise.is_rt and self._policy.is_rt_first
        others = len(self._here.best_effort) if displaces else 0
        return self._here.num_seated - others < self._limits.max_batch

    # --- Requests that are here

    def drop(self, request: str, attempt: int) -> list[Command]:
        seated = self._here.take(request, attempt)
        for running in seated:
            self._memory.release_after_step(running)
        dropped = [*seated, *self._here.abandon(request, attempt)]
        return [command for running in dropped for command in self._holds.release(running.key)]

    def attempts(self) -> list[Attempt]:
        return [running.key for running in self._here_now()]

    def occupants(self) -> list[Running]:
        return [*self._here_now(), *self._here.kept]

    def _here_now(self) -> list[Running]:
        return [*self._here.seated, *self._here.joining.values(), *self._here.fetching.values()]
