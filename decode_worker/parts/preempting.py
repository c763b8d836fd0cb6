"""Preempt a request that may be in a step where memory is short, by whatever rule it was chosen.

resident ── pages at hand ──▶ evicted: copied to the pool, where it waits (writing.py)
   └── too few ──┐
prompt ──────────┴──▶ waiting: its full pages are copied, as far as there are pages at hand, and it goes on from there
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.core import PreemptionCause
from alignedserve.decode_worker.parts.seats import Seats
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.writing import PageWriting, is_writable
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.worker.step.running import Running


class Preempting:
    def __init__(self, stores: Stores, seats: Seats, writing: PageWriting) -> None:
        self._policy, self._here, self._memory, self._queue = stores.policy, stores.here, stores.memory, stores.queue
        self._seats, self._writing, self._order, self._counts = seats, writing, stores.order, stores.counts
        self._decisions, self._page_size = stores.decisions, stores.limits.page_size
        self._dropping, self._holds = stores.dropping, stores.holds

    def preempt(
        self, running: Running, cause: PreemptionCause, now: float, winner: Running | None = None
    ) -> list[Command]:
        """Let the request leave: to the pool's pages where there are any at hand, for which it never waits.

        `winner` gets its memory; None where requests that decode grow into it."""
        copies, is_evicted = self._write(running, cause, winner, self._memory.leave)
        if is_evicted:
            self._memory.release(running)  # whatever is written there next is written after the copy
            running.pairs = ()
        else:
            self._queue.put_back(running)
        return copies

    def preempt_replaced(self, running: Running, winner: Running | None) -> list[Command]:
        """Let a request leave whose pairs the choice of a step has given to others."""
        copies, is_evicted = self._write(running, PreemptionCause.REAL_TIME, winner, lambda _pairs: None)
        running.pairs = ()
        if not is_evicted:
            self._queue.put_back(running)
        return copies

    def _write(
        self,
        running: Running,
        cause: PreemptionCause,
        winner: Running | None,
        free: Callable[[tuple[int, ...]], None],
    ) -> tuple[list[Command], bool]:
        """Take the request out of its seat, and order a copy of it to the pool; return whether it waits there. `free`
        gets pairs of which the copy needs none."""
        is_resident = self._here.remove(running)
        if not (self._policy.evict and is_writable(running, self._page_size)):
            self._counts.count_preempted(running, cause)
            self._note(running, winner, "it is computed anew")
            return [], False
        released = list[Command]()
        if is_resident:
            self._dropping.drop_to_leave(running, free)
            # Later the pool might take it for pages that it keeps when the request is here again.
            released = self._holds.release_all(self._dropping.take_let_go())
        if not (is_resident and self._writing.has_pages(running)):
            self._counts.count_preempted(running, cause)
            self._note(running, winner, "what is in full pages goes to the pool, the rest is computed anew")
            return [*released, *self._write_full_pages(running)], False
        self._note(running, winner, "its KV goes to the pool")
        self.note_eviction(running, cause)
        saved, before = self._memory.saved(running), self._memory.copies()
        return [*released, *before, self._writing.write(running, saved)], True

    def _note(self, running: Running, winner: Running | None, how: str) -> None:
        other = "" if winner is None else winner.request.id
        self._decisions.note(Kind.DISPLACED, running.request, other, len(running.output), why=how)

    def _write_full_pages(self, running: Running) -> list[Command]:
        copies = self._writing.write_full_pages(running, self._memory.saved(running))
        return [*self._memory.copies(), *copies] if copies else []

    def note_eviction(self, running: Running, cause: PreemptionCause) -> None:
        """Count a request that has left with its KV; none is asked for before another one has ended."""
        self._counts.count_preempted(running, cause, keeps_kv=True)
        self._here.note_shortage()

    def yield_to(self, winner: Running, tokens: int, now: float) -> list[Command]:
        """Let best-effort requests leave so that a real-time one finds memory for so many tokens."""
        leaving = self._memory.yielding(tokens, now)
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.REAL_TIME, now, winner)]

    def swap_for(self, running: Running, tokens: int, now: float) -> list[Command] | None:
        """Let requests of lower levels leave so that this one finds memory for so many tokens, and a seat.

        Return None where there are none, or too few: it waits like all others."""
        lower = self._order.scheduler.gives_way(self._here.seated, running, now)
        leaving = self._memory.leaving_for(tokens, lower) if lower else None
        if leaving is None:
            return None
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.LEVEL, now, running)]

    def crowd_out(self, prompt: Running) -> None:
        """Let a prompt wait again so that others can go on."""
        self._here.remove(prompt)
        self._queue.crowd_out(prompt)
        self._counts.count_preempted(prompt, PreemptionCause.CROWDED)
        self._note(prompt, None, "it is computed anew, so that others can go on")

    def seat(self, prompt: Running) -> None:
        """Count a prompt that has its pairs among those that may be in a step."""
        self._seats.seat(prompt)
