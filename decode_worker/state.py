"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ arrived ───▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (candidates.py; a pinned Batch is one too)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

With Layout.BIDIRECTIONAL nobody leaves for a real-time request as long as best-effort ones have slots that it can take
(sharing.py, blocks.py): who has lost some waits on the worker until they come back.

With Room.WHOLE a request gets the pairs for its whole possible length when it is seated, so that a resident never has
to leave for want of memory, but best-effort ones for real-time prompts. Otherwise it gets them block by block, with
Room.PREDICTED after those for its predicted length; where none is free somebody leaves (packing.py):

    resident ── pages at hand ──▶ evicted (pairs to pages) ──▶ Commit: it waits in the pool again
       └── none ──▶ waiting, and what it had is recomputed

Written is only what the pool lacks: the full pages of the entry as it was handed out stay its own. So it is with the
answer of a request that has ended, whose full pages the pool keeps for whoever goes on from there (Keep).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from alignedserve.commands import Command, CopyIn, Send
from alignedserve.core import Chunk, Decode, Entry, FinishReason, StepPlan, StepResult
from alignedserve.cost import Kind
from alignedserve.cost_fit import OnlineCost
from alignedserve.decode_worker.blocks import SharedBlocks
from alignedserve.decode_worker.packing import Lately, PackedSeating, packer
from alignedserve.decode_worker.pulling import PullingCore
from alignedserve.decode_worker.sharing import SharedSeating, Sharing
from alignedserve.events import CopiedIn, CopiedOut, Event, Received
from alignedserve.lengths import room_for
from alignedserve.messages import (
    ROUTER,
    SPARE,
    AskBatch,
    Attempt,
    Batch,
    Commit,
    Expect,
    GiveBack,
    Keep,
    LeasePages,
    Member,
    Release,
)
from alignedserve.page_writer import Copy, PageNames, PageWriter
from alignedserve.policy import DEFAULT_POLICY, Entries, Policy, Room
from alignedserve.prefill_worker.seated import Seated
from alignedserve.prefill_worker.seating import Seating
from alignedserve.prefill_worker.selection import Moment, Selection, in_order, last
from alignedserve.running import Running, WorkerLimits
from alignedserve.worker import key


class DecodeCore(PullingCore):
    def __init__(
        self,
        limits: WorkerLimits,
        policy: Policy = DEFAULT_POLICY,
        cost: OnlineCost | None = None,
        copy_token_s: float = 0.0,
        root: bytes = b"",
        direct: bool = False,
    ) -> None:
        """`root` and `direct` as a prefill worker has them: answers are known again by the one.

        What comes from device to device comes beside the steps, to pairs that nobody may enter meanwhile: where pairs
        are shared all comes by the pool.
        """
        super().__init__(limits, policy, cost, copy_token_s, direct and not policy.shares)
        self._sharing = Sharing(limits, policy) if policy.shares else None
        if self._sharing is not None:
            self._blocks = self._sharing.blocks
        self._left: list[Running] = []  # whose pairs the step in flight may still write to, where pairs are shared
        self._names = PageNames(limits.page_size, root)
        self._writer = PageWriter(limits.page_size)
        self._lacks = (0, 0)  # step, and pages that one of its residents may need
        self._kept: list[Running] = []  # have ended, and pairs until their answers are on their way to the pool
        self._arrived: deque[Entry] = deque()  # entries without room
        self._prompts: dict[str, Running] = {}
        self._joining: dict[int, Running] = {}  # by the number of the copy
        self._from_lost_pool: frozenset[int] = frozenset()  # of these, the copies that were under way when it went
        self._copy_number = 0
        self._residents: dict[str, Running] = {}
        self._from_pool: dict[str, Attempt] = {}  # requests whose pages the pool keeps for us
        self._packer = packer(policy, limits.max_batch, lambda some: last(some, self._moment))
        self._lately, self._in_order = Lately(), Seated(policy)
        self._crowded_at = 0  # so many were seated when one of them had gone to the pool for want of room
        self.num_preemptions = 0
        self.num_evictions = 0  # of them, those that did not lose their KV
        self.num_kept_pages = 0  # of answers
        self._tags: dict[str, int] = {}  # of those that have arrived: entries that came in one batch have the same
        self._num_batches = 0
        self.num_decode_steps = 0
        self.num_mixed_steps = 0  # of them, those with members of two batches
        self._asked: tuple[int, int, int] | None = None  # what the pool knows of our room: pairs, requests, rt_pairs

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        held = {
            "requests": len(self._held_attempts()),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "pages": len(self._from_pool),
            "outputs": self._outputs.num_kept,
        }
        return held if self.shared is None else held | {"places": self.shared.num_saved}

    @property
    def shared(self) -> SharedBlocks | None:
        """Block pairs, where two requests may be in one."""
        return None if self._sharing is None else self._sharing.blocks

    @property
    def pairs(self) -> list[int]:
        return super().pairs if self.shared is None else [*self.shared.free, *self.shared.taken]

    @property
    def leased_pages(self) -> tuple[int, ...]:
        return self._writer.leased

    @property
    def _num_seated(self) -> int:
        return len(self._residents) + len(self._prompts) + len(self._joining) + self._candidates.num_receiving

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(pool, Batch(entries, is_pinned)):
                self._asked = self._asked if is_pinned else None
                return self._arrive(pool, entries, is_pinned)
            case CopiedIn(number, intact) if number in self._joining:
                return self._copied(number, intact)
            case Received(message=LeasePages() as lease):
                self._writer.answered(lease)
                return []
            case Received(message=GiveBack()):
                return [] if self._writes_to is None else [self._writer.give_back(self._writes_to)]
            case CopiedOut(number):
                copy = self._writer.ended(number)
                return [] if copy is None else self._copied_out(copy)
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        commands = [*self._seat_all(), *self._next_step()]
        if self._kept:
            commands += [*self._keep_answers(), *self._seat_all(), *self._next_step()]
        # Prompts get their seats with a step: what is left then is the pool's, and nothing where somebody had to leave.
        return [*commands, *self._ask(), *self._ask_for_pages()]

    # --- Room

    def _arrive(self, pool: str, entries: Sequence[Entry], is_pinned: bool = False) -> list[Command]:
        """A pool that took us for dead may hand out again what is here: it goes on as it is.

        One that others took for dead may hand out an attempt whose next one is here already.
        """
        self._num_batches += 1
        here, over = dict(sorted(self._held_attempts())), list[Command]()
        for entry in entries:
            name, attempt = key(entry.request)
            if here.get(name, -1) > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._from_pool[name] = (name, attempt)
            if here.get(name) == attempt:
                self._candidates.in_pool((name, attempt), entry, entry.pages)
            elif is_pinned:
                self._add_candidate(entry, None, is_pinned)
            else:
                self._arrived.append(entry)
                self._tags[name] = self._num_batches
        return over

    # --- Seats

    def _seat_all(self) -> list[Command]:
        """Room for candidates, then for entries, which have waited in the pool too, before prompts."""
        commands = self._seat_candidates()
        if self._candidates:
            return commands
        while self._arrived and (running := self._seated_entry(self._arrived[0])) is not None:
            commands += self._join(self._arrived.popleft(), running)
        if not self._arrived:
            self._tags.clear()
        for running in self._first_come():
            must_wait = not self._packer.has_seat(self._num_seated) or (not running.promise.is_rt and self._lacking)
            if must_wait or not self._seat(running, self._room_for(running)):
                break
            self._seated_now(running)
        return commands

    def _seat(self, waiting: Running, tokens: int) -> bool:
        sharing = self._sharing
        if sharing is None:
            return super()._seat(waiting, tokens)
        seated = sharing.seat(waiting, tokens)
        self._is_stuck |= not seated
        return seated

    @property
    def _lacking(self) -> list[Running]:
        """Best-effort requests that are here and cannot run for want of slots: they come before others."""
        if self._sharing is None or self._sharing.is_plentiful:
            return []
        return self._sharing.lacking((*self._residents.values(), *self._prompts.values()))

    def _vacate(self, running: Running) -> None:
        if self._sharing is None:
            super()._vacate(running)
        elif running.pairs:  # who has left for the pool has none any more
            self._sharing.release(running)
            self._is_stuck = self._is_crowded = False

    def _vacate_after_step(self, running: Running) -> None:
        """The step in flight may still write there."""
        if self._sharing is None:
            self._free(running.pairs)
        elif self._in_flight is None:
            self._vacate(running)
        else:
            self._left.append(running)

    def _step_ended(self, result: StepResult, seconds: float) -> list[Command]:
        for running in self._left:
            self._vacate(running)
        self._left.clear()
        commands = super()._step_ended(result, seconds)
        if self._sharing is not None:
            self._sharing.begin(self._kept)
        return commands

    def _copies(self) -> Sequence[Command]:
        """Of slots that others take, before whatever is ordered next."""
        return () if self._sharing is None else self._sharing.copies()

    def _seated_now(self, running: Running) -> None:
        self._waiting.remove(running)
        self._prompts[running.request.id] = running
        self._note("joined", running.key)

    @property
    def _has_seat(self) -> bool:
        return self._num_seated < self._limits.max_batch

    def _first_waiting(self) -> Running:
        return self._packer.first(self._waiting)

    def _seated_entry(self, entry: Entry) -> Running | None:
        running = self._running_of(entry.request, entry.output, entry.due)
        running.prefix, running.logprobs = entry.prefix, list(entry.logprobs)
        running.batch = self._tags.get(entry.request.id, 0)
        running.prompt_logprobs, running.num_cached = list(entry.prompt_logprobs), entry.num_cached
        full = entry.prefix // self._limits.page_size
        running.known, running.names = entry.pages[:full], entry.names[:full]
        return running if self._has_seat and self._seat(running, self._room_for(running)) else None

    def _room_for(self, running: Running) -> int:
        """Tokens that it gets pairs for."""
        return room_for(running.request, len(running.output), self._policy)

    def _expect_elsewhere(self, told: Expect) -> list[Command]:
        for at, entry in enumerate(self._arrived):
            if key(entry.request) == (told.request, told.attempt):
                self._arrived[at] = replace(entry, request=replace(entry.request, estimate=told.estimate))
        return []

    def _join(self, entry: Entry, running: Running) -> list[Command]:
        dropped = self._drop(entry.request.id, entry.request.attempt - 1)
        return [*dropped, *self._copy_in(running, entry.pages)]

    def _copy_in(self, running: Running, pages: tuple[int, ...]) -> list[Command]:
        assert self._pool is not None, "entries are lost with their pool"
        self._copy_number += 1
        self._joining[self._copy_number] = running
        tokens, right = running.tokens(0, running.prefix), running.from_right
        copy = CopyIn(self._copy_number, self._pool.holder, pages, running.pairs, tokens, from_right=right)
        return [*self._copies(), copy]

    def _copied(self, number: int, intact: bool) -> list[Command]:
        running = self._joining.pop(number)
        if intact:
            self._residents[running.request.id] = running
            self._note("joined", running.key)
            return []
        # Right or not at all: its owner starts the next attempt, which prefills it again.
        self._vacate_after_step(running)
        self._note("lost", running.key)
        refused = [] if number in self._from_lost_pool else [self._refused()]
        return [*refused, *self._release(running.key)]

    def _ask(self) -> list[Command]:
        """Tell the pool of our room whenever it has changed. Who had to let somebody go has none until another ends."""
        if self._pool is None or self._candidates or self._arrived or self._waiting:
            return []  # who waits here already, such as one that had to leave, comes first
        if not 0 < self._crowded_at <= self._num_seated:
            self._crowded_at = 0
        is_lacking = bool(self._lacking)
        pairs = 0 if is_lacking else self._blocks.num_free
        rt_pairs = 0 if self.shared is None else self._blocks.num_free - pairs + self.shared.room_for_rt
        room = (pairs, max(0, self._limits.max_batch - self._num_seated), rt_pairs)
        if self._crowded_at:
            room = (0, 0, 0)
        offers = room[1] > 0 and (room[0] > 0 or room[2] > 0)
        withdraws = self._asked is not None and (self._crowded_at > 0 or (is_lacking and self._asked[0] > 0))
        if not (offers or withdraws) or room == self._asked:
            return []
        self._asked = room
        limits, cost = self._limits, self._cost.model.coefficients[Kind.DECODE]
        times, device = (self._recent.now, self._copy_token_s), (limits.num_pairs, limits.max_batch)
        return [Send(self._pool.name, AskBatch(*room[:2], *times, *device, self._band, cost, room[2]))]

    @property
    def _band(self) -> tuple[int, int] | None:
        prefixes = [running.prefix for running in (*self._residents.values(), *self._joining.values())]
        prefixes += self._candidates.prefixes
        return (min(prefixes), max(prefixes)) if prefixes else None

    @property
    def _awaits_the_pool(self) -> bool:
        return self._asked is not None or self._writer.awaits_the_pool

    def _ask_again(self) -> None:
        self._asked = None
        self._writer.ask_again()

    # --- Steps

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        before = self._grow() if self._policy.grows else []
        while True:
            selection = self._chosen(before)
            if selection.chunks or selection.decodes or not self._made_room(before):
                break
        self._count_mixed(selection.decodes)
        before += self._copies()
        decodes = [  # one for each token: a call for each would cost as much again
            Decode(
                of.id, one.output[-1], one.prefix, one.pairs, of.sampling, len(one.output), one.history, one.from_right
            )
            for one in selection.decodes
            for of in (one.request,)
        ]
        return [*before, *self._begin_step(selection, tuple(decodes))]

    def _chosen(self, commands: list[Command]) -> Selection:
        """What leaves for it is added."""
        seats = 0 if self._candidates or self._arrived else self._limits.max_batch - self._num_seated
        sharing, decodes, prompts = self._sharing, self._residents.values(), self._prompts.values()
        if sharing is None:
            seated = tuple(decodes), tuple(prompts)
        else:
            seated = sharing.whole(decodes), sharing.whole(prompts)
        selection = self._select(*self._packer.runnable(*seated), seats)
        for running in selection.unseated:
            commands += self._preempt(running, has_pairs=False)
        for running in selection.seated:
            self._seated_now(running)
        self._packer.planned(selection)
        if sharing is None:
            return selection
        selection = sharing.left_of(selection, self._residents | self._prompts, self._cost.model)
        if selection.decodes or selection.chunks:
            sharing.return_slots(self._lacking)
        return selection

    def _count_mixed(self, decodes: Sequence[Running]) -> None:
        if decodes and self._num_batches:
            self.num_decode_steps += 1
            self.num_mixed_steps += len({one.batch for one in decodes}) > 1

    def _seating(self, seats: int) -> Seating:
        if self._sharing is not None:
            return self._shared_seating(self._sharing, seats)
        if not self._policy.packs:
            return super()._seating(seats)
        by_chunk, pairs = self._policy.room is Room.CHUNKS, self._limits.num_pairs
        seated = [*self._residents.values(), *self._prompts.values()] if self._waiting else []
        held = sum(len(one.pairs) for one in seated if one.promise.is_rt)
        return PackedSeating(
            self._blocks,
            pairs,
            self._tokens_in_pair,
            seats,
            by_chunk,
            self._room_for,
            self._has_long,
            best_effort=[one for one in seated if not one.promise.is_rt],
            spare=self._lately.spare_pairs(held, self._now) if seated else 0,
            is_open=not self._is_crowded,
            in_order=lambda some: in_order(some, self._moment),
        )

    def _shared_seating(self, sharing: Sharing, seats: int) -> Seating:
        return SharedSeating(
            self._blocks,
            self._limits.num_pairs,
            self._tokens_in_pair,
            seats,
            False,
            self._room_for,
            self._has_long,
            sharing=sharing,
            is_open=self._policy.packs and not self._is_crowded,
            takes_any=not self._lacking,
        )

    @property
    def _moment(self) -> Moment:
        at = super()._moment
        at.batch, at.seated = self._packer.batch, self._in_order
        return at

    def _grow(self) -> list[Command]:
        """A place for the next token of each that decodes, in the order of their seats."""
        if self._sharing is not None:
            return self._grow_shared(self._sharing)
        commands: list[Command] = []
        for running in list(self._residents.values()):
            while running.pairs and not running.has_place(self._limits.block_size):
                more = self._blocks.take(1)
                if more is not None:
                    running.pairs += more
                else:
                    leaving = self._packer.leaving((*self._prompts.values(),), (*self._residents.values(),))
                    commands += self._preempt(leaving)
        return commands

    def _preempt(self, running: Running, has_pairs: bool = True) -> list[Command]:
        """To the pool, where pages for it are at hand: it never waits for them. Its pairs may be others' by now."""
        seats = self._prompts if running.request.id in self._prompts else self._residents
        del seats[running.request.id]
        self.num_preemptions += 1
        pool = self._writes_to
        wanted = self._writer.pages_for(running, running.prefix)
        if pool is None or seats is not self._residents or wanted > self._writer.num_at_hand(SPARE):
            if not has_pairs:
                running.pairs = ()
            self._put_back(running)
            return []
        self.num_evictions += 1
        self._crowded_at = self._num_seated
        saved = () if self.shared is None else self.shared.saved(running)
        copies = (*self._copies(), self._writer.begin(running, pool, running.prefix, SPARE, saved=saved))
        if has_pairs:
            self._vacate(running)  # whoever writes there does so after the copy
        running.pairs = ()
        return [*copies]

    def _grow_shared(self, sharing: Sharing) -> list[Command]:
        """Real-time requests take what best-effort ones have; where that is not enough, somebody leaves."""
        commands: list[Command] = []
        sharing.begin(self._kept)
        for running in [one for one in self._residents.values() if one.promise.is_rt]:
            while running.pairs and not sharing.claims_next(running):
                commands += self._preempt(self._least_needed())
        sharing.grow((*self._residents.values(), *self._prompts.values()), self._kept)
        return commands

    def _least_needed(self) -> Running:
        """Best-effort before real-time, then those that have said nothing yet, then the newest."""
        seated = [*self._residents.values(), *self._prompts.values()]
        return next((one for one in reversed(seated) if not one.promise.is_rt), seated[-1])

    def _made_room(self, commands: list[Command]) -> bool:
        """Where nothing can run, and nothing else that is under way gives memory back. What that takes is added."""
        if self._sharing is not None:
            return self._made_room_shared(self._sharing, commands)
        if len(self._prompts) < 2 or self._residents or self._joining or self._kept or self._candidates.seats:
            return False
        self._uncrowd(self._prompts, self._prompts.values())
        self.num_preemptions += 1
        return True

    def _made_room_shared(self, sharing: Sharing, commands: list[Command]) -> bool:
        """Who lacks slots gets them back; otherwise the least needed leaves for the others."""
        if not self._lacking:
            return False
        if sharing.return_slots(self._lacking):
            return True
        is_under_way = self._joining or self._kept or self._left or self._candidates.seats
        if is_under_way or len(self._residents) + len(self._prompts) < 2:
            return False
        commands += self._preempt(self._least_needed())
        return True

    def _unfinished(self) -> Iterable[Running]:
        """Long prompts hold up others until they are through; in AccelGen's paper, until their requests end."""
        residents = self._residents.values() if self._policy.as_in_paper else ()
        return [*self._prompts.values(), *residents]

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        released, prompts = list[Command](), self._prompts
        for running, finish in self._emitted(plan.parts, result):
            if prompts and (request := running.request.id) in prompts:
                self._residents[request] = prompts.pop(request)
            if finish is not None:
                released += self._ended(running, finish)
        return [*released, *self._outputs.flush()]

    def _seated(self, request: str) -> Running | None:
        return self._residents.get(request) or self._prompts.get(request)

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._seated(ran.request)
        if running is None or not running.is_at(ran):
            return []
        (self._prompts if ran.request in self._prompts else self._residents).pop(ran.request)
        self._vacate(running)
        self._outputs.drop(*running.key)
        self._note("lost", running.key)
        return self._release(running.key)

    def _ended(self, running: Running, finish: FinishReason) -> Iterable[Command]:
        del self._residents[running.request.id]
        self._note_end(running)
        is_alone = self.shared is None or not self.shared.is_shared(running)  # else it would be in somebody's way
        if is_alone and finish is not FinishReason.ERROR and self._pages_to_keep(running) > 0:
            self._kept.append(running)
            return []
        self._vacate(running)
        return self._release(running.key)

    # --- To the pool

    @property
    def _writes_to(self) -> Member | None:
        return self._pool if self._pool is not None and self._writer.may_write(self._pool) else None

    def _ask_for_pages(self) -> list[Command]:
        """As many as would be written of one that leaves, or ends, with the next token: of whom it would be most."""
        pool, size = self._writes_to, self._limits.page_size
        writes = self._policy.reuse or self._policy.grows
        if pool is None or not writes or self._policy.entries is Entries.HIDDEN:
            return []
        if self._lacks[0] != self._step_number:  # looked at once a step
            last = size if self._policy.grows else 1  # who has to leave needs a page for a part of one
            lacks = ((one.prefix + last) // size - len(one.known) for one in self._residents.values())
            self._lacks = (self._step_number, max(lacks, default=0))
        return self._writer.ask_for_spare(pool, self._lacks[1])

    def _pages_to_keep(self, running: Running) -> int:
        """Of its answer, where the pool has what comes before, and there are pages at hand."""
        if not self._policy.reuse or self._writes_to is None or self._from_pool.get(running.request.id) != running.key:
            return 0
        full = running.prefix // self._limits.page_size - len(running.known)
        return min(full, self._writer.num_at_hand(SPARE))

    def _keep_answers(self) -> list[Command]:
        """After the step that is due, and only if the one after it will not be late for that."""
        commands: list[Command] = []
        kept, self._kept = self._kept, []
        copied = 0
        for running in kept:
            pages, pool = self._pages_to_keep(running), self._writes_to
            more = pages * self._limits.page_size
            if pool is not None and pages > 0 and self._has_time_for(copied + more):
                copied += more
                tokens = (len(running.known) + pages) * self._limits.page_size
                commands.append(self._writer.begin(running, pool, tokens, SPARE, has_ended=True))
            else:
                commands += self._release(running.key)
            self._vacate(running)  # no step writes there before the copy
        return commands

    def _has_time_for(self, tokens: int) -> bool:
        """To copy them between the step in flight and the next."""
        if self._in_flight is None:
            return True
        ends_at = self._now + 2 * self._in_flight.predicted_s + tokens * self._copy_token_s
        promises = (running.promise for running in self._residents.values())
        return all(promise.due_at(self._now) >= ends_at for promise in promises if promise.is_rt)

    def _copied_out(self, copy: Copy) -> list[Command]:
        running, pool = copy.running, self._pool
        if pool is None or not copy.wanted:
            self._writer.take_back(copy)
            return []
        self._writer.handed_on(copy)
        if self._from_pool.get(running.request.id) == running.key:
            del self._from_pool[running.request.id]
        tokens = (len(copy.known) + len(copy.pages)) * self._limits.page_size
        if copy.has_ended:
            self.num_kept_pages += len(copy.pages)
            names = self._names.of(running, tokens)[len(copy.known) :]
            return [Send(pool.name, Keep(*running.key, len(copy.known), copy.pages, names))]
        self._outputs.forget([running.request.id])  # whoever gets it next has the whole output
        self._note("returned", running.key)
        names = self._names.of(running, running.prefix) if self._policy.reuse else ()
        return [Send(pool.name, Commit(running.entry(copy.known + copy.pages, names), len(copy.known)))]

    # --- What is here

    def _prompts_ahead(self) -> Iterable[Running]:
        return self._prompts.values()

    def _seats(self) -> list[Running]:
        joining = (*self._joining.values(), *self._candidates.seats)
        return [*self._residents.values(), *self._prompts.values(), *joining]

    def _held_attempts(self) -> list[Attempt]:
        waiting = [one.key for one in self._waiting]
        waiting += [copy.running.key for copy in self._writer.copies if copy.wanted and not copy.has_ended]
        waiting += self._candidates.attempts
        seated = (*self._residents.values(), *self._prompts.values(), *self._joining.values())
        return [*(one.key for one in seated), *waiting, *(key(one.request) for one in self._arrived)]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        released = [one.key for one in self._waiting.drop(request, attempt)]  # one that left may have pages
        self._is_stuck = False
        for entry in [one for one in self._arrived if one.request.id == request and one.request.attempt <= attempt]:
            self._arrived.remove(entry)
            released.append(key(entry.request))
        for seats in (self._residents, self._prompts, self._joining):
            released += self._leave(seats, request, attempt)
        released += [running.key for running in self._writer.drop(request, attempt)]
        released += self._candidates.drop(request, attempt)
        self._outputs.drop(request, attempt)
        return [command for one in released for command in self._release(one)]

    def _leave(self, seats: dict[Any, Running], request: str, attempt: int) -> list[Attempt]:
        leaving = [seat for seat, one in seats.items() if one.is_of(request, attempt)]
        left = [seats.pop(seat) for seat in leaving]
        for running in left:
            self._vacate_after_step(running)
        return [running.key for running in left]

    def _release(self, attempt: Attempt) -> list[Command]:
        """Its pages, where the pool keeps some for it."""
        if self._pool is None or self._from_pool.get(attempt[0]) != attempt:
            return []
        del self._from_pool[attempt[0]]
        return [Send(self._pool.name, Release(*attempt))]

    def _unknown(self, asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        if asker == ROUTER or self._pool is None:
            return super()._unknown(asker, attempts)
        kept = {copy.running.key for copy in self._writer.copies if copy.has_ended}  # it will hear of them
        return [Send(self._pool.name, Release(*attempt)) for attempt in attempts if attempt not in kept]

    def _pool_lost(self) -> None:
        """Entries that were not copied yet are lost with it; who was on the way there is recomputed."""
        self._asked = None
        self._from_lost_pool = frozenset(self._joining)
        for running in self._writer.pool_lost():
            self._put_back(running)
        for running in (*self._seats(), *self._waiting):
            running.known = ()
        for attempt in (*(key(entry.request) for entry in self._arrived), *self._candidates.pool_lost()):
            self._note("lost", attempt)
        self._arrived.clear()
        self._from_pool.clear()
