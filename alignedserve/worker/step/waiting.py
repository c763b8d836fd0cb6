"""Prompts that wait for room on a worker, kept in the order in which they are to be served.

To rank all of them at every step would take longer than the step where thousands wait. What their order depends on
moves alike for all, but for three things: a due that passes, a level that rises with age, and the step times that work
is reckoned with. So each prompt is filed once by its slack as an instant (due - work), and again when its due passes or
its level rises; all are filed anew when the step times or the size of chunks have moved by a fifth (BROS §4.2).

    in time ─ by slack, real-time ones whose due still counts: the first of them that can make it bounds the step
    RT      ─ by slack: those at the front are urgent;   and by (priority, slack): the others
    BE      ─ by slack: those at the front are urgent;   and by (priority, ...): the others
    late    ─ by slack, where the late are dropped to the end
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Any, Protocol, TypeAlias

from alignedserve.scheduling.policy import Choice, Order, Policy
from alignedserve.scheduling.promise import TokenPromise
from alignedserve.scheduling.slo import Late, Rank, StepTimes
from alignedserve.worker.step.running import Running

_DRIFT = 0.2  # of step times and chunks, before all are filed anew

_HOPELESS = 32  # prompts that are looked at for one that can still be in time
_FEW = 64  # changes that are kept, whoever they are of

Place: TypeAlias = tuple[Any, ...]  # what it is sorted by, a number of its own, and the prompt
Ranked: TypeAlias = tuple[tuple[Any, ...], Running]  # by what it is ranked


class Serial(Protocol):
    serial: int  # no two that were ever filed have the same


class Changes:
    """When places change by themselves: a heap. Those that were filed anew since, or have left, count no more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Running]] = []

    def add(self, at: float, serial: int, running: Running) -> None:
        heappush(self._heap, (at, serial, running))

    def before(self, now: float, filed: Mapping[Running, Serial]) -> Iterator[Running]:
        while self._heap and self._heap[0][0] < now:
            _, serial, running = heappop(self._heap)
            if (at := filed.get(running)) is not None and at.serial == serial:
                yield running

    def sweep(self, filed: Mapping[Running, Serial]) -> None:
        """Who has left would stay, with all its tokens, until it would have been late: that may be days."""
        if len(self._heap) > 2 * len(filed) + _FEW:
            self._heap = [one for one in self._heap if one[2] in filed and filed[one[2]].serial == one[1]]
            heapify(self._heap)


@dataclass(slots=True)
class _Filed:
    """Where a prompt is in the lists."""

    serial: int
    until: float  # its slack as an instant
    places: list[tuple[list[Place], Place]] = field(default_factory=list)


class Waiting:
    """First come, first served needs no more than the arrivals; the rest is kept for what works by promises."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._all: OrderedDict[Running, None] = OrderedDict()  # in the order of arrival
        self._rt_alone: OrderedDict[Running, None] = OrderedDict()  # of them
        self._be_alone: OrderedDict[Running, None] = OrderedDict()
        self._named: dict[str, list[Running]] = {}
        self.num_tokens = self.num_rt_tokens = 0  # that are to be run of all of them, and of the real-time ones
        self._is_filed = not policy.is_plain
        self._by_windows = policy.selection is Choice.MULTI_RESOURCE
        self._filed: dict[Running, _Filed] = {}
        self._unfiled: dict[Running, None] = {}
        self._serial = 0
        self._times, self._chunk = StepTimes(), 1  # that they are filed by
        self._clear()

    def _clear(self) -> None:
        self._in_time: list[Place] = []
        self._rt: list[Place] = []
        self._rt_later: list[Place] = []
        self._be: list[Place] = []
        self._be_later: list[Place] = []
        self._late: list[Place] = []
        self._shortest: list[Place] = []
        self._by_ttft: list[Place] = []
        self._dues = Changes()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Running]:
        """In the order of arrival."""
        return iter(self._all)

    @property
    def real_time(self) -> Iterator[Running]:
        """In the order of arrival."""
        return iter(self._rt_alone)

    @property
    def best_effort(self) -> Iterator[Running]:
        """In the order of arrival."""
        return iter(self._be_alone)

    def _alone(self, running: Running) -> OrderedDict[Running, None]:
        return self._rt_alone if running.promise.is_rt else self._be_alone

    def add(self, running: Running) -> None:
        self._all[running] = None
        self._alone(running)[running] = None
        self._named.setdefault(running.request.id, []).append(running)
        self._count(running, running.num_ahead)
        if self._is_filed:
            self._unfiled[running] = None

    def _count(self, running: Running, tokens: int) -> None:
        self.num_tokens += tokens
        if running.promise.is_rt:
            self.num_rt_tokens += tokens

    def add_first(self, running: Running) -> None:
        """Before all that have arrived."""
        self.add(running)
        self._all.move_to_end(running, last=False)
        self._alone(running).move_to_end(running, last=False)

    def remove(self, running: Running) -> None:
        del self._all[running]
        del self._alone(running)[running]
        same = self._named[running.request.id]
        same.remove(running)
        if not same:
            del self._named[running.request.id]
        self._count(running, -running.num_tokens)  # a prompt that waits has nothing in a cache
        self._unfiled.pop(running, None)
        self._take_out(running)

    def drop(self, request: str, attempt: int) -> list[Running]:
        """Those of this request, up to this attempt: they wait no more."""
        leaving = [one for one in self._named.get(request, ()) if one.is_of(request, attempt)]
        for running in leaving:
            self.remove(running)
        return leaving

    def named(self, request: str) -> Sequence[Running]:
        return self._named.get(request, ())

    def moved(self, running: Running) -> None:
        """What its order depends on has changed, if it waits here."""
        if self._is_filed and running in self._all:
            self._take_out(running)
            self._unfiled[running] = None

    # --- Their order

    def refresh(self, now: float, times: StepTimes, chunk: int) -> None:
        """Before anything below is asked at this moment."""
        if _moved(self._times.most_s, times.most_s) or _moved(self._chunk, chunk):
            self._times, self._chunk = times, chunk
            self._filed.clear()
            self._clear()
            self._unfiled = dict.fromkeys(self._all)
        for running in self._dues.before(now, self._filed):
            self._take_out(running)
            self._unfiled[running] = None
        for running in self._unfiled:
            self._file(running, now)
        self._unfiled.clear()
        self._dues.sweep(self._filed)

    def _take_out(self, running: Running) -> None:
        filed = self._filed.pop(running, None)
        for places, place in filed.places if filed is not None else ():
            del places[bisect_left(places, place)]

    def _file(self, running: Running, now: float) -> None:
        standing = running.promise.standing(now, running.work(self._chunk), self._times)
        until, late = standing.slack_s + now, self._policy.late is Late.DROP_LAST
        self._serial += 1
        end = (standing.arrival_at, standing.id, self._serial, running)
        by_slack = (until, standing.remaining, *end)
        places: list[tuple[list[Place], Place]] = []
        if isinstance(running.promise, TokenPromise) and not running.promise.dues.num_missed:
            places.append((self._in_time, by_slack))
        if self._policy.as_in_paper and running.promise.is_rt:
            places.append((self._by_ttft, (running.request.slo.ttft_s, *end)))
        match self._policy.order:
            case Order.SHORTEST_REMAINING:
                places.append((self._shortest, (standing.remaining, *end)))
            case Order.SLACK if standing.is_late and late:
                places.append((self._late, by_slack))
            case Order.SLACK if running.promise.is_rt:
                places += [(self._rt, by_slack), (self._rt_later, (standing.priority, *by_slack))]
            case Order.SLACK:
                key = (until,) if self._by_windows else (standing.level, standing.restore_s)
                later = (standing.priority, *key, standing.remaining, *end)
                places += [(self._be, by_slack), (self._be_later, later)]
        for among, place in places:
            insort(among, place)
        self._filed[running] = _Filed(self._serial, until, places)
        changes_at = running.promise.changes_at(now)
        if (running.promise.is_rt or late or not self._by_windows) and changes_at >= now:
            self._dues.add(changes_at, self._serial, running)

    def bound_s(self, now: float, chunk_s: Callable[[int], float]) -> float:
        """R, as far as they are concerned (slo.step_room_s).

        Who could not even run its next chunk in time, which takes `chunk_s`, binds only if all of it in one step would
        be; else not at all. Those are at the front, and where they are more than a few those behind them will hardly
        make it either.
        """
        from_s, bound = now - self._times.most_s, inf  # a step that is still to come is in their slack
        first = bisect_left(self._in_time, (from_s + chunk_s(1),))
        for place in islice(self._in_time, max(0, first - _HOPELESS), first + _HOPELESS):
            room_s, ahead = float(place[0]) - from_s, place[-1].num_ahead
            if room_s >= chunk_s(min(ahead, self._chunk)):
                return min(bound, room_s)
            left_s = place[-1].promise.due_at(now) - now
            if chunk_s(ahead) <= left_s < bound and not place[-1].promise.is_late(now):
                bound = left_s
        return bound

    @property
    def least_ttft_s(self) -> float:
        """Of the real-time ones; kept for AccelGen's budget."""
        return float(self._by_ttft[0][0]) if self._by_ttft else inf

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        rank: tuple[float, ...] = (Rank.URGENT_RT,) if is_rt else (Rank.URGENT_BE, True)
        for place in self._rt if is_rt else self._be:
            if place[0] - now > most_s:
                return
            yield (*rank, place[0] - now, *place[1:4]), place[-1]

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        """Those that are not urgent, by priority and what comes after it."""
        rank: tuple[float, ...] = (Rank.RT,) if is_rt else (Rank.BE, True)
        for place in self._rt_later if is_rt else self._be_later:
            if self._filed[place[-1]].until - now > most_s:
                key = (place[0], place[1] - now) if is_rt or self._by_windows else place[:2]
                yield (*rank, *key, *place[2:-2]), place[-1]

    def late(self, now: float) -> Iterator[Ranked]:
        for place in self._late:
            yield (Rank.LATE, place[0] - now, *place[1:4]), place[-1]

    def in_order(self, now: float, most_s: float, only_rt: bool = False, only_be: bool = False) -> Iterator[Ranked]:
        """All, the real-time ones (and who is late), or the others; keys compare with those of `Standing.key`."""
        classes = (True,) if only_rt else (False,) if only_be else (True, False)
        match self._policy.order:
            case Order.FCFS:
                for number, running in enumerate(self._rt_alone if only_rt else self._all):
                    yield (number,), running
            case Order.SHORTEST_REMAINING:
                for place in self._shortest:
                    if place[-1].promise.is_rt in classes:
                        yield place[:3], place[-1]
            case Order.SLACK:
                for is_rt in classes:
                    yield from self.urgent(now, most_s, is_rt)
                for is_rt in classes:
                    yield from self.later(now, most_s, is_rt)
                if not only_be:
                    yield from self.late(now)


def _moved(one: float, other: float) -> bool:
    return abs(other - one) > _DRIFT * one
