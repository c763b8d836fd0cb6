"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ asking ──▶ waiting ──▶ fetching ──▶ running ──▶ ended (one token was enough)
               (what the  (no pairs)  (known pages    ├──▶ candidate ── Pull ──▶ gone (offering.py)
               pool knows)            to pairs)       │       └── Decline ─┐
                                                      └──▶ committing ◀────┴─▶ copying ──▶ Commit
                                                           (no pages)          (pairs to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. Of one that is
being copied, pairs and pages stay taken until the copy has ended. Pages that nothing waits for go back
to the pool: another worker may be waiting for them.

A real-time prompt runs at once, and asks for its pages when it is through. A best-effort one is seated when the pages
for all its KV are leased: while the arena has none for its class, it waits without a place on the device. Should they
be gone when it is through (the pool was lost, or took back what it held of the prompt), it waits where it is, but gives
its place to a real-time prompt that lacks room, and is computed anew. Where there is no pool it needs no pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.core import CacheKind, Chunk, Decode, ServiceClass, StepPlan, StepResult, units_for
from alignedserve.prefill_worker.buffering import BufferingCore
from alignedserve.prefill_worker.prefixes import Prefixes
from alignedserve.protocol.commands import Command, CopyIn, Send
from alignedserve.protocol.events import CopiedIn, Event, Received
from alignedserve.protocol.messages import ROUTER, Attempt, Expect, Member, Prefix, Release, Spoiled
from alignedserve.scheduling.policy import Room
from alignedserve.worker.core import WorkerSetup
from alignedserve.worker.leases import Need
from alignedserve.worker.step.chunks import chunk_of
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import PoolSeating, Seating


class PrefillCore(BufferingCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._prefixes = Prefixes(setup.limits.page_size, self._names)
        self._fetching: dict[int, Running] = {}  # by the number of the copy
        self.num_reused_tokens = 0
        self.num_spoiled_pages = 0
        self._running: dict[str, Running] = {}  # has pairs, in the order of arrival
        self.num_preemptions = 0

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {
            "requests": len(self._held_attempts()),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "outputs": self._outputs.num_kept,
            "written parts": self._writer.num_with_parts,
            "buffers": len(self._buffers),
        }

    @property
    def num_leased_pages(self) -> int:
        """A lease may outlast its request: the next one uses it."""
        return len(self.leased_pages)

    @property
    def leased_pages(self) -> tuple[int, ...]:
        return self._writer.leased

    def leased_for(self, service: ServiceClass) -> tuple[int, ...]:
        return self._writer.leased_for(service)

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(message=Prefix() as prefix):
                return self._prefix(prefix)
            case CopiedIn(number, intact) if number in self._fetching:
                return self._fetched(self._fetching.pop(number), intact)
        return super()._happened(event)

    @property
    def _tokens_in_pair(self) -> int:
        return self._limits.block_size * (2 if self._kind is CacheKind.HIDDEN else 1)

    def _go_on(self) -> list[Command]:
        places = self._make_place(self._most_urgent_need) if self._waiting else []
        commands = [*places, *self._offer_again(), *self._offer_all(), *self._copies(), *self._next_step()]
        return [*commands, *self._ask_for_chats(self._running.values())]

    def _next_step(self) -> list[Command]:
        if self._steps.running is not None:
            return []
        commands = self._seat_first_come()
        while True:
            selection = self._select((), tuple(self._running.values()), seats=len(self._waiting))
            commands += self._have_seats(selection.seated, selection.unseated)
            # Where all that were seated are fetched first, others may run.
            if selection.chunks or selection.decodes or not (selection.seated or self._made_room()):
                break
        # What is computed anew has a token of output; where that alone is left, it is chosen as a decode.
        selection.chunks += tuple(chunk_of(running, 1) for running in selection.decodes)
        return [*commands, *self._begin_step(selection)]

    def _seat_first_come(self) -> list[Command]:
        """Where who comes first is served first, all that there is room for; nobody overtakes the first for memory."""
        if not self._policy.is_plain or self._is_stuck or not self._waiting:
            return []
        seating = self._seating(len(self._waiting))
        for running in self._waiting:
            if not seating.may_seat(running):
                continue
            if not seating.most(running, running.num_ahead):
                break
            seating.take(running, running.num_ahead)
        self._is_stuck = True  # until memory or pages come
        return self._have_seats(seating.seated, seating.unseated)

    def _have_seats(self, seated: Iterable[Running], unseated: Iterable[Running]) -> list[Command]:
        """They run, after what the pool knows of them has been fetched; who made room for them is computed anew."""
        commands: list[Command] = []
        for running in seated:
            self._waiting.remove(running)
            if running.known and self._pool is not None:
                commands.append(self._fetch(running, self._pool))
            else:
                self._running[running.request.id] = running
        for running in unseated:
            self._committing.remove(running)
            self._writer.forget_parts(running)
            running.prefix = 0
            self.num_preemptions += 1
            self._waiting.add(running)
        return commands

    def _seating(self, seats: int) -> Seating:
        by_chunk, spare = self._policy.room is Room.CHUNKS, self._spare_pages if self._waiting else 0
        return PoolSeating(
            self._blocks,
            self._limits.num_pairs,
            self._tokens_in_pair,
            seats,
            by_chunk,
            self._room_for,
            self._has_long,
            spare_pages=spare,
            needs_pages=not self._needs_no_pool,
            pages_for=self._pages_for,
            idle=[one for one in self._committing if not one.promise.is_rt],
            is_hidden=self._kind is CacheKind.HIDDEN,
        )

    def _made_room(self) -> bool:
        """Where nothing can run, and nothing else that is under way gives memory back."""
        if self._fetching or self._writer.copies:
            return False
        if self._committing:
            # A real-time prompt that is through may lack the very pages that are kept for best-effort ones, which have
            # got memory for a part of theirs and lack what it has.
            prompts = [one for one in self._running.values() if not one.promise.is_rt]
            if not prompts or self._first_committing(ServiceClass.RT) is None:
                return False
        else:
            prompts = list(self._running.values())
            if len(prompts) < 2:
                return False
        self._uncrowd(self._running, prompts)
        self.num_preemptions += 1
        return True

    def _room_for(self, running: Running) -> int:
        return running.num_tokens

    def _named(self, request: str) -> Iterable[Running]:
        return (*super()._named(request), *self._prefixes.asking)

    def _expect_elsewhere(self, told: Expect) -> list[Command]:
        return [] if self._pool is None else [Send(self._pool.name, told)]

    def _unfinished(self) -> Iterable[Running]:
        return self._seats()  # until it is committed

    @property
    def _spare_pages(self) -> int:
        """At hand for best-effort prompts, and not yet for one that is seated; none while one that is through lacks
        some."""
        if self._pool is None or self._first_committing(ServiceClass.BE) is not None:
            return 0
        return self._writer.num_at_hand(ServiceClass.BE) - self._spoken_for

    @property
    def _spoken_for(self) -> int:
        """Pages of the best-effort prompts that are seated and not through."""
        seated = (*self._running.values(), *self._fetching.values())
        return sum(self._pages_for(one) for one in seated if not one.promise.is_rt)

    def _pages_for(self, running: Running) -> int:
        """That are to be written once all its tokens have KV."""
        return self._writer.pages_for(running, running.num_tokens)

    # --- What the pool knows of a prompt

    def _prefill(self, running: Running) -> list[Command]:
        ask = self._prefixes.ask(running) if self._policy.reuse and self._pool is not None else None
        if ask is None or self._pool is None:
            return super()._prefill(running)
        return [Send(self._pool.name, ask)]

    def _prefix(self, prefix: Prefix) -> list[Command]:
        running = self._prefixes.answered(prefix)
        if running is not None:
            return super()._prefill(running)
        attempt = (prefix.request, prefix.attempt)
        here = [one for one in (*self._seats(), *self._waiting) if one.key == attempt]
        for one in here:
            if not prefix.pages:
                self._writer.forget_parts(one)  # they come after what is to be written now
                one.known = ()
        return [] if here else self._let_go(attempt, prefix.pages)

    def _fetch(self, running: Running, pool: Member) -> Command:
        self._copy_number += 1
        self._fetching[self._copy_number] = running
        tokens = running.tokens(0, self._prefixes.tokens_in(running.known))
        pairs = running.pairs[: units_for(len(tokens), self._tokens_in_pair)]
        return CopyIn(self._copy_number, pool.holder, running.known, pairs, tokens, self._kind)

    def _fetched(self, running: Running, intact: bool) -> list[Command]:
        """Right or not at all: what is not intact is computed, and nobody else gets it."""
        self._running[running.request.id] = running
        if intact:
            running.prefix = self._prefixes.tokens_in(running.known)
            running.num_cached = min(running.prefix, len(running.request.prompt))
            self.num_reused_tokens += running.prefix
            return []
        pages, running.known = running.known, ()
        self.num_spoiled_pages += len(pages)
        if self._pool is None:
            return []
        return [self._refused(), Send(self._pool.name, Spoiled(pages)), *self._let_go(running.key, pages)]

    def _unknown(self, asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        if asker == ROUTER or self._pool is None:
            return super()._unknown(asker, attempts)
        return [Send(self._pool.name, Release(*attempt)) for attempt in attempts]

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        self._notes.has_less_to_run = True
        released: list[Command] = []
        for running, finish in self._emitted(plan.chunks, result):
            del self._running[running.request.id]
            if finish is None:
                released += self._through(running)
            else:
                self._give(running.pairs)
                self._writer.forget_parts(running)
                self._notes.ended(running)
                released += self._let_go(running.key, running.known)
        return [*released, *self._outputs.flush()]

    def _seated(self, request: str) -> Running | None:
        return self._running.get(request)

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._running.get(ran.request)
        if running is None or not running.is_at(ran):
            return []
        del self._running[ran.request]
        self._give(running.pairs)
        self._writer.forget_parts(running)
        self._outputs.drop(*running.key)
        self._notes.moved("lost", running.key)
        return self._let_go(running.key, running.known)

    # --- To the pool

    def _copies(self) -> list[Command]:
        """Copy orders for those that have pages; pages are asked for where those at hand are too few."""
        pool = self._writes_to
        if pool is None:
            return []
        commands: list[Command] = []
        for service in ServiceClass:
            while (running := self._first_committing(service)) is not None and not self._writer.is_writing(running):
                if self._unwritten(running) > self._writer.num_at_hand(service):
                    self._give_up_parts(service, self._running.values())
                    break
                self._committing.remove(running)
                commands.append(self._writer.begin(running, pool, running.prefix, service))
        commands += self._write_candidates(pool, self._spoken_for)
        commands += self._write_parts(pool, self._running.values())
        for service in ServiceClass:
            commands += self._writer.ask(pool, service, self._need(service))
        return commands

    def _need(self, service: ServiceClass) -> Need:
        """By the first one that is through: what all want together may be more than there will ever be. Where nobody
        is, by the best-effort prompt that has waited longest for a seat; nothing is kept for it while a real-time one
        that is through waits for pages, since its seat may be what that one has."""
        through = self._first_committing(service)
        if through is not None:
            wanted, at_hand = self._unwritten(through), self._writer.num_at_hand(service)
            return Need(kept=at_hand) if wanted <= at_hand else Need(wanted)  # it may wait for its part alone
        if service is ServiceClass.RT:
            return Need(kept=min(self._promised, self._writer.num_at_hand(service)))
        kept, at_hand = self._spoken_for, self._writer.num_at_hand(service)
        first = next(self._waiting.best_effort, None)
        if first is None or self._first_committing(ServiceClass.RT) is not None:
            return Need(kept=kept)
        wanted = self._pages_for(first)
        return Need(kept=at_hand) if wanted <= at_hand - kept else Need(wanted, kept, self._most_pages)

    @property
    def _most_pages(self) -> int:
        """For best-effort prompts that wait for a seat, as many as the device has room for."""
        most = units_for(self._limits.num_pairs * self._tokens_in_pair, self._limits.page_size)
        wanted = 0
        for running in self._waiting.best_effort:
            wanted += self._pages_for(running)
            if wanted >= most:  # there may be thousands
                return most
        return wanted

    @property
    def _awaits_the_pool(self) -> bool:
        return self._writer.awaits_the_pool or len(self._prefixes) > 0 or bool(self._candidates.here or self._buffers)

    def _ask_again(self) -> None:
        self._offers_again = True
        self._add_waiting(self._prefixes.overdue())
        self._writer.ask_again()

    def _pool_lost(self) -> None:
        self._add_waiting(self._prefixes.give_up())
        for running in self._seats():
            running.known = ()
        for running in self._waiting:
            running.known = ()
        super()._pool_lost()

    # --- What is here

    def _prompts_ahead(self) -> Iterable[Running]:
        return [*self._running.values(), *self._fetching.values(), *self._prefixes.asking]

    def _seats(self) -> list[Running]:
        return [*self._running.values(), *self._fetching.values(), *self._taken()]

    def _held_attempts(self) -> list[Attempt]:
        seated = [*self._running.values(), *self._fetching.values(), *self._waiting, *self._prefixes.asking]
        return [*(running.key for running in seated), *self._through_attempts()]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        leaving = self._waiting.drop(request, attempt)
        self._is_stuck = False
        for number, one in [*self._fetching.items()]:
            if one.is_of(request, attempt):
                del self._fetching[number]
                self._free(one.pairs)  # work is done in its order: whatever is written there next comes after the copy
                leaving.append(one)
        running = self._running.get(request)
        if running is not None and running.is_of(request, attempt):
            del self._running[request]
            self._writer.forget_parts(running)
            self._free(running.pairs)
            leaving.append(running)
        for one in [one for one in self._committing if one.is_of(request, attempt)]:
            self._committing.remove(one)
            self._writer.forget_parts(one)
            self._free(one.pairs)
            leaving.append(one)
        leaving += self._leave_candidates(request, attempt)
        leaving += self._writer.drop(request, attempt)
        self._outputs.drop(request, attempt)
        self._drop_buffers(request, attempt)
        self._prefixes.drop(request, attempt)  # its answer finds nobody here, and what is held for it is released then
        self._notes.has_less_to_run |= bool(leaving)
        return [command for one in leaving for command in self._let_go(one.key, one.known)]
