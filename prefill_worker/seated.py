"""Decodes that are seated, more of them than a step has places for, kept in the order in which they are to be served.

Those that ran in the last step have other dues now, and so have those whose due has passed or whose level has risen.
All others stand where they stood: to rank all of them at every step would take longer than the step (BROS §4.2). Lists
that are nearly sorted are sorted in nearly linear time.

    RT    ─ by slack, as an instant: those at the front are urgent
    BE    ─ by slack: those at the front are urgent;   and by (priority, level, ...): the others
    late  ─ by slack, where the late are dropped to the end
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from alignedserve.policy import Policy
from alignedserve.prefill_worker.waiting import Place, Ranked
from alignedserve.running import Running
from alignedserve.slo import Late, Rank, StepTimes, Work

_DRIFT = 0.2  # of step times, before all are filed anew
_ONE = Work()  # token


@dataclass(slots=True)
class _Filed:
    serial: int
    num_output: int
    until: float  # its slack as an instant


class Seated:
    def __init__(self, policy: Policy) -> None:
        self._late = policy.late
        self._times = StepTimes(-1.0, -1.0)  # that they are filed by
        self._filed: dict[Running, _Filed] = {}
        self._num_filed = 0
        self._ran: Sequence[Running] = ()  # since they were filed
        self._clear()

    def _clear(self) -> None:
        self._filed.clear()
        self._has_priorities = False  # of real-time ones, some other than 0
        self._rt: list[Place] = []
        self._be: list[Place] = []
        self._be_later: list[Place] = []
        self._dropped: list[Place] = []
        self._changes: list[tuple[float, int, Running]] = []  # a heap; what has been filed since says another time

    def refresh(self, decodes: Sequence[Running], now: float, times: StepTimes) -> None:
        """Before anything below is asked at this moment."""
        if _moved(self._times.mean_s, times.mean_s) or _moved(self._times.most_s, times.most_s):
            self._times = times
            self._clear()
        filed, here = self._filed, set(decodes)
        ended = filed.keys() - here
        joined = [one for one in decodes if one not in filed] if len(filed) - len(ended) < len(decodes) else []
        stale = [one for one in self._ran if one in filed and filed[one].num_output != len(one.output)]
        while self._changes and self._changes[0][0] < now:
            _, serial, running = heappop(self._changes)
            if (at := filed.get(running)) is not None and at.serial == serial:
                stale.append(running)
        stale = [one for one in dict.fromkeys(stale) if one not in ended]
        gone = {filed.pop(one).serial for one in (*stale, *ended)}
        self._ran = ()
        if gone:
            for places in (self._rt, self._be, self._be_later, self._dropped):
                places[:] = [place for place in places if place[-2] not in gone]
        for running in (*stale, *joined):
            self._file(running, now)
        if len(self._changes) > 2 * len(filed) + 64:
            self._changes = [one for one in self._changes if one[2] in filed and filed[one[2]].serial == one[1]]
            heapify(self._changes)
        for places in (self._rt, self._be, self._be_later, self._dropped):
            places.sort()

    def forget(self) -> None:
        """A step runs that nobody was asked for here."""
        if self._filed:
            self._clear()

    def ran(self, these: Sequence[Running]) -> None:
        """They are to run now, so that they stand elsewhere the next time."""
        self._ran = these

    def _file(self, running: Running, now: float) -> None:
        """At the end of its lists, which are to be sorted."""
        promise = running.promise
        tokens = promise.tokens_due
        standing = promise.standing(now, _ONE if tokens == 1 else Work(tokens=tokens), self._times)
        until = standing.slack_s + now
        self._num_filed += 1
        end = (standing.remaining, standing.arrival_at, standing.id, self._num_filed, running)
        if standing.is_late and self._late is Late.DROP_LAST:
            self._dropped.append((until, *end))
        elif promise.is_rt:
            self._rt.append((until, *end))
            self._has_priorities |= standing.priority != 0
        else:
            self._be.append((until, *end))
            self._be_later.append((standing.priority, standing.level, standing.restore_s, *end))
        self._filed[running] = _Filed(self._num_filed, len(running.output), until)
        if (changes_at := promise.changes_at(now)) >= now:
            heappush(self._changes, (changes_at, self._num_filed, running))

    # --- In the order of slo.Standing.key

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        rank: tuple[float, ...] = (Rank.URGENT_RT,) if is_rt else (Rank.URGENT_BE, False)
        for place in self._rt if is_rt else self._be:
            if place[0] - now > most_s:
                return
            yield (*rank, place[0] - now, *place[1:-2]), place[-1]

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        if not is_rt:
            for place in self._be_later:
                if self._filed[place[-1]].until - now > most_s:
                    yield (Rank.BE, False, *place[:-2]), place[-1]
            return
        first = bisect_left(self._rt, True, key=lambda place: place[0] - now > most_s)
        places: Iterator[Place] = islice(self._rt, first, None)
        if self._has_priorities:
            places = iter(sorted(places, key=lambda place: place[-1].request.priority))
        for place in places:
            yield (Rank.RT, place[-1].request.priority, place[0] - now, *place[1:-2]), place[-1]

    def late(self, now: float) -> Iterator[Ranked]:
        for place in self._dropped:
            yield (Rank.LATE, place[0] - now, *place[1:-2]), place[-1]

    @property
    def real_time(self) -> Sequence[Running]:
        """Those that are not dropped, by slack."""
        return [place[-1] for place in self._rt]


def _moved(one: float, other: float) -> bool:
    return abs(other - one) > _DRIFT * one if one >= 0 else True
