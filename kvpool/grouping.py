"""The waiting entries of the pool, and which of them a decode worker gets next:

    one by one  in order, of any length, while there is room
    in time     the same, after real-time requests that cannot wait (pinned); requests of unequal length share
                steps only where that is cheap: each worker decides that itself (schedulers/near_lengths.py)
    by length   requests of about one length together, where all wait for a batch here (AlignedServe §3.3):

        commit ──▶ tree ── find_batch ──▶ the worker's next batch, whole, before there is room for it
           │        ├── requests as long as the running batch (dynamic): its candidate requests
           │        ▼ the slack has run out
           └──▶ pinned: real-time requests that cannot wait, while there is room

The pool looks for a batch when the worker has no next batch. Ahead of need the pool looks only where enough requests
wait for a full batch; and a worker gets at most its share of the waiting requests, so that other workers lack none.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from alignedserve.core import Entry, Request, ServiceClass, units_for
from alignedserve.kvpool.batching import BatchBounds, find_batch
from alignedserve.kvpool.quadtree import ROOT, QuadTree, leaf_of
from alignedserve.protocol.messages import AskBatch
from alignedserve.scheduling.dues import Promise
from alignedserve.scheduling.lengths import room_for
from alignedserve.scheduling.policy import Grouping, Policy
from alignedserve.scheduling.slo import Rank, Standing, Work, in_order

DEVICE_SHARE = 0.4  # most of a worker's blocks that a batch may take, so that the next batch can arrive while it ends
LEAST = 36  # least requests of a batch, where enough wait
_WEIGHT = 0.1  # weight of the newest wait in the mean
_LEAST_S = 1e-3  # least time between two looks at requests that run out of slack
_NO_ASK = AskBatch(0, 0)


@dataclass(eq=False)
class WaitingEntry:
    entry: Entry
    promise: Promise
    since: float
    to: str = ""  # the decode worker that the router named, if any

    def __post_init__(self) -> None:
        self.promise.served(self.since)  # the request was served until now

    @property
    def id(self) -> str:
        return self.entry.request.id

    def standing(self, ask: AskBatch, now: float) -> Standing:
        """Return the request's place in the order: a copy and a decode come before the next token."""
        transfer_s = self.entry.num_held * ask.copy_token_s
        return self.promise.standing(now, Work(transfer_s=transfer_s), ask.times)


class _RoomLeft:
    """The room of a worker while requests are chosen for it."""

    def __init__(self, ask: AskBatch, blocks_for: Callable[[Entry, int], int]) -> None:
        self._blocks, self._requests, self._blocks_for = ask.blocks, ask.requests, blocks_for
        self._rt_blocks, self._all_blocks = ask.rt_blocks, ask.all_blocks

    def take(self, waiting: WaitingEntry) -> bool:
        blocks = self._blocks_for(waiting.entry, self._all_blocks)
        preempted = max(0, blocks - self._blocks)
        if preempted > (self._rt_blocks if waiting.promise.is_rt else 0) or not self._requests:
            return False
        self._blocks -= blocks - preempted
        self._rt_blocks -= preempted
        self._requests -= 1
        return True


@dataclass(frozen=True, slots=True)
class Handed:
    """The requests that go to a worker."""

    pinned: Sequence[WaitingEntry] = ()
    dynamic: Sequence[WaitingEntry] = ()  # requests for the batch that runs there
    batch: Sequence[WaitingEntry] = ()

    @property
    def all(self) -> list[WaitingEntry]:
        return [*self.pinned, *self.dynamic, *self.batch]


class Waiters(ABC):
    """All waiting entries, and which of them are next."""

    def __init__(self, policy: Policy, block_size: int) -> None:
        self._policy, self._block_size = policy, block_size
        self._waiting: dict[str, WaitingEntry] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingEntry]:
        return iter(self._waiting.values())

    def get(self, request: str) -> Entry | None:
        waiting = self._waiting.get(request)
        return None if waiting is None else waiting.entry

    def waiting(self, request: str) -> WaitingEntry | None:
        return self._waiting.get(request)

    def add(self, waiting: WaitingEntry) -> None:
        self._waiting[waiting.id] = waiting

    def back(self, returned: Iterable[WaitingEntry]) -> None:
        """Put entries before all others: they had been handed out to a worker that was lost."""
        waiting_before, self._waiting = self._waiting, {}
        for waiting in returned:
            self.add(waiting)
        self._waiting |= waiting_before

    def remove(self, request: str) -> WaitingEntry | None:
        return self._waiting.pop(request, None)

    @abstractmethod
    def next_for(self, worker: str, ask: AskBatch, now: float) -> Handed:
        """Take and return the requests that go to the worker now."""

    @property
    def pinned(self) -> Sequence[WaitingEntry]:
        """Return real-time requests that would miss a token by waiting for the next batch."""
        return ()

    def looks_at(self, _now: float) -> float | None:
        """Return when the slack of a waiting request may run out, or None."""
        return None

    def forget_worker(self, worker: str) -> None:  # noqa: B027  (in order, workers are not told apart)
        """Forget a worker that is gone."""

    def _blocks_for(self, entry: Entry, all_blocks: int) -> int:
        most = all_blocks * self._block_size
        tokens = room_for(entry.request, len(entry.output), self._policy, most) - entry.dropped
        return units_for(tokens, self._block_size)

    def _in_order(self, ask: AskBatch, now: float) -> Iterable[WaitingEntry]:
        policy = self._policy
        return policy.ordering.sort(self, lambda waiting: waiting.standing(ask, now), ask.times, policy.late)

    def _hand_out(self, candidates: Iterable[WaitingEntry], places: _RoomLeft) -> tuple[list[WaitingEntry], bool]:
        """Take the requests that fit, and return these and whether all fit."""
        taken: list[WaitingEntry] = []
        for waiting in list(candidates):
            if not places.take(waiting):
                return taken, False
            taken.append(waiting)
            self.remove(waiting.id)
        return taken, True

    def _with_some_ahead(self, found: Sequence[WaitingEntry], ask: AskBatch, places: _RoomLeft) -> list[WaitingEntry]:
        """Take the requests that fit, and the next ones that the worker wants to have at hand."""
        taken, _ = self._hand_out(found, places)
        ahead = found[len(taken) : len(taken) + ask.ahead]
        for waiting in ahead:
            self.remove(waiting.id)
        return [*taken, *ahead]


class OneByOne(Waiters):
    def next_for(self, worker: str, ask: AskBatch, now: float) -> Handed:
        found = list(self._in_order(ask, now))
        taken = self._with_some_ahead(found, ask, _RoomLeft(ask, self._blocks_for))
        return Handed(dynamic=taken) if self._policy.swaps else Handed(batch=taken)


class SlowestAsk:
    """The last ask of the worker with the longest steps; an ask without times while there is no worker."""

    def __init__(self) -> None:
        self._asks: dict[str, AskBatch] = {}  # worker -> its last ask
        self._slowest: str | None = None

    @property
    def ask(self) -> AskBatch:
        return _NO_ASK if self._slowest is None else self._asks[self._slowest]

    @property
    def num_workers(self) -> int:
        return len(self._asks)

    def heard(self, worker: str, ask: AskBatch) -> None:
        self._asks[worker] = ask
        if self._slowest is None or ask.times.most_s > self.ask.times.most_s:
            self._slowest = worker
        elif worker == self._slowest:  # another worker may be slower now
            self._look()

    def forget(self, worker: str) -> None:
        self._asks.pop(worker, None)
        if worker == self._slowest:
            self._look()

    def _look(self) -> None:
        self._slowest = max(self._asks, key=lambda worker: self._asks[worker].times.most_s, default=None)


def in_turns(found: Sequence[WaitingEntry], out: Iterable[Request]) -> Sequence[WaitingEntry]:
    """Let the best-effort requests of several callers take turns by weight, those that are `out` counted.

    They share the places that they have among all. For example, if ten of one caller are out and ten more wait, the
    first of another comes before these; if none is out, one of each in turn."""
    documents = [waiting for waiting in found if waiting.entry.request.service is ServiceClass.BE]
    weights = {waiting.entry.request.caller: waiting.entry.request.weight for waiting in documents}
    if len(weights) < 2:
        return found
    turns, ranked = Counter(request.caller for request in out if request.service is ServiceClass.BE), []
    for place, waiting in enumerate(documents):
        caller = waiting.entry.request.caller
        turns[caller] += 1
        ranked.append((turns[caller] / weights[caller], place))
    shared = iter([documents[place] for _, place in sorted(ranked)])
    return [next(shared) if waiting.entry.request.service is ServiceClass.BE else waiting for waiting in found]


class InTime(Waiters):
    def __init__(self, policy: Policy, block_size: int, out: Callable[[], Iterable[Request]] = tuple) -> None:
        """`out` returns the requests that were handed out here and that workers have."""
        super().__init__(policy, block_size)
        self._out = out
        self._pinned: dict[str, WaitingEntry] = {}
        # Heap of (when a real-time request must be handed out, number, entry); entries that have left stay there.
        self._in_time: list[tuple[float, int, WaitingEntry]] = []
        self._num_ever = 0
        self._slowest = SlowestAsk()  # a request must be in time even on this worker
        self._mean_wait_s = 0.0  # mean time from commit to hand-out

    def add(self, waiting: WaitingEntry) -> None:
        super().add(waiting)
        if waiting.promise.is_rt and self._policy.pinning:
            self._watch(waiting, waiting.since)
            self._pin_those_out_of_slack(waiting.since)

    def remove(self, request: str) -> WaitingEntry | None:
        self._pinned.pop(request, None)
        return super().remove(request)

    def forget_worker(self, worker: str) -> None:
        self._slowest.forget(worker)

    def next_for(self, worker: str, ask: AskBatch, now: float) -> Handed:
        self._slowest.heard(worker, ask)
        self._pin_those_out_of_slack(now)
        places = _RoomLeft(ask, self._blocks_for)
        pinned, all_fit = self._hand_out(self._most_urgent_pinned(ask, now), places)
        handed = self._choose(pinned, ask, places, now) if all_fit else Handed(pinned)
        for waiting in handed.all:
            self._mean_wait_s += _WEIGHT * (now - waiting.since - self._mean_wait_s)
        return handed

    def _choose(self, pinned: Sequence[WaitingEntry], ask: AskBatch, places: _RoomLeft, now: float) -> Handed:
        """Take requests of any length in order: as many as fit, and some ahead."""
        found = list(self._in_order(ask, now)) if ask.requests or ask.ahead else []
        urgent = [*takewhile(lambda waiting: self._is_urgent(waiting, ask, now), found)]  # no key's turn goes before
        in_turn = in_turns(found[len(urgent) :], self._out())
        return Handed(pinned, self._with_some_ahead([*urgent, *in_turn], ask, places))

    def _is_urgent(self, waiting: WaitingEntry, ask: AskBatch, now: float) -> bool:
        return waiting.standing(ask, now).rank(ask.times, self._policy.late) <= Rank.URGENT_BE

    @property
    def _wait_s(self) -> float:
        return self._mean_wait_s + self._slowest.ask.wait_s + self._slowest.ask.times.most_s

    # --- Requests that cannot wait

    @property
    def pinned(self) -> Sequence[WaitingEntry]:
        return list(self._pinned.values())

    def looks_at(self, now: float) -> float | None:
        while self._in_time and not self._may_wait(self._in_time[0][2]):
            heapq.heappop(self._in_time)
        return max(self._in_time[0][0] - self._wait_s, now + _LEAST_S) if self._in_time else None

    def _watch(self, waiting: WaitingEntry, now: float) -> None:
        slack_s = waiting.standing(self._slowest.ask, now).slack_s  # without the copy
        self._num_ever += 1
        heapq.heappush(self._in_time, (now + slack_s, self._num_ever, waiting))

    def _pin_those_out_of_slack(self, now: float) -> None:
        """Pin requests that cannot wait: on arrival, or later, when waits get longer or a missed due moves."""
        can_wait = list[WaitingEntry]()
        while self._in_time and self._in_time[0][0] - now <= self._wait_s:
            waiting = heapq.heappop(self._in_time)[2]
            if not self._may_wait(waiting):
                continue
            if waiting.standing(self._slowest.ask, now).slack_s > self._wait_s:
                can_wait.append(waiting)
            else:
                self._pin(waiting)
        for waiting in can_wait:
            self._watch(waiting, now)

    def _pin(self, waiting: WaitingEntry) -> None:
        self._pinned[waiting.id] = waiting

    def _may_wait(self, waiting: WaitingEntry) -> bool:
        return self._waiting.get(waiting.id) is waiting and waiting.id not in self._pinned

    def _most_urgent_pinned(self, ask: AskBatch, now: float) -> list[WaitingEntry]:
        standings = [waiting.standing(ask, now) for waiting in self._pinned.values()]
        return [self._pinned[standing.id] for standing in in_order(standings, ask.times, self._policy.late)]


class ByLength(InTime):
    def __init__(self, policy: Policy, block_size: int, out: Callable[[], Iterable[Request]] = tuple) -> None:
        super().__init__(policy, block_size, out)
        self._tree = QuadTree()  # of all that are not pinned

    def add(self, waiting: WaitingEntry) -> None:
        entry, now = waiting.entry, waiting.since
        self._tree.insert(waiting.id, entry.num_held, self._blocks_for(entry, 0), waiting.promise.due_at(now), now)
        super().add(waiting)

    def remove(self, request: str) -> WaitingEntry | None:
        if request in self._tree:
            self._tree.remove(request)
        return super().remove(request)

    def _pin(self, waiting: WaitingEntry) -> None:
        self._tree.remove(waiting.id)
        super()._pin(waiting)

    def _choose(self, pinned: Sequence[WaitingEntry], ask: AskBatch, places: _RoomLeft, now: float) -> Handed:
        dynamic, are_few = self._dynamic(ask, places), self._are_few(ask)
        batch = self._found(ask, now)
        if are_few and ask.band is not None:  # too few requests for a batch
            dynamic, batch = dynamic + batch, []
        return Handed(pinned, dynamic, batch)

    def _dynamic(self, ask: AskBatch, places: _RoomLeft) -> list[WaitingEntry]:
        """Take requests as long as those that run on the worker: as many as fit, and some ahead."""
        if ask.band is None:
            return []
        shortest, longest = ask.band
        leaves = self._tree.filled(range(leaf_of(shortest), leaf_of(longest) + 1))
        members = (member for leaf in leaves for member in self._tree.members(leaf))
        found = [self._waiting[member.id] for member in sorted(islice(members, ask.requests + ask.ahead))]
        return self._with_some_ahead(found, ask, places)

    def _are_few(self, ask: AskBatch) -> bool:
        """Return whether all waiting requests fit into one small batch, so that there is nothing to choose."""
        fit_together = self._tree.blocks(ROOT) <= _most_blocks(ask)
        return len(self._tree) < min(LEAST, ask.most_requests) and fit_together

    def _found(self, ask: AskBatch, now: float) -> list[WaitingEntry]:
        """Take and return the worker's next batch."""
        has_room = ask.requests > 0 and ask.blocks + ask.rt_blocks > 0
        waits_for_more = not has_room and self._are_few(ask) and self._tree.starving(now) is None
        if not ask.wants_batch or waits_for_more:
            return []
        most = min(ask.most_requests, -(-len(self._tree) // self._slowest.num_workers))
        most_blocks = _most_blocks(ask)
        wanted = BatchBounds(most_blocks, room=ask.all_blocks, least=min(LEAST, most), most=most)
        window = find_batch(self._tree, wanted, now)
        members = sorted(window.members(self._tree))
        self._tree.yielded(window.taken, now)
        found = [self._waiting[member.id] for member in members]
        for waiting in found:
            self.remove(waiting.id)
        return found


def _most_blocks(ask: AskBatch) -> int:
    """Return the most blocks of a batch (B_max)."""
    return max(1, int(DEVICE_SHARE * ask.all_blocks))


def waiters(policy: Policy, block_size: int, out: Callable[[], Iterable[Request]] = tuple) -> Waiters:
    if policy.grouping is Grouping.FCFS:
        return OneByOne(policy, block_size)
    return (ByLength if policy.batches_by_length else InTime)(policy, block_size, out)
