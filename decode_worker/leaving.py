"""Requests that leave a decode worker: for lack of memory, or because another worker goes on with them.

Their KV goes to the pool's pages, or directly to the device of another worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from alignedserve.core import PreemptionCause
from alignedserve.decode_worker.arriving import most_ahead
from alignedserve.decode_worker.pool_traffic import PageWriting, PromptKeeping, is_writable
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import KvSent, MemberLost, Received
from alignedserve.protocol.messages import LetGo, Member, Pull, holder
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.candidates import JoinCandidate
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.offering import Departure, Offering
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import AHEAD_STEPS, Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class Preempting:
    """Preempts requests that may be in a step; the caller has chosen them.

    resident ── pages at hand ──▶ evicted: copied to the pool, where it waits
       └── too few ──┐
    prompt ──────────┴──▶ waiting: its full pages are copied while there are pages at hand, and it goes on from there
    """

    def __init__(
        self, here: Requests, memory: PlainMemory, pool: PoolLink, log: WorkerLog, writing: PageWriting
    ) -> None:
        self._here, self._queue, self._memory = here, here.queue, memory
        self._scheduler, self._context = memory.scheduler, memory.context
        self._policy, self._page_size, self._holds = memory.pace.policy, memory.limits.page_size, pool.holds
        self._dropping, self._counts, self._decisions = memory.dropping, log.counts, log.decisions
        self._writing = writing

    def preempt(
        self, running: WorkerRequest, cause: PreemptionCause, now: float, winner: WorkerRequest | None = None
    ) -> list[Command]:
        """Let the request leave: to the pool's pages where there are any at hand, for which it never waits.

        `winner` gets its memory; None where requests that decode grow into it."""
        copies, is_evicted = self._write(running, cause, winner, self._memory.leave)
        if is_evicted:
            self._memory.release(running)  # later writes to its blocks come after the copy
        else:
            self._queue.put_back(running)
        return copies

    def preempt_replaced(self, running: WorkerRequest, winner: WorkerRequest | None) -> list[Command]:
        """Let a request leave whose blocks the choice of a step has given to others."""
        copies, is_evicted = self._write(running, PreemptionCause.REAL_TIME, winner, lambda _blocks: None)
        self._memory.note_replaced(running)
        if not is_evicted:
            self._queue.put_back(running)
        return copies

    def hand_on(self, running: WorkerRequest) -> list[Command]:
        """Let a request leave by the pool's pages: for the decode worker that the router named, or for any."""
        self._here.move(running, State.LEAVING)
        is_let_go = self._dropping.drop_to_leave(running, self._memory.leave)
        released = self._holds.release(running.key) if is_let_go else []
        kind = Kind.OFFERED if running.decode else Kind.WRITES
        self._decisions.note(kind, running.request, running.decode, tokens=running.prefix)
        copy = self._writing.write(running)
        orders = self._memory.orders_before(copy, running)
        self._memory.release(running)  # later writes to its blocks come after the copy
        return [*released, *orders, copy]

    def _write(
        self,
        running: WorkerRequest,
        cause: PreemptionCause,
        winner: WorkerRequest | None,
        free: Callable[[tuple[int, ...]], None],
    ) -> tuple[list[Command], bool]:
        """Take the request from its seat, and order a copy to the pool; return whether the request waits in the pool.

        `free` gets the blocks that the copy does not need."""
        is_resident = running.state is State.RESIDENT
        running.goes_anywhere()
        self._here.move(running, State.LEAVING)
        if not (self._policy.evict and is_writable(running, self._page_size)):
            self._counts.count_preempted(running, cause)
            self._note(running, winner, "it is recomputed")
            return [], False
        released = list[Command]()
        if is_resident:
            # Now, since the same Release would later drop pages that the pool keeps by then.
            released = self._holds.release(running.key) if self._dropping.drop_to_leave(running, free) else []
        if not (is_resident and self._writing.has_pages(running)):
            self._counts.count_preempted(running, cause)
            self._note(running, winner, "what is in full pages goes to the pool, the rest is recomputed")
            copies = self._writing.write_full_pages(running)
            return [
                *released,
                *(it for copy in copies for it in (*self._memory.orders_before(copy, running), copy)),
            ], False
        self._note(running, winner, "its KV goes to the pool")
        self.note_eviction(running, cause)
        copy = self._writing.write(running)
        return [*released, *self._memory.orders_before(copy, running), copy], True

    def _note(self, running: WorkerRequest, winner: WorkerRequest | None, how: str) -> None:
        other = "" if winner is None else winner.request.id
        self._decisions.note(Kind.DISPLACED, running.request, other, len(running.output), why=how)

    def note_eviction(self, running: WorkerRequest, cause: PreemptionCause) -> None:
        """Count a request that has left with its KV, and ask for no candidates before another request has ended."""
        self._counts.count_preempted(running, cause, keeps_kv=True)
        self._here.note_shortage()

    def yield_to(self, winner: WorkerRequest, tokens: int, now: float) -> list[Command]:
        """Let best-effort requests leave so that a real-time one finds memory for `tokens`."""
        leaving = self._memory.yielding(tokens, self._context(now))
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.REAL_TIME, now, winner)]

    def swap_for(self, running: WorkerRequest, tokens: int, now: float) -> list[Command] | None:
        """Let requests of lower levels leave so that this one finds memory for `tokens`, and a seat.

        Return None where there are none, or too few: it waits like all others."""
        lower = self._scheduler.gives_way(self._here.seated, running, self._context(now))
        leaving = self._memory.leaving_for(tokens, lower, self._scheduler.has_seat) if lower else None
        if leaving is None:
            return None
        return [command for left in leaving for command in self.preempt(left, PreemptionCause.LEVEL, now, running)]

    def crowd_out(self, prompt: WorkerRequest) -> None:
        """Let a prompt wait again so that others can go on."""
        self._queue.crowd_out(prompt)
        self._counts.count_preempted(prompt, PreemptionCause.CROWDED)
        self._note(prompt, None, "it is recomputed, so that others can go on")


class HandingOn:
    """Hands requests on whose prompts have run here, to the decode workers that the router named for them.

        resident ── the worker is reached directly: Offer ──▶ departing (worker/offering.py) ──▶ gone
           │ ▲                                                   │
           │ └── Decline, or the worker is lost: it decodes here ┘
           └── else, pages at hand ──▶ the pool hands it to that worker

    Such a request decodes here until the pool has the full pages of its prompt, which are copied beside the steps. So
    it pauses only for the copy of the rest to the pool, and for the copy of all its pages to the other worker.

    Where nothing decodes (prefill_worker/state.py), every request is handed on as soon as its prompt has run, chats
    first. It goes to the pool, which batches those for which no worker was named. Where no pool is of use, it is
    offered to a decode worker, and waits on this device until that worker has room.
    """

    def __init__(
        self,
        here: Requests,
        memory: PlainMemory,
        pool: PoolLink,
        leaving: Leaving,
        writing: PageWriting,
        prompts: PromptKeeping,
    ) -> None:
        self._here, self.leaving, self._page_size = here, leaving, writing.page_size
        self._hands_on_all, self._keeps = not memory.decodes, memory.pace.policy.handoff is Handoff.DEVICE
        self._writing, self._prompts, self._peers, self._pool = writing, prompts, here.candidates, pool

    @property
    def ready(self) -> list[WorkerRequest]:
        """Return the requests that can be handed on now."""
        residents = self._here.residents.values()
        if self._hands_on_all:
            going = sorted(residents, key=lambda running: not running.promise.is_rt)
        else:
            going = [running for running in residents if running.decode]
        return [running for running in going if self._is_ready(running)]

    @property
    def needs_no_pool(self) -> bool:
        """Return whether KV goes to decode workers directly, and no decode worker reads the pool of this node."""
        if not (self._hands_on_all and (peers := self._peers.peers)):
            return False
        pool = self._pool.member
        return pool is None or self._keeps or all(peer.node != pool.node for peer in peers)

    def has_use_for_pages(self) -> bool:
        """Return whether pages may be taken for prompts that still run: requests go by the pool, and no request that
        waits to leave lacks pages."""
        return not self.needs_no_pool and self.lacks_pages() is None

    def _is_ready(self, running: WorkerRequest) -> bool:
        awaits_pages = self._prompts.awaits(running) or self._writing.awaits(running)
        is_writing = self._writing.writer.is_writing(running)
        return is_writable(running, self._page_size) and not (awaits_pages or is_writing)

    def hand_on(self, now: float) -> list[Command]:
        """Let requests leave whose worker is reached directly, or for which there are pages at hand."""
        commands: list[Command] = []
        waits_there = self.needs_no_pool
        for running in self.ready:
            to = self._way_for(running) if waits_there else self.leaving.reached(running, now)
            if to is not None:
                commands.append(self.leaving.offering.offer(running, to, waits_there))
            elif self._writing.has_pages(running):
                commands += self.leaving.preempting.hand_on(running)
        return commands

    def lacks_pages(self) -> WorkerRequest | None:
        """Return the first request that can go nowhere but to the pool, for which too few pages are at hand."""
        return next(iter(self.ready), None) if self._hands_on_all and not self.needs_no_pool else None

    def _way_for(self, running: WorkerRequest) -> Member:
        """Return the worker that was named for the request. Where none was, return the one with the fewest offers.

        The worker from which a request came back last is taken only if there is no other: the way there may be broken.
        """
        offered = Counter(departure.to.name for departure in self._here.departures.wanted)
        back = self.leaving.offering.came_back_from
        others = sorted(self._peers.peers, key=lambda peer: (peer.name == back, offered[peer.name], peer.name))
        return self._peers.peer(running.decode) or others[0]


_REFUSED_STEPS = 64  # steps for which a prefill worker that had no room is sent no request


class Leaving(CorePart):
    """Sends the KV of requests to prefill workers, which can send it back (AlignedServe §3.4).

        resident ── hardly a block is free: Evict ──▶ departing ── Pull: SendKv ──▶ sent ──▶ candidate (its KV there)
            ▲                                          │            └── failed ──┐                │ Pull, ReceiveKv
            ├──────────────── LetGo: no room there ◀───┘                         │                ▼
            └────────────────────────────────────────────────────────────────────┘              resident
                                            given up, lost, or not intact: waiting ── recomputed ──▶

    The transfer goes beside the steps and takes a few of them. So a request that leaves this way is chosen a little
    ahead of need. Other members notice nothing: this worker keeps the request, its output and the pool's pages for it.
    """

    def __init__(
        self,
        here: Requests,
        memory: PlainMemory,
        pool: PoolLink,
        log: WorkerLog,
        preempting: Preempting,
        outputs: Outputs,
    ) -> None:
        self._here, self._candidates, self._departures, self._queue = here, here.candidates, here.departures, here.queue
        self._memory, self._limits, self._steps, self._pool = memory, memory.limits, memory.steps, pool
        self._order, self._pace = memory.order, memory.pace
        self._scheduler, self._context = memory.scheduler, memory.context
        self._faults, self._notes, self._decisions, self.preempting = log.faults, log.notes, log.decisions, preempting
        self.offering = Offering(here, memory, pool, log, outputs)
        self._refused_until: dict[str, int] = {}  # prefill worker that had no room -> step
        self.num_evicted_aside = 0  # requests that left, and whose KV lies on a prefill worker

    # --- Requests that are to leave

    @property
    def is_on(self) -> bool:
        """Return whether requests leave ahead of need."""
        policy = self._pace.policy
        allows = policy.evict and policy.prefetch and policy.grows
        return bool(self._candidates.holders) and allows and not self._here.prompts

    def evict_ahead(self, now: float) -> list[Command]:
        """Let residents leave before a step is planned: a request that leaves is in no step."""
        if not self.is_on:
            return []
        here, commands = self._here, list[Command]()
        lacking = (
            here.blocks_needed(AHEAD_STEPS, self._limits.block_size)
            - self._memory.num_free
            - self._memory.num_freed(departure.running for departure in self._departures)
        )
        while lacking > 0 and len(here.residents) > 1:
            running = self._scheduler.leaving((), (*here.residents.values(),), self._context(now))
            to = None if self._is_bound(running) else self._partner_for(running)
            if to is None:
                break
            commands.append(self.offering.begin(Departure(running, to, self._wait_s)))
            how = f"memory is short, its KV goes to {to.name}"
            self._decisions.note(Kind.DISPLACED, running.request, "", len(running.output), why=how)
            here.note_shortage()
            lacking -= self._memory.num_freed((running,))
        return commands

    def _is_bound(self, running: WorkerRequest) -> bool:
        """Return whether a request never leaves ahead of need: it comes before others, or its KV cannot move."""
        may_go = running.has_tokens and running.kv.can_move
        return not may_go or (running.promise.is_rt and self._pace.policy.is_rt_first)

    def has_room_for(self, steps: int) -> bool:
        """Return whether the decodes can go on for `steps` before a request has to leave ahead of need."""
        if not self.is_on:
            return True
        return self._here.blocks_needed(steps, self._limits.block_size) <= self._memory.num_free

    def _partner_for(self, running: WorkerRequest) -> Member | None:
        """Return the prefill worker that holds least for this worker, if it probably has room for the
        request."""
        most = most_ahead(self._limits, self._pace.policy)
        used = self._candidates.prefetched_blocks(self._limits.block_size)
        for departure in self._departures:
            used[departure.to.name] += len(departure.running.blocks)
        holders = self._candidates.holders
        peers = [peer for peer in holders if self._steps.number >= self._refused_until.get(peer.name, 0)]
        best = min(peers, key=lambda peer: (used[peer.name], peer.name), default=None)
        return best if best is not None and used[best.name] + len(running.blocks) <= most else None

    @property
    def _wait_s(self) -> float:
        """Return the expected time until a request that leaves now runs again: it joins behind all candidates."""
        left = [self._order.tokens_left(candidate) for candidate in self._candidates.waiting]
        return self._pace.times.mean_s * sum(left) / max(1, self._here.num_seated - 1)

    # --- Requests that are handed on

    def reached(self, running: WorkerRequest, now: float) -> Member | None:
        """Return the worker that the request is to go on to, if its KV can go there directly."""
        is_broken = self._pool.member is not None and self.offering.is_broken(running.decode, now)
        by_pool = is_broken or self._pace.policy.handoff is Handoff.POOL or not running.kv.can_move
        return None if by_pool else self._candidates.peer(running.decode)

    # --- On their way

    def pulled(self, pull: Pull, frame: Received, now: float) -> list[Command]:
        """Send the KV that another worker pulls; send nothing where the request has gone on."""
        receiver = holder(frame.sender, frame.incarnation)
        if self._departures.is_late(receiver, pull.number):
            return []
        return [self._departures.send(receiver, pull.number, (pull.request, pull.attempt))]

    def sent(self, event: KvSent, now: float) -> list[Command]:
        departure = self._departures.pulled_as(event.to, event.number)
        if departure is None:
            return []
        if departure.is_offered or not departure.is_wanted:
            return self.offering.sent(departure, event.ok)
        self._faults.num_failed_transfers += not event.ok
        departure.number = None
        if event.ok and self._candidates.peer(departure.to.name) == departure.to:
            self._arrive(departure, now)
        else:
            self.offering.stays(departure)
        return []

    def _arrive(self, departure: Departure, now: float) -> None:
        """Make the request, whose KV has left, a candidate: it joins again when there is room."""
        self._departures.remove(departure)
        running, to = departure.running, departure.to
        self._here.move(running, State.CANDIDATE)
        self._memory.release(running)
        self.preempting.note_eviction(running, PreemptionCause.AHEAD)
        self.num_evicted_aside += 1
        promise, entry = running.promise, running.entry((), running.names)
        self._candidates.add(
            JoinCandidate(entry, to, False, promise, promise.due_at(now), now, partner=to, evicted=running)
        )

    def let_go(self, message: LetGo, frame: Received, now: float) -> None:
        """Let requests stay that have not left, and recompute those whose KV is gone."""
        sender = frame.sender
        for attempt in message.attempts:
            departure = self._departures.find(attempt)
            if departure is not None and departure.to.name == sender and departure.number is None:
                self._refused_until[sender] = self._steps.number + _REFUSED_STEPS
                self.offering.stays(departure)
        self._recompute(self._candidates.take_evicted(sender, message.attempts))

    def peer_lost(self, event: MemberLost, now: float) -> list[Command]:
        """Let requests stay that were to go to a member that is lost."""
        self._recompute(self._candidates.take_evicted(event.member.name))
        return self.offering.peer_lost(event.member)

    def _recompute(self, evicted: Iterable[WorkerRequest]) -> None:
        for running in evicted:
            self._queue.put_back(running)

    def drop(self, request: str, attempt: int) -> list[Command]:
        for departure in self._departures.wanted:
            if departure.running.is_of(request, attempt) and not departure.is_offered:
                self._candidates.note_unwanted(departure.to.name, departure.running.key)
        return []
