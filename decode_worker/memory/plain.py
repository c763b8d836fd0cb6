"""The interface of a decode worker's memory. As it stands it is plain: a block pair holds the KV of one request, or
of all that begin alike.

With Room.WHOLE a request gets the pairs for its whole possible length when it is seated, so that a resident never has
to leave for lack of memory, but best-effort ones for real-time prompts. Otherwise it gets them block by block; where
none is free a request leaves, which the scheduler names:

    resident ── pages at hand ──▶ evicted to the pool (writing.py)
       └── none ──▶ waiting, and what it had is computed anew

A memory says which request leaves; preempting.py lets it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from alignedserve.core import PreemptionCause, ServiceClass, WorkerLimits, units_for
from alignedserve.decode_worker.memory.packed_seating import PackedSeating, RecentNeed
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.decode_worker.requests.serving_order import ServingOrder
from alignedserve.protocol.commands import Command
from alignedserve.scheduling.lengths import room_for
from alignedserve.worker.device import DeviceMemory, blocks_for
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.device_pages import NextPages
from alignedserve.worker.step.running import Blocks, Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.view import Selection
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class Preempts(Protocol):
    """The part that takes memory from requests, and gives prompts their seats."""

    def preempt(self, running: Running, cause: PreemptionCause, now: float) -> list[Command]:
        """Let a request that may be in a step leave: to the pool where there are pages at hand, else to wait."""

    def crowd_out(self, prompt: Running) -> None:
        """Let a prompt wait again; no prompt is seated before memory comes free."""

    def seat(self, prompt: Running) -> None:
        """Count a prompt that has its pairs among those that may be in a step."""


class PlainMemory(DeviceMemory):
    keeps_places = True  # whether the KV of a request stays where it is as long as the request has its pairs

    def __init__(
        self,
        limits: WorkerLimits,
        pace: Pace,
        steps: StepsInFlight,
        here: Occupancy,
        order: ServingOrder,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(limits, steps, blocks_for(limits, pace) if blocks is None else blocks)
        self._pace, self._policy, self._here, self._order = pace, pace.policy, here, order
        self._need = RecentNeed()

    def pairs_with(self, occupants: Iterable[Running]) -> list[int]:
        return super().pairs_with((*occupants, *self._here.abandoned.values()))

    # --- Seats

    def room_for(self, running: Running) -> int:
        """Return the tokens that a request gets memory for when it is seated."""
        tokens = room_for(running.request, len(running.output), self._policy, self.limits.num_tokens)
        return self.to_hold(running, tokens)

    def long_classes(self) -> set[ServiceClass]:
        """Return the classes of the long prompts that are unfinished here."""
        unfinished = [*self._here.prompts.values()]
        if self._policy.as_in_paper:  # AccelGen: a long request holds up others until it ends
            unfinished += self._here.residents.values()
        return {running.request.service for running in unfinished if running.num_tokens >= self._policy.long_prompt}

    def seat(self, running: Running, tokens: int, waiting: WaitingPrompts, now: float) -> bool:
        """Give the request memory for so many tokens; return whether there was as much."""
        pairs = self.blocks.take(max(0, units_for(tokens, self.limits.block_size) - len(running.pairs)))
        if pairs is None:
            self.is_stuck = True
            return False
        running.add_pairs(pairs)
        return True

    def seat_from_pool(self, joining: Running, tokens: int, waiting: WaitingPrompts, now: float) -> bool:
        """Give a request memory whose KV the pool has, beside what it shares with others; return whether there was."""
        lacking = units_for(tokens, self.limits.block_size) - self.pages.num_read_of_kv(joining)
        if self.pages.page_size:
            if lacking > self.num_free:
                self.is_stuck = True
                return False
            self.pages.share_kv(joining)
        return self.seat(joining, tokens, waiting, now)

    def seat_prompt(self, prompt: Running, waiting: WaitingPrompts, now: float) -> bool:
        """Give a prompt memory for all its tokens, beside what it shares with others; return whether there was."""
        tokens = self.room_for(prompt)
        if self.pages.page_size:
            if units_for(tokens, self.limits.block_size) - self.pages.num_read(prompt) > self.num_free:
                self.is_stuck = True
                return False
            self.pages.share(prompt)
        return self.seat(prompt, tokens, waiting, now)

    def seating(self, seats: int, waiting: WaitingPrompts, now: float) -> Seating:
        """Return what the choice of a step may take: memory, and so many seats."""
        offered = (
            self.blocks,
            self.limits.num_pairs,
            self.limits.block_size,
            seats,
            self.by_chunk(self._policy),
            self.room_for,
            self.long_classes,
            self.pages,
            self.next_pages(waiting),
        )
        if not self._policy.is_rt_first:
            return Seating(*offered)
        seated = self._here.seated if waiting else []
        held = self.num_freed(running for running in seated if running.promise.is_rt)
        return self._packed_seating(waiting, now)(
            *offered,
            best_effort=[running for running in seated if not running.promise.is_rt],
            spare=self._need.spare_pairs(held, now, self._pace.coming.are_expected(now)) if seated else 0,
            is_open=not self.is_crowded,
            in_order=lambda requests: self._order.as_they_leave(requests, now),
        )

    def next_pages(self, waiting: WaitingPrompts) -> NextPages:
        """Return the pages that seated prompts compute or fetch next, for which prompts may wait."""
        return NextPages(self.pages, self._here.unfinished if waiting else ())

    def _packed_seating(self, waiting: WaitingPrompts, now: float) -> Callable[..., PackedSeating]:
        return PackedSeating

    def yielding(self, tokens: int, now: float) -> list[Running]:
        """Return the best-effort requests that leave so that a real-time one finds memory for so many tokens.

        They leave between two steps, and only where that is enough."""
        if self._steps.running is not None:
            return []
        wanted, free, best_effort = units_for(tokens, self.limits.block_size), self.num_free, self._here.best_effort
        if wanted <= free or wanted > free + self.num_freed(best_effort):
            return []
        line, leaving = self._order.as_they_leave(best_effort, now), list[Running]()
        while wanted > free:
            leaving.append(line.pop())
            free += self.num_freed(leaving[-1:])
        return leaving

    def leaving_for(self, tokens: int, lower: Sequence[Running]) -> list[Running] | None:
        """Return which of the lower requests leave so that another finds memory for so many tokens, and a seat.

        The first to leave is the last of them. Return None between the ends of a step, and where all are not enough."""
        if self._steps.running is not None:
            return None
        line, leaving, free = [*lower], list[Running](), self.num_free
        wanted, has_seat = units_for(tokens, self.limits.block_size), self._order.scheduler.has_seat
        while wanted > free or not has_seat(self._here.num_seated - len(leaving)):
            if not line:
                return None
            leaving.append(line.pop())
            free += self.num_freed(leaving[-1:])
        return leaving

    # --- The next step

    def grow(self, preempts: Preempts, now: float) -> list[Command]:
        """Give each decode a place for its next token, in the order of their seats."""
        here, commands, size = self._here, list[Command](), self.limits.block_size
        residents = here.residents.values()  # most have a place, and are passed over without a call for each
        full = [
            running
            for running in residents
            if running.prefix - running.dropped >= len(running.blocks or running.pairs) * size
        ]
        for running in full:
            while running.pairs and not running.has_place(size):
                more = self.blocks.take(1)
                if more is not None:
                    running.add_pairs(more)
                else:
                    prompts, decodes = (*here.prompts.values(),), (*here.residents.values(),)
                    leaving = self._order.scheduler.leaving(prompts, decodes, now)
                    commands += preempts.preempt(leaving, PreemptionCause.MEMORY, now)
        return commands

    def assign(self, preempts: Preempts, waiting: WaitingPrompts, now: float) -> list[Command]:
        """Choose which requests have memory, by what they are worth."""
        raise AssertionError("only a hybrid cache weighs requests (stores.memory_for)")

    def runnable(self) -> tuple[Sequence[Running], Sequence[Running]]:
        """Return the decodes and the prompts that have all their memory."""
        return tuple(self._here.residents.values()), tuple(self._here.prompts.values())

    def settle(self, selection: Selection, now: float) -> tuple[Selection, Sequence[Command]]:
        """Return the step as it can run after memory was given for it, and what is to be done before it."""
        return selection, ()

    def make_room(self, preempts: Preempts, now: float) -> list[Command] | None:
        """Make room where nothing can run and nothing under way gives memory back; return None where there is none.

        Prompts that get their pairs chunk by chunk may all have some, and none enough: the last of these leaves."""
        here = self._here
        if len(here.prompts) < 2 or here.residents or here.kept or here.is_changing:
            return None
        preempts.crowd_out(self._order.in_order(tuple(here.prompts.values()), now)[-1])
        return []

    def step_ended(self) -> None:
        """Note that no step writes any more to memory that was left until its end."""

    # --- Where two requests may be in one pair

    def lacking(self) -> list[Running]:
        """Return the best-effort requests that are here and cannot run for lack of slots: they come before others."""
        return []

    def copies(self) -> Sequence[Command]:
        """Return the copies of slots that other requests take, due before whatever is ordered next; once."""
        return ()

    def saved(self, running: Running) -> tuple[tuple[int, int], ...]:
        """Return the tokens of the request that have no slot, each with its place on the host."""
        return ()

    def is_shared(self, running: Running) -> bool:
        """Return whether another request is in one of its pairs."""
        return False

    def hold(self, running: Running) -> None:
        """Let the request, which has ended, keep its slots until its answer is copied."""

    def pairs_for_rt(self, offered: int) -> int:
        """Return the pairs that a real-time request may find beside those that are offered to all."""
        return 0

    @property
    def held(self) -> Mapping[str, int]:
        """Return what is taken beside pairs; nothing when no request is open."""
        return {}
