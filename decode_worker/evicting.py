"""Who has to leave a decode worker, to a prefill worker that can send its KV back (AlignedServe §3.4).

    resident ── hardly a pair is free: Evict ──▶ leaving ── Pull: SendKv ──▶ sent ──▶ candidate request (its KV there)
        ▲                                          │            └── failed ──┐                │ room: Pull, ReceiveKv
        ├──────────────── LetGo: no room there ◀───┘                         │                ▼
        └────────────────────────────────────────────────────────────────────┘              resident
                                        let go, lost, or not intact: waiting ── computed anew ──▶

What goes beside the steps takes a few of them until its pairs are free. So who leaves this way is chosen a little ahead
of need; who has to make room at once goes to the pool's pages (seats.py). In everybody else's eyes nothing happens: the
request is this worker's all the time, with what it has said and what the pool keeps of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core import Role
from alignedserve.decode_worker.candidates import Candidate
from alignedserve.decode_worker.pulling import PullingCore
from alignedserve.protocol.commands import Command, Send, SendKv
from alignedserve.protocol.events import Event, KvSent, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Evict, LetGo, Member, Pull, holder
from alignedserve.worker.core import WorkerSetup
from alignedserve.worker.step.running import Running

# Until the pairs of one that leaves are free: Evict, Pull, and the end of the transfer each wait for one.
AHEAD_STEPS = 4
_REFUSED_STEPS = 64  # in which nobody is sent where there was no room


@dataclass(eq=False)
class Leaving:
    running: Running  # with its pairs
    to: Member
    wait_s: float  # until it is back, as was expected
    number: int | None = None  # of the transfer, once it is pulled
    is_wanted: bool = True


class EvictingCore(PullingCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._leaves: list[Leaving] = []
        self._pulled_from_here: Counter[str] = Counter()  # holder of a receiver -> the number of its last Pull
        self._evicts_again = False
        self._refused_until: dict[str, int] = {}  # prefill worker that had no room -> step
        self.num_evicted_aside = 0  # of those that left, whose KV lies on a prefill worker

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(sender, Pull(number, request, attempt), incarnation):
                return self._pulled(holder(sender, incarnation), number, (request, attempt))
            case Received(sender, LetGo(attempts)):
                self._let_go(sender, attempts)
            case KvSent(number, to, ok):
                return self._sent(to, number, ok)
            case MemberLost(member) if member.role is Role.PREFILL:
                self._peer_lost(member)
        return super()._happened(event)

    # --- Who leaves

    def _evict_ahead(self) -> list[Command]:
        """Before a step is planned: who leaves is in none."""
        if not self._evicts_ahead:
            return []
        leaving = sum(len(one.running.pairs) for one in self._leaves)
        lacking = self._pairs_needed(AHEAD_STEPS) - self._blocks.num_free - leaving
        commands: list[Command] = []
        while lacking > 0 and len(self._residents) > 1:
            one = self._packer.leaving((), (*self._residents.values(),))
            to = None if one.promise.is_rt or not self._is_written(one) else self._partner_for(one)
            if to is None:
                break
            del self._residents[one.request.id]
            wait_s = self._wait_of(one)
            self._leaves.append(Leaving(one, to, wait_s))
            self._crowded_at = self._num_seated
            commands.append(self._evict(self._leaves[-1]))
            lacking -= len(one.pairs)
        return commands

    @property
    def _evicts_ahead(self) -> bool:
        policy, peers = self._policy, self._candidates.peers
        return bool(peers) and policy.evict and policy.prefetch and policy.grows and not self._prompts

    def _pairs_needed(self, steps: int) -> int:
        """By those that decode, to go on for so many steps."""
        size = self._limits.block_size
        return sum(one.prefix + steps > len(one.pairs) * size for one in self._residents.values() if not one.blocks)

    def _partner_for(self, one: Running) -> Member | None:
        """The one that holds least of ours, if there is room for it as far as we know."""
        used, most = self._candidates.prefetched_pairs(self._limits.block_size), self._most_ahead
        for leaving in self._leaves:
            used[leaving.to.name] += len(leaving.running.pairs)
        peers = [one for one in self._candidates.peers if self._steps.number >= self._refused_until.get(one.name, 0)]
        best = min(peers, key=lambda peer: (used[peer.name], peer.name), default=None)
        return best if best is not None and used[best.name] + len(one.pairs) <= most else None

    def _wait_of(self, one: Running) -> float:
        """Until it runs again, as far as can be expected: behind all candidates."""
        left = [self._tokens_left(other.entry) for other in self._candidates.waiting]
        return self._recent.now.mean_s * sum(left) / max(1, self._num_seated)

    def _evict(self, leaving: Leaving) -> Command:
        return Send(leaving.to.name, Evict(leaving.running.entry((), leaving.running.names), leaving.wait_s))

    # --- On its way

    def _leaving_of(self, attempt: Attempt) -> Leaving | None:
        return next((one for one in self._leaves if one.is_wanted and one.running.key == attempt), None)

    def _pulled(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        if number <= self._pulled_from_here[receiver]:
            return []  # it was said again
        self._pulled_from_here[receiver] = number
        leaving = self._leaving_of(attempt)
        if leaving is None or leaving.number is not None or leaving.to.holder != receiver:
            return [SendKv(number, receiver, (), ())]  # it has gone on
        leaving.number = number
        running = leaving.running
        return [SendKv(number, receiver, running.pairs, running.tokens(0, running.prefix))]

    def _sent(self, receiver: str, number: int, ok: bool) -> list[Command]:
        found = [one for one in self._leaves if (one.to.holder, one.number) == (receiver, number)]
        if not found:
            return []
        [leaving] = found
        running = leaving.running
        failed: list[Command] = []
        if not ok:
            self.num_failed_transfers += 1
            failed = [self._figures]
        if not leaving.is_wanted:
            self._leaves.remove(leaving)
            self._give(running.pairs)
        elif ok and self._candidates.peer(leaving.to.name) == leaving.to:
            self._is_there(leaving)
        else:
            self._stay(leaving)
        return failed

    def _is_there(self, leaving: Leaving) -> None:
        """A candidate request: it joins again when there is room."""
        self._leaves.remove(leaving)
        running, to = leaving.running, leaving.to
        self._vacate(running)
        running.pairs = ()
        self.num_preemptions += 1
        self.num_evictions += 1
        self.num_evicted_aside += 1
        self._crowded_at = self._num_seated
        self._arranged_at = -1
        promise, entry = running.promise, running.entry((), running.names)
        due_at, now = promise.due_at(self._now), self._now
        self._candidates.add(Candidate(entry, to, False, promise, due_at, now, partner=to, evicted=running))

    def _stay(self, leaving: Leaving) -> None:
        """It runs again."""
        self._leaves.remove(leaving)
        self._residents[leaving.running.request.id] = leaving.running

    def _prefetched(self, sender: str, attempts: Iterable[Attempt]) -> list[Command]:
        """What comes of an Evict may be heard before, or after, it is known to have been sent."""
        on_their_way = {one.running.key for one in self._leaves if one.is_wanted and one.to.name == sender}
        commands: list[Command] = []
        for attempt in attempts:
            if attempt not in on_their_way:
                commands += super()._prefetched(sender, [attempt])
        return commands

    def _let_go(self, sender: str, attempts: Iterable[Attempt]) -> None:
        """What had not left stays; of what is gone the KV is computed anew."""
        for attempt in attempts:
            leaving = self._leaving_of(attempt)
            if leaving is not None and leaving.to.name == sender and leaving.number is None:
                self._refused_until[sender] = self._steps.number + _REFUSED_STEPS
                self._stay(leaving)
        self._compute_anew(self._candidates.take_evicted(sender, attempts))

    def _peer_lost(self, peer: Member) -> None:
        """Of what is being sent to it we hear in any case."""
        for leaving in [one for one in self._leaves if one.to == peer and one.number is None and one.is_wanted]:
            self._stay(leaving)
        self._compute_anew(self._candidates.take_evicted(peer.name))

    def _compute_anew(self, evicted: Iterable[Running]) -> None:
        for running in evicted:
            self._put_back(running)

    def _drop_leaving(self, request: str, attempt: int) -> list[Attempt]:
        """Nobody wants these any more. What is being sent has its pairs until that has ended."""
        dropped = [one for one in self._leaves if one.is_wanted and one.running.is_of(request, attempt)]
        for one in dropped:
            self._candidates.not_wanted(one.to.name, one.running.key)
            one.is_wanted = False
            if one.number is None:
                self._leaves.remove(one)
                self._give(one.running.pairs)
        return [one.running.key for one in dropped]

    def _evict_again(self) -> list[Command]:
        """What has not been pulled: that, or what was said, may have been lost."""
        again, self._evicts_again = self._evicts_again, False
        return [self._evict(one) for one in self._leaves if again and one.is_wanted and one.number is None]

    # --- What is here

    @property
    def _num_seated(self) -> int:
        """Who leaves may have to stay."""
        return super()._num_seated + len(self._leaves)

    @property
    def _is_arriving(self) -> bool:
        return super()._is_arriving or bool(self._leaves)

    def _seats(self) -> list[Running]:
        return [*super()._seats(), *(one.running for one in self._leaves)]

    def _say_again(self, to: str) -> list[Command]:
        again = [self._evict(one) for one in self._leaves if one.is_wanted and one.number is None and one.to.name == to]
        return [*super()._say_again(to), *again]
