"""Requests that leave a decode worker: for lack of memory, or to go on at another worker.

The KV goes to the pool's pages, or directly to the device of another worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from alignedserve.core import PreemptionCause
from alignedserve.decode_worker.pool_traffic import PageWriting, is_writable
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.protocol.messages import Member
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class Leaving(WorkerPart):
    """Takes requests from their seats: preempts requests that others chose, and hands on requests after prompts.

        resident ── preempted, pages at hand ──▶ evicted: copied to the pool, and waits there
           └── too few ──┐
        prompt ──────────┴──▶ waiting: full pages are copied while there are pages at hand, and need not run again

        resident ── the worker is reached directly: Offer ──▶ departing (worker/offering.py) ──▶ gone
           │ ▲                                                   │
           │ └── Decline, or the worker is lost: decodes here ──┘
           └── else, pages at hand ──▶ the pool hands the request to that worker

    A request that is handed on decodes here until the pool has the prompt's full pages, which are copied beside the
    steps. So the request pauses only for the copy of the rest to the pool, and of all its pages to the worker.

    Where nothing decodes (prefill_worker/state.py), every request is handed on as soon as its prompt has run, chats
    first: to the pool, which batches the requests that have no named worker. Where no pool is of use, the request is
    offered to a decode worker, and waits on this device until that worker has room.
    """

    def __init__(self, worker: Worker, writing: PageWriting, offering: Offering) -> None:
        super().__init__(worker)
        self._writing, self._offering = writing, offering
        self._hands_on_all, self._keeps = not self._memory.decodes, self._policy.handoff is Handoff.DEVICE

    # --- Preempted

    def preempt(
        self,
        running: WorkerRequest,
        cause: PreemptionCause,
        winner: WorkerRequest | None = None,
        is_replaced: bool = False,
    ) -> list[Command]:
        """Let a request leave: to the pool's pages if they are at hand. A request that leaves never waits for pages.

        `winner` gets the memory; None where decodes grow into the memory. `is_replaced` says that the choice of a
        step has given the blocks to others already."""
        memory, is_resident = self._memory, running.state is State.RESIDENT
        free: Callable[[tuple[int, ...]], None] = (lambda _blocks: None) if is_replaced else memory.leave
        commands, copies, is_evicted, how = list[Command](), list[CopyOut](), False, "it is recomputed"
        running.goes_anywhere()
        self._here.move(running, State.LEAVING)
        if self._policy.evict and is_writable(running, self._limits.page_size):
            if is_resident and memory.dropping.drop_to_leave(running, free):
                # Now, since the same Release would later drop pages that the pool keeps by then.
                commands += self._holds.release(running.key)
            is_evicted = is_resident and self._writing.has_pages(running)
            how = "what is in full pages goes to the pool, the rest is recomputed"
            if is_evicted:
                how = "its KV goes to the pool"
                self._here.note_shortage()
            copies = [self._writing.write(running)] if is_evicted else self._writing.write_full_pages(running)
        self._counts.count_preempted(running, cause, keeps_kv=is_evicted)
        self._note(running, winner, how)
        for copy in copies:
            commands += (*memory.orders(copy, running), copy)
        if is_replaced:
            memory.note_replaced(running)
        elif is_evicted:
            memory.release(running)  # later writes to the blocks come after the copy
        if not is_evicted:
            self._queue.put_back(running)
        return commands

    def _note(self, running: WorkerRequest, winner: WorkerRequest | None, how: str) -> None:
        other = "" if winner is None else winner.request.id
        self._decisions.note(Kind.DISPLACED, running.request, other, len(running.output), why=how)

    def yield_to(self, winner: WorkerRequest, tokens: int, now: float) -> list[Command]:
        """Let best-effort requests leave so that a real-time request finds memory for `tokens`."""
        leaving = self._memory.yielding(tokens, self._memory.context(now))
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.REAL_TIME, winner)]

    def swap_for(self, running: WorkerRequest, tokens: int, now: float) -> list[Command] | None:
        """Let requests of lower levels leave so that this request finds memory for `tokens`, and a seat.

        Return None where too few have lower levels: the request waits like all others."""
        levels, at = self._scheduler.levels, self._memory.context(now)
        lower = levels.giving_way(self._here.seated, running, at) if levels is not None else ()
        leaving = self._memory.leaving_for(tokens, lower, self._scheduler.most_seated) if lower else None
        if leaving is None:
            return None
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.LEVEL, running)]

    def crowd_out(self, prompt: WorkerRequest) -> None:
        """Let a prompt wait again so that others can go on.

        Prompts that get blocks chunk by chunk may all have some blocks, and none enough. No prompt is seated before
        memory has come free, else two prompts could take turns for ever.
        """
        self._queue.put_back(prompt)
        self._memory.is_crowded = True
        self._counts.count_preempted(prompt, PreemptionCause.CROWDED)
        self._note(prompt, None, "the request is recomputed, so that others can go on")

    # --- Handed on

    @property
    def ready(self) -> list[WorkerRequest]:
        """Return the requests that can be handed on now."""
        residents = self._here.residents.values()
        if self._hands_on_all:
            going = sorted(residents, key=lambda running: not running.promise.is_rt)
        else:
            going = [running for running in residents if running.decode]
        can_be_written = [running for running in going if is_writable(running, self._limits.page_size)]
        return [running for running in can_be_written if not self._writing.is_busy(running)]

    @property
    def needs_no_pool(self) -> bool:
        """Return whether KV goes to decode workers directly, and no decode worker reads the pool of this node."""
        if not (self._hands_on_all and (peers := self._candidates.peers.values())):
            return False
        pool = self._pool.member
        return pool is None or self._keeps or all(peer.node != pool.node for peer in peers)

    def has_use_for_pages(self) -> bool:
        """Return whether pages may be taken for prompts that still run: no request that is to leave lacks any."""
        return not self.needs_no_pool and self.lacks_pages() is None

    def hand_on(self, now: float) -> list[Command]:
        """Let requests leave where the worker is reached directly, or where there are pages at hand."""
        commands: list[Command] = []
        waits_there = self.needs_no_pool
        for running in self.ready:
            to = self._way_for(running) if waits_there else self._offering.reached(running, now)
            if to is not None:
                commands.append(self._offering.offer(running, to, waits_there))
            elif self._writing.has_pages(running):
                commands += self._hand_on_by_pool(running)
        return commands

    def _hand_on_by_pool(self, running: WorkerRequest) -> list[Command]:
        """Let a request leave by the pool's pages: for the decode worker that the router named, or for any."""
        self._here.move(running, State.LEAVING)
        is_let_go = self._memory.dropping.drop_to_leave(running, self._memory.leave)
        released = self._holds.release(running.key) if is_let_go else []
        kind = Kind.OFFERED if running.decode else Kind.WRITES
        self._decisions.note(kind, running.request, running.decode, tokens=running.prefix)
        copy = self._writing.write(running)
        orders = self._memory.orders(copy, running)
        self._memory.release_behind_copy(running)
        return [*released, *orders, copy]

    def lacks_pages(self) -> WorkerRequest | None:
        """Return the first request that can go nowhere but to the pool, for which too few pages are at hand."""
        return next(iter(self.ready), None) if self._hands_on_all and not self.needs_no_pool else None

    def _way_for(self, running: WorkerRequest) -> Member:
        """Return the worker that was named for the request; where none was, the worker with the fewest offers.

        The worker from which a request came back last is taken only if there is no other: the way there may be broken.
        """
        offered = Counter(departure.to.name for departure in self._here.departures if departure.is_wanted)
        back = self._offering.came_back_from
        peers = self._candidates.peers
        others = sorted(peers.values(), key=lambda peer: (peer.name == back, offered[peer.name], peer.name))
        return peers.get(running.decode) or others[0]
