"""Who has pairs on a decode worker, and how they come by them: joining, growing block by block, leaving for others.

With Layout.BIDIRECTIONAL nobody leaves for a real-time request as long as best-effort ones have slots that it can take
(sharing.py, blocks.py): who has lost some waits on the worker until they come back.

With Room.WHOLE a request gets the pairs for its whole possible length when it is seated, so that a resident never has
to leave for want of memory, but best-effort ones for real-time prompts. Otherwise it gets them block by block;
where none is free somebody leaves (packing.py):

    resident ── pages at hand ──▶ evicted (to_pool.py)
       └── none ──▶ waiting, and what it had is recomputed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from alignedserve.core import CacheKind, StepResult, half_blocks, units_for
from alignedserve.decode_worker.band import RunningBatch
from alignedserve.decode_worker.blocks import SharedBlocks
from alignedserve.decode_worker.hybrid_seating import HybridCache, HybridSeating
from alignedserve.decode_worker.packing import Knapsack, Lately, PackedSeating, packer
from alignedserve.decode_worker.sharing import SharedSeating, Sharing
from alignedserve.decode_worker.to_pool import ToPoolCore
from alignedserve.protocol.commands import Command, CopyIn
from alignedserve.protocol.messages import SPARE, Attempt
from alignedserve.scheduling.expected_wait import InLine, expected_waits
from alignedserve.scheduling.lengths import room_for
from alignedserve.scheduling.levels import level_of
from alignedserve.scheduling.policy import Entries, Packing, Room
from alignedserve.scheduling.promise import tokens_left
from alignedserve.scheduling.slo import Standing, by_standing
from alignedserve.worker.core import WorkerSetup
from alignedserve.worker.step.limits import Moment, Selection, has_time_to_project
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.seating import Seating


class SeatsCore(ToPoolCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        limits, policy = setup.limits, setup.policy
        self._sharing = Sharing(limits, policy) if policy.shares else None
        if self._sharing is not None:
            self._blocks = self._sharing.blocks
        chooses = policy.is_hybrid or policy.packing is Packing.KNAPSACK
        self.hybrid = HybridCache(limits.block_size, self._blocks, policy) if chooses else None
        self._left: list[Running] = []  # whose pairs the step in flight may still write to, where pairs are shared
        self._prompts: dict[str, Running] = {}
        self._joining: dict[int, Running] = {}  # by the number of the copy
        self._copy_number = 0
        self._batch = RunningBatch()
        self._packer = packer(policy, limits.max_batch, self._first_to_leave, self._batch)
        self._lately, self._in_order = Lately(), Seated(policy)
        self._crowded_at = 0  # so many were seated when one of them had gone to the pool for want of room
        self.num_preemptions = 0
        self.num_evictions = 0  # of them, those that did not lose their KV

    @property
    def shared(self) -> SharedBlocks | None:
        """Block pairs, where two requests may be in one."""
        return None if self._sharing is None else self._sharing.blocks

    @property
    def pairs(self) -> list[int]:
        return super().pairs if self.shared is None else [*self.shared.free, *self.shared.taken]

    @property
    def _num_seated(self) -> int:
        return len(self._residents) + len(self._prompts) + len(self._joining)

    @property
    def _is_arriving(self) -> bool:
        """Whether somebody has pairs who is not there yet, or leaves them."""
        return bool(self._joining)

    def _seat(self, waiting: Running, tokens: int) -> bool:
        sharing = self._sharing
        if sharing is None:
            return super()._seat(waiting, tokens) or self._seat_as_hidden(waiting, tokens)
        seated = sharing.seat(waiting, tokens)
        self._is_stuck |= not seated
        return seated

    def _seat_as_hidden(self, waiting: Running, tokens: int) -> bool:
        """One whose hidden vectors are in the pool."""
        hybrid = self.hybrid
        if hybrid is None or self._policy.entries is not Entries.HIDDEN:
            return False
        hybrid.begin(self._now, self._num_here, self._cost.model)
        residents = list(self._residents.values())
        if not hybrid.pays(waiting, tokens) or not has_time_to_project(waiting.prefix, residents, self._moment):
            return False
        pairs = self._blocks.take(units_for(tokens, 2 * self._limits.block_size))
        if pairs is None:
            return False
        waiting.pairs, waiting.blocks = pairs, half_blocks(pairs)
        hybrid.num_hidden += 1
        self._is_stuck = False
        return True

    @property
    def _lacking(self) -> list[Running]:
        """Best-effort requests that are here and cannot run for want of slots: they come before others."""
        if self._sharing is None or self._sharing.is_plentiful:
            return []
        return self._sharing.lacking((*self._residents.values(), *self._prompts.values()))

    @property
    def _as_they_return(self) -> list[Running]:
        """In the order of the choice: of one level, who is restored soonest (algorithms §1, §7)."""
        at, shared = self._moment, self.shared
        assert shared is not None, "nobody lacks slots of whole pairs"

        def standing(one: Running) -> Standing:
            restore_s = shared.num_missing(one) * self._copy_token_s
            return one.promise.standing(at.now, replace(one.work(at.chunk), transfer_s=restore_s), at.times)

        return by_standing(self._lacking, standing, at.times, at.policy.late)

    def _vacate(self, running: Running) -> None:
        if self._sharing is None:
            super()._vacate(running)
        elif running.pairs:  # who has left for the pool has none any more
            self._sharing.release(running)
            self._is_stuck = self._is_crowded = False

    def _vacate_after_step(self, running: Running) -> None:
        if self._sharing is None:
            super()._vacate_after_step(running)
        elif self._steps.running is None:
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
        self._notes.moved("joined", running.key)

    def _has_seat(self, running: Running) -> bool:
        """Where promises count, a real-time request may have that of a best-effort one, which pauses."""
        if self._num_seated < self._limits.max_batch:
            return True
        others = len(self._best_effort) if running.promise.is_rt and self._policy.packs else 0
        return self._num_seated - others < self._limits.max_batch

    def _first_waiting(self) -> Running:
        return self._packer.first(self._waiting)

    def _room_for(self, running: Running) -> int:
        """Tokens that it gets pairs for."""
        return room_for(running.request, len(running.output), self._policy, self._limits.num_tokens)

    def _copy_in(self, running: Running, pages: tuple[int, ...]) -> list[Command]:
        assert self._pool is not None, "entries are lost with their pool"
        self._copy_number += 1
        self._joining[self._copy_number] = running
        tokens, right = running.tokens(0, running.prefix), running.from_right
        kind = CacheKind.HIDDEN if running.blocks else CacheKind.KV
        copy = CopyIn(self._copy_number, self._pool.holder, pages, running.pairs, tokens, kind, right)
        return [*self._copies(), copy]

    def _leave(self, seats: dict[Any, Running], request: str, attempt: int) -> list[Attempt]:
        leaving = [seat for seat, one in seats.items() if one.is_of(request, attempt)]
        left = [seats.pop(seat) for seat in leaving]
        for running in left:
            self._vacate_after_step(running)
        return [running.key for running in left]

    # --- Who may join with a step

    def _seating(self, seats: int) -> Seating:
        if self._sharing is not None:
            return self._shared_seating(self._sharing, seats)
        if not self._policy.packs:
            return super()._seating(seats)
        by_chunk, pairs = self._policy.room is Room.CHUNKS, self._limits.num_pairs
        seated = [*self._residents.values(), *self._prompts.values()] if self._waiting else []
        held = sum(len(one.pairs) for one in seated if one.promise.is_rt)
        return self._packed_seating(
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
            in_order=lambda some: self._by_wait(in_order(some, self._moment)),
        )

    @property
    def _packed_seating(self) -> Callable[..., PackedSeating]:
        if self.hybrid is None:
            return PackedSeating
        self.hybrid.begin(self._now, self._num_here, self._cost.model)
        return partial(HybridSeating, hides=self.hybrid.pays, headroom=self._headroom)

    @property
    def _num_here(self) -> int:
        """Requests that a longer step delays."""
        return self._num_seated + len(self._waiting)

    @property
    def _headroom(self) -> int:
        """Pairs to grow into, which hidden vectors leave free: who is displaced is computed anew."""
        return self._num_seated if self._policy.grows else 0

    def _with_kv(self, selection: Selection, commands: list[Command]) -> Selection:
        """Who is hidden becomes KV where there is memory. What that takes is added."""
        if self.hybrid is None or not (selection.shape.hidden or selection.seated):
            return selection
        seated = self._residents | self._prompts
        selection, projected = self.hybrid.upgraded(selection, seated, self._room_for, self._headroom, self._cost.model)
        commands += projected
        return selection

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

    # --- Memory for the next step

    def _grow(self) -> list[Command]:
        """A place for the next token of each that decodes, in the order of their seats."""
        if self._sharing is not None:
            return self._grow_shared(self._sharing)
        commands: list[Command] = []
        for running in list(self._residents.values()):
            while running.pairs and not running.has_place(self._limits.block_size):
                more = self._blocks.take(1)
                if more is not None:
                    running.add_pairs(more)
                else:
                    leaving = self._packer.leaving((*self._prompts.values(),), (*self._residents.values(),))
                    commands += self._preempt(leaving)
        return commands

    def _first_to_leave(self, some: Sequence[Running]) -> Running:
        """Of one class. While a batch takes the place of another, one of the old one; of these who has longest to wait
        (ALISE §3.2), and of two that wait as long the longer. Of real-time ones who has most slack."""
        line = in_order(self._batch.old_of(some), self._moment)
        if line[-1].promise.is_rt:
            return line[-1]
        return self._by_wait(line)[-1]

    def _by_wait(self, line: Sequence[Running]) -> list[Running]:
        """Best-effort ones that are served in this order, the first to leave last."""
        waits = expected_waits(map(self._as_waiting, line), max(1, self._num_seated), self._policy.age_s)
        new = self._batch.number
        by_wait = sorted(zip(waits, line, strict=True), key=lambda one: (one[1].batch != new, one[0], one[1].prefix))
        return [running for _, running in by_wait]

    def _as_waiting(self, running: Running) -> InLine:
        tokens = tokens_left(running.request, self._policy, len(running.output))
        level = None if running.promise.is_rt else level_of(tokens)
        return InLine(tokens * self._recent.now.mean_s, self._now - running.said_at, level)

    def _preempt(self, running: Running, has_pairs: bool = True) -> list[Command]:
        """To the pool, where pages for it are at hand: it never waits for them. Its pairs may be others' by now."""
        seats = self._prompts if running.request.id in self._prompts else self._residents
        del seats[running.request.id]
        self.num_preemptions += 1
        pool = self._writes_to
        wanted = self._writer.pages_for(running, running.prefix)
        is_kept = self._policy.evict and seats is self._residents and self._is_written(running)
        if pool is None or not is_kept or wanted > self._writer.num_at_hand(SPARE):
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

    def _choose_memory(self, packer: Knapsack) -> list[Command]:
        """Who keeps it, and who of those that wait gets some, each as what it is worth most as (Apt-Serve §5).

        KV becomes hidden only by being computed anew: it waits until then. What is hidden becomes KV later.
        """
        commands, cache = list[Command](), self.hybrid
        assert cache is not None, "a knapsack has one"
        cache.begin(self._now, self._num_here, self._cost.model)
        decodes = list(self._residents.values())
        for running, kind in zip(decodes, cache.stay_as(decodes), strict=True):
            if kind is None or (kind is CacheKind.HIDDEN and not running.blocks):
                commands += self._preempt(running)
        commands += self._grow()
        waiting = sorted(self._waiting, key=lambda one: one.request.arrival_at)
        pending = [sum(map(cache.pending_s, some)) for some in ((*waiting, *self._prompts.values()), decodes)]
        packer.choose(*pending)
        seats = self._limits.max_batch - self._num_seated
        if packer.takes_prompts and seats > 0:
            chosen = zip(waiting, cache.begin_as(waiting, self._room_for, self._headroom), strict=True)
            for running, kind in [one for one in chosen if one[1] is not None][:seats]:
                cache.seat(running, kind is CacheKind.HIDDEN, self._room_for(running))
                self._seated_now(running)
        return commands

    def _grow_shared(self, sharing: Sharing) -> list[Command]:
        """Real-time requests take what best-effort ones have; where that is not enough, somebody leaves."""
        commands: list[Command] = []
        sharing.begin(self._kept)
        for running in [one for one in self._residents.values() if one.promise.is_rt]:
            while running.pairs and not sharing.claims_next(running):
                commands += self._preempt(self._least_needed())
        sharing.grow((*self._residents.values(), *self._prompts.values()), self._kept)
        return commands

    def _yield_to(self, tokens: int) -> list[Command]:
        """Best-effort requests leave, so that a real-time one finds memory for so many tokens: between two steps, and
        where that is enough."""
        if self._steps.running is not None or self._sharing is not None:
            return []
        wanted, commands = units_for(tokens, self._tokens_in_pair), list[Command]()
        free, yielding = self._blocks.num_free, self._best_effort
        if wanted <= free or wanted > free + sum([len(one.pairs) for one in yielding]):
            return []
        leaving = self._by_wait(in_order(yielding, self._moment))
        while wanted > self._blocks.num_free:
            commands += self._preempt(leaving.pop())
        return commands

    @property
    def _best_effort(self) -> list[Running]:
        """That are seated, and can leave."""
        return [one for one in (*self._residents.values(), *self._prompts.values()) if not one.promise.is_rt]

    def _least_needed(self) -> Running:
        """Best-effort before real-time, then those that have said nothing yet, then the newest."""
        seated = [*self._residents.values(), *self._prompts.values()]
        return next((one for one in reversed(seated) if not one.promise.is_rt), seated[-1])

    def _made_room(self, commands: list[Command]) -> bool:
        """Where nothing can run, and nothing else that is under way gives memory back. What that takes is added."""
        if self._sharing is not None:
            return self._made_room_shared(self._sharing, commands)
        if len(self._prompts) < 2 or self._residents or self._kept or self._is_arriving:
            return False
        self._uncrowd(self._prompts, self._prompts.values())
        self.num_preemptions += 1
        return True

    def _made_room_shared(self, sharing: Sharing, commands: list[Command]) -> bool:
        """Who lacks slots gets them back; otherwise the least needed leaves for the others."""
        lacking = self._as_they_return
        if not lacking:
            return False
        if sharing.return_slots(lacking):
            return True
        is_under_way = self._kept or self._left or self._is_arriving
        if is_under_way or len(self._residents) + len(self._prompts) < 2:
            return False
        commands += self._preempt(self._least_needed())
        return True

    # --- What is here

    def _unfinished(self) -> Iterable[Running]:
        """Long prompts hold up others until they are through; in AccelGen's paper, until their requests end."""
        residents = self._residents.values() if self._policy.as_in_paper else ()
        return [*self._prompts.values(), *residents]

    def _seated(self, request: str) -> Running | None:
        return self._residents.get(request) or self._prompts.get(request)

    def _prompts_ahead(self) -> Iterable[Running]:
        return self._prompts.values()

    def _seats(self) -> list[Running]:
        return [*self._residents.values(), *self._prompts.values(), *self._joining.values()]
