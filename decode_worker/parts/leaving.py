"""Requests that have to leave a decode worker, to a prefill worker that can send their KV back (AlignedServe §3.4).

    resident ── hardly a pair is free: Evict ──▶ leaving ── Pull: SendKv ──▶ sent ──▶ candidate request (its KV there)
        ▲                                          │            └── failed ──┐                │ room: Pull, ReceiveKv
        ├──────────────── LetGo: no room there ◀───┘                         │                ▼
        └────────────────────────────────────────────────────────────────────┘              resident
                                        let go, lost, or not intact: waiting ── computed anew ──▶

What goes beside the steps takes a few of them until its pairs are free. So a request that leaves this way is chosen a
little ahead of need; a request that has to make room at once goes to the pool's pages (preempting.py). Other members
notice nothing: the request is this worker's all the time, with its output and the pages that the pool keeps for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from alignedserve.core import PreemptionCause, Role
from alignedserve.decode_worker.parts.preempting import Preempting
from alignedserve.decode_worker.parts.prefetching import most_ahead
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.decode_worker.requests.departures import Departure
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, Send, SendKv
from alignedserve.protocol.events import Event, KvSent, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Evict, LetGo, Member, Pull, holder
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running

# Until the pairs of a request that leaves are free: Evict, Pull, and the end of the transfer each wait for a step.
AHEAD_STEPS = 4
_REFUSED_STEPS = 64  # in which no request is sent to a prefill worker that had no room


class Leaving(CorePart):
    def __init__(self, stores: Stores, preempting: Preempting) -> None:
        self._limits, self._pace, self._here, self._steps = stores.limits, stores.pace, stores.here, stores.steps
        self._candidates, self._line, self._order = stores.candidates, stores.line, stores.order
        self._memory, self._queue = stores.memory, stores.queue
        self._holds, self._faults = stores.holds, stores.faults
        self._departures = stores.here.departures
        self._preempting, self._decisions = preempting, stores.decisions
        self._pulled: Counter[str] = Counter()  # holder of a receiver -> the number of its newest Pull
        self._asks_again = False
        self._refused_until: dict[str, int] = {}  # prefill worker that had no room -> step
        self.num_evicted_aside = 0  # requests that left, and whose KV lies on a prefill worker

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Pull(number, request, attempt), incarnation):
                return self._send(holder(sender, incarnation), number, (request, attempt))
            case Received(sender, LetGo(attempts)):
                self._let_go(sender, attempts)
            case KvSent(number, to, ok):
                return self._end(to, number, ok, now)
            case MemberLost(member) if member.role is Role.PREFILL:
                self._lose(member)
        return []

    # --- Requests that are to leave

    @property
    def is_on(self) -> bool:
        """Return whether requests leave ahead of need."""
        policy = self._pace.policy
        allows = policy.evict and policy.prefetch and policy.grows
        return bool(self._candidates.peers) and allows and not self._here.prompts

    def evict_ahead(self, now: float) -> list[Command]:
        """Let residents leave before a step is planned: a request that leaves is in no step."""
        if not self.is_on:
            return []
        here, commands = self._here, list[Command]()
        lacking = self._pairs_needed(AHEAD_STEPS) - self._memory.num_free - self._memory.num_freed(self.occupants())
        while lacking > 0 and len(here.residents) > 1:
            running = self._order.scheduler.leaving((), (*here.residents.values(),), now)
            to = None if self._is_bound(running) else self._partner_for(running)
            if to is None:
                break
            here.remove(running)
            departure = Departure(running, to, self._wait_s)
            self._departures.add(departure)
            how = f"memory is short, its KV goes to {to.name}"
            self._decisions.note(Kind.DISPLACED, running.request, "", len(running.output), why=how)
            here.note_shortage()
            commands.append(_evict(departure))
            lacking -= self._memory.num_freed((running,))
        return commands

    def _is_bound(self, running: Running) -> bool:
        """Return whether a request does not leave ahead of need: others may take its pairs at once, or it has them not
        as a prefill worker would hold them."""
        may_go = running.has_tokens and not running.blocks and not running.folded
        return not may_go or (running.promise.is_rt and self._pace.policy.is_rt_first)

    def has_room_for(self, steps: int) -> bool:
        """Return whether the decodes can go on for so many steps before a request has to leave ahead of need."""
        return not self.is_on or self._pairs_needed(steps) <= self._memory.num_free

    def _pairs_needed(self, steps: int) -> int:
        return self._here.pairs_needed(steps, self._limits.block_size)

    def _partner_for(self, running: Running) -> Member | None:
        """Return the prefill worker that holds least for this worker, if there is room for the request as far as is
        known."""
        most = most_ahead(self._limits, self._pace.policy)
        used = self._candidates.prefetched_pairs(self._limits.block_size)
        for departure in self._departures:
            used[departure.to.name] += len(departure.running.pairs)
        peers = [peer for peer in self._candidates.peers if self._steps.number >= self._refused_until.get(peer.name, 0)]
        best = min(peers, key=lambda peer: (used[peer.name], peer.name), default=None)
        return best if best is not None and used[best.name] + len(running.pairs) <= most else None

    @property
    def _wait_s(self) -> float:
        """Return the time until a request that leaves runs again, as far as can be expected: behind all candidates."""
        left = [self._line.tokens_left(candidate) for candidate in self._candidates.waiting]
        return self._pace.times.mean_s * sum(left) / max(1, self._here.num_seated)

    # --- On their way

    def _send(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        """Send the KV that a prefill worker pulls; send nothing where the request has gone on."""
        if number <= self._pulled[receiver]:
            return []  # the receiver has repeated its Pull
        self._pulled[receiver] = number
        departure = self._departures.find(attempt)
        if departure is None or departure.number is not None or departure.to.holder != receiver:
            return [SendKv(number, receiver, (), ())]
        departure.number = number
        running = departure.running
        return [SendKv(number, receiver, running.pairs, running.kept_tokens)]

    def _end(self, receiver: str, number: int, ok: bool, now: float) -> list[Command]:
        departure = self._departures.pulled_as(receiver, number)
        if departure is None:
            return []
        if not departure.is_wanted:
            self._departures.remove(departure)
            self._memory.give(departure.running.pairs)
        elif ok and self._candidates.peer(departure.to.name) == departure.to:
            self._arrive(departure, now)
        else:
            self._stay(departure)
        self._faults.num_failed_transfers += not ok
        return []

    def _arrive(self, departure: Departure, now: float) -> None:
        """Make a candidate request of it: it joins again when there is room."""
        self._departures.remove(departure)
        running, to = departure.running, departure.to
        self._memory.release(running)
        running.pairs = ()
        self._preempting.note_eviction(running, PreemptionCause.AHEAD)
        self.num_evicted_aside += 1
        promise, entry = running.promise, running.entry((), running.names)
        self._candidates.add(
            JoinCandidate(entry, to, False, promise, promise.due_at(now), now, partner=to, evicted=running)
        )

    def _stay(self, departure: Departure) -> None:
        """Let the request run again."""
        self._departures.remove(departure)
        here, running = self._here.residents, departure.running
        here[running.request.id] = running
        self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(here))

    def _let_go(self, sender: str, attempts: Iterable[Attempt]) -> None:
        """Let requests stay that have not left; of those that are gone the KV is computed anew."""
        for attempt in attempts:
            departure = self._departures.find(attempt)
            if departure is not None and departure.to.name == sender and departure.number is None:
                self._refused_until[sender] = self._steps.number + _REFUSED_STEPS
                self._stay(departure)
        self._compute_anew(self._candidates.take_evicted(sender, attempts))

    def _lose(self, peer: Member) -> None:
        """Let requests stay that were to go to a member that is lost. The end of a transfer is heard in any case."""
        for departure in [departure for departure in self._departures.unpulled if departure.to == peer]:
            self._stay(departure)
        self._compute_anew(self._candidates.take_evicted(peer.name))

    def _compute_anew(self, evicted: Iterable[Running]) -> None:
        for running in evicted:
            self._queue.put_back(running)

    # --- Requests that are leaving

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Mark requests that leave as not wanted. A request that is being sent has its pairs until that has ended."""
        commands: list[Command] = []
        for departure in self._departures.wanted:
            if not departure.running.is_of(request, attempt):
                continue
            self._candidates.note_unwanted(departure.to.name, departure.running.key)
            departure.is_wanted = False
            if departure.number is None:
                self._departures.remove(departure)
                self._memory.give(departure.running.pairs)
            commands += self._holds.release(departure.running.key)
        return commands

    def attempts(self) -> list[Attempt]:
        return [departure.running.key for departure in self._departures.wanted]

    def occupants(self) -> list[Running]:
        return [departure.running for departure in self._departures]

    def ask_again(self) -> None:
        self._asks_again = True

    def repeat_evictions(self, now: float) -> list[Command]:
        """Tell prefill workers again of requests that they have not pulled: the order or its answer may be lost."""
        again, self._asks_again = self._asks_again, False
        return [_evict(departure) for departure in self._departures.unpulled] if again else []

    def repeat(self, to: str) -> list[Command]:
        return [_evict(departure) for departure in self._departures.unpulled if departure.to.name == to]

    @property
    def awaits_answer(self) -> bool:
        return len(self._departures) > 0


def _evict(departure: Departure) -> Command:
    return Send(departure.to.name, Evict(departure.running.entry((), departure.running.names), departure.wait_s))
