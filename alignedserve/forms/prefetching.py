"""A decode worker's part: asks prefill workers to hold KV of candidates, and of requests that have to leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignedserve.core import WORKERS, PreemptionCause, Role, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import KvReceived, KvSent, MemberLost, Received
from alignedserve.protocol.figures import DecodeSteps
from alignedserve.protocol.form_messages import Evict, Prefetch, PrefetchDeclined, Prefetched
from alignedserve.protocol.messages import Attempt, Cancel, Member
from alignedserve.scheduling.lengths import tokens_left
from alignedserve.scheduling.levels import InLine, expected_waits, level_of
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import Events, FormPart, Worker
from alignedserve.worker.step.request import Departure, JoinCandidate, WorkerRequest
from alignedserve.worker.step.states import State

# Until the blocks of a request that leaves are free: Evict, Pull, and the end of the transfer each wait for a step.
_AHEAD_STEPS = 4
_REFUSED_STEPS = 64  # steps for which a prefill worker that had no room is sent no request


@dataclass(eq=False)
class Eviction(Departure):
    """A request that keeps its KV on a prefill worker until there is room here again."""

    wait_s: float = 0.0  # until then, as was expected
    goes_on_there = False

    @property
    def ask(self) -> Command:
        return Send(self.to.name, Evict(self.entry, self.wait_s))


class Prefetching(FormPart):
    """Has prefill workers hold the KV of candidates that wait in the pool, and of requests that have to leave.

        candidate ── Prefetch ──▶ (copied beside prompts) ── Prefetched ──▶ pulled on joining
            └── room before that, or PrefetchDeclined: the candidate joins from the pool as usual

        resident ── hardly a block is free: Evict ──▶ departing ── Pull: SendKv ──▶ sent ──▶ candidate (its KV there)
            ▲                                          │            └── failed ──┐                │ Pull, ReceiveKv
            ├──────────────── PrefetchDeclined: no room there ◀───┘                         │                ▼
            └────────────────────────────────────────────────────────────────────┘              resident
                                            given up, lost, or not intact: waiting ── recomputed ──▶

    What is prefetched is only a copy: nothing waits for it, and a prefill worker that dies loses nothing else. The
    transfer of a leaving request runs beside a few steps. So the request is chosen a little ahead of need. Other
    members notice nothing: this worker keeps the request, its output and the pool's pages.
    """

    def __init__(self, worker: Worker, offering: Offering) -> None:
        super().__init__(worker)
        self._offering = offering
        self._most = int(self._policy.candidate_share * self._limits.num_blocks)  # that a partner is expected to have
        self._refused_until: dict[str, int] = {}  # prefill worker that had no room -> step
        self.num_prefetched = 0  # requests that joined from a prefill worker's device, and had waited in the pool
        self.num_wasted = 0  # copies that partners were told to drop
        self.num_evicted = 0  # requests that left their KV on a prefill worker

    @property
    def events(self) -> Events:
        return {
            Prefetched: (self._prefetched,),
            PrefetchDeclined: (self._let_go,),
            KvReceived: (self._received,),
            KvSent: (self._sent,),
            **{(MemberLost, role): (self._peer_lost,) for role in WORKERS},
        }

    def act(self, now: float) -> list[Command]:
        """Ask for the KV of candidates, and tell partners about copies of candidates that have joined from the pool, or
        are not wanted any more."""
        asked = self._prefetch(now)
        unwanted, self._candidates.unwanted = self._candidates.unwanted, []
        self.num_wasted += len(unwanted)
        return [*asked, *(Send(name, Cancel(*attempt)) for name, attempt in unwanted)]

    def counted(self, steps: DecodeSteps) -> DecodeSteps:
        return replace(steps, prefetched=self.num_prefetched, in_vain=self.num_wasted)

    # --- Prefill workers that hold KV for this one

    @property
    def holders(self) -> list[Member]:
        """Return the prefill workers that can hold KV: those that decode too have no memory for that."""
        return [peer for peer in self._candidates.peers.values() if peer.role is Role.PREFILL]

    def _partner_for(self, blocks: int, peers: Sequence[Member], used: Counter[str]) -> Member | None:
        """Return the peer that holds least for this worker, if these blocks probably fit there."""
        best = min(peers, key=lambda peer: (used[peer.name], peer.name), default=None)
        return best if best is not None and used[best.name] + blocks <= self._most else None

    @property
    def _used(self) -> Counter[str]:
        """Return the blocks that candidates have, or are to have, on each partner."""
        used: Counter[str] = Counter()
        for candidate in self._candidates.waiting:
            if candidate.partner is not None:
                used[candidate.partner.name] += units_for(candidate.running.num_held, self._limits.block_size)
        return used

    # --- Copies of candidates

    def _prefetch(self, now: float) -> list[Command]:
        """Ask prefill workers for the KV of candidates that could not join at once, in their order: for as many as may
        find room, at partners of the pool's node."""
        pool = self._pool.member
        peers = [] if pool is None else [peer for peer in self.holders if peer.node == pool.node]
        if not peers:
            return []
        used, chosen = self._used, dict[str, list[JoinCandidate]]()
        for candidate in self._candidates.waiting:
            if candidate.source is not None or candidate.partner is not None or candidate.is_refused:
                continue  # the KV is not in the pool alone
            blocks = units_for(candidate.running.num_held, self._limits.block_size)
            if (partner := self._partner_for(blocks, peers, used)) is None:
                break
            used[partner.name] += blocks
            candidate.partner = partner
            chosen.setdefault(partner.name, []).append(candidate)
        waits = self._expected_waits(now) if chosen else {}
        return [
            Send(name, Prefetch(tuple(c.entry for c in some), tuple(waits[c] for c in some)))
            for name, some in chosen.items()
        ]

    def _expected_waits(self, now: float) -> dict[JoinCandidate, float]:
        """Return how long each candidate waits (ALISE §3.2) if earlier candidates join first and as many run as now."""

        def in_line(candidate: JoinCandidate) -> InLine:
            tokens = self._tokens_left(candidate)
            level = None if candidate.is_rt else level_of(tokens)
            return InLine(tokens * self._pace.times.mean_s, now - candidate.since, level)

        waiting = list(self._candidates.waiting)
        waits = expected_waits(map(in_line, waiting), max(1, self._here.num_seated), self._policy.age_s)
        return dict(zip(waiting, waits, strict=True))

    def _tokens_left(self, candidate: JoinCandidate) -> int:
        """Return how many more tokens of output are expected."""
        return tokens_left(candidate.running.request, self._policy, len(candidate.running.output))

    def _prefetched(self, message: Prefetched, frame: Received, now: float) -> list[Command]:
        """Note which candidates' KV the sender has; tell the sender which is not wanted any more: an earlier word may
        have been lost.

        The answer to an Evict may be heard before, or after, its transfer is known to have been sent."""
        sender, unwanted = frame.sender, list[Attempt]()
        peer = self._candidates.peers.get(sender)
        moving = [of.running.key for of in self._here.departures if of.is_wanted and of.to.name == sender]
        moving += [of.key for of in self._here.coming if of.source is not None and of.source.name == sender]
        for attempt in message.attempts:
            candidate = self._candidates.find(attempt, State.CANDIDATE)
            if candidate is not None and peer is not None and candidate.partner == peer:
                candidate.source = peer
            elif attempt not in moving:
                unwanted.append(attempt)
        return [Send(sender, Cancel(*attempt)) for attempt in unwanted]

    def _received(self, event: KvReceived, now: float) -> None:
        candidate = self._candidates.coming_from(event.source, event.number)
        is_wanted = candidate.running.state is State.RECEIVING
        self.num_prefetched += event.intact and is_wanted and candidate.is_copied

    # --- Requests that leave ahead of need

    @property
    def _is_on(self) -> bool:
        """Return whether requests leave ahead of need."""
        allows = self._policy.evict and self._policy.grows
        return allows and bool(self.holders) and not self._here.prompts

    @property
    def has_room_ahead(self) -> bool:
        return not self._is_on or self._blocks_needed(_AHEAD_STEPS + 1) <= self._memory.num_free

    def _blocks_needed(self, steps: int) -> int:
        """Return the blocks that decodes need to go on for this many steps."""
        decodes, size = (each for each in self._here.residents.values() if not each.kv.form), self._limits.block_size
        return sum(running.num_held + steps > len(running.blocks) * size for running in decodes)

    def make_room(self, now: float) -> list[Command]:
        """Let residents leave before a step is planned: a request that leaves is in no step.

        Where memory goes by worth, none leaves ahead of need."""
        if not self._is_on or self._scheduler.weighs_memory:
            return []
        here, memory, commands = self._here, self._memory, list[Command]()
        departing = memory.num_freed(departure.running for departure in self._here.departures)
        lacking = self._blocks_needed(_AHEAD_STEPS) - memory.num_free - departing
        while lacking > 0 and len(here.residents) > 1:
            running = self._scheduler.leaving((), (*here.residents.values(),), memory.context(now))
            to = None if self._is_bound(running) else self._holder_for(running)
            if to is None:
                break
            commands.append(self._offering.begin(Eviction(running, to, wait_s=self._wait_s)))
            how = f"memory is short, its KV goes to {to.name}"
            self._decisions.note(Kind.DISPLACED, running.request, "", len(running.output), why=how)
            here.note_shortage()
            lacking -= memory.num_freed((running,))
        return commands

    def _is_bound(self, running: WorkerRequest) -> bool:
        """Return whether a request never leaves ahead of need: the class comes first, or the KV cannot move."""
        may_go = running.has_tokens and running.kv.can_move
        return not may_go or (running.promise.is_rt and self._policy.is_rt_first)

    def _holder_for(self, running: WorkerRequest) -> Member | None:
        """Return the prefill worker that the request is to leave for."""
        used = self._used
        for departure in self._here.departures:
            used[departure.to.name] += len(departure.running.blocks)
        peers = [peer for peer in self.holders if self._steps.number >= self._refused_until.get(peer.name, 0)]
        return self._partner_for(len(running.blocks), peers, used)

    @property
    def _wait_s(self) -> float:
        """Return the expected time until a request that leaves now runs again, behind all candidates."""
        left = sum(map(self._tokens_left, self._candidates.waiting))
        return self._pace.times.mean_s * left / max(1, self._here.num_seated - 1)

    def _sent(self, event: KvSent, now: float) -> None:
        """Make a candidate of a request when the KV has left: the request joins again when there is room. Else the
        request stays."""
        departure = self._offering.pulled_as(event.to, event.number)
        if not isinstance(departure, Eviction) or not departure.is_wanted:
            return
        self._counts.num_failed_transfers += not event.ok
        departure.number = None
        running, to = departure.running, departure.to
        if not event.ok or self._candidates.peers.get(to.name) != to:
            self._offering.stays(departure)
            return
        entry, due_at = departure.entry, running.promise.due_at(now)
        self._candidates.add(JoinCandidate(running, entry, to, due_at, now, partner=to, is_evicted=True))
        self._memory.release(running)
        self._counts.count_preempted(running, PreemptionCause.AHEAD, keeps_kv=True)
        self._here.note_shortage()
        self.num_evicted += 1

    # --- KV that a partner does not hold, or not any more

    def _let_go(self, message: PrefetchDeclined, frame: Received, now: float) -> None:
        """Let candidates join from the pool, let requests stay that have not left, and recompute requests without
        KV."""
        sender = frame.sender
        for attempt in message.attempts:
            departure = self._offering.departure_of(attempt)
            if departure is not None and departure.to.name == sender and departure.number is None:
                self._refused_until[sender] = self._steps.number + _REFUSED_STEPS
                self._offering.stays(departure)
        for candidate in self._candidates.waiting:
            is_held = candidate.partner is not None and candidate.partner.name == sender
            if is_held and candidate.key in message.attempts:
                self._go_without(candidate, is_refused=True)

    def _peer_lost(self, event: MemberLost, now: float) -> None:
        """Let candidates join from the pool, if it still has the KV; recompute requests that had to leave."""
        for candidate in self._candidates.waiting:
            if candidate.partner == event.member and (candidate.is_evicted or candidate.came.pages):
                self._go_without(candidate, candidate.is_refused)

    def _go_without(self, candidate: JoinCandidate, is_refused: bool) -> None:
        """Have the pool's copy of a candidate read, or recompute a request that had to leave."""
        if candidate.is_evicted:
            self._queue.put_back(candidate.running)
        else:
            candidate.source, candidate.partner, candidate.is_refused = None, None, is_refused
