"""Requests with a seat, in the order of service of a step (slo.Standing).

Where more requests decode than a step has places for, the order is kept between steps: to rank all at every step would
take longer than the step (BROS §4.2). A decode gets a new place after it ran, after its due has passed, or
after its level has risen. All others keep their places:

    RT    ─ by slack, as an instant: the first are urgent
    BE    ─ by slack: the first are urgent;   and by (priority, level, ...): the others
    late  ─ by slack, where late decodes are dropped to the end
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import filterfalse, islice
from math import inf
from typing import Any

from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, Rank, StepTimes, Work
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import Changes, Place, Ranked, has_moved


def ranked(seated: Sequence[WorkerRequest], at: StepContext) -> Iterable[Ranked]:
    """Return seated requests with their keys, in the order of service."""
    ordering = at.policy.ordering
    if ordering.goes_by_promises:
        return RankedRequests(seated, at)
    if not isinstance(ordering, ByKey):
        return ranked_by_arrival(seated)
    by_key = list[Ranked]()
    for running in seated:
        standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
        by_key.append(((ordering.key(standing), standing.arrival_at, standing.id), running))
    return sorted(by_key, key=key_of)


def in_order(seated: Iterable[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
    """Return seated requests in the order of service."""
    return [running for _, running in ranked(tuple(seated), at)]


def of_old_batch(requests: Sequence[WorkerRequest], at: StepContext) -> Sequence[WorkerRequest]:
    """Return the requests of the old batch during a batch switch, otherwise all (AlignedServe §3.4)."""
    return [running for running in requests if running.batch != at.newest_batch] or requests


def last_of_old(requests: Sequence[WorkerRequest], at: StepContext) -> WorkerRequest:
    """Return the request of the old batch that is served last."""
    return in_order(of_old_batch(requests, at), at)[-1]


def as_they_leave(requests: Sequence[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
    """Return seated requests, the first to leave last."""
    return sorted(in_order(requests, at), key=lambda running: running.batch != at.newest_batch)


def ranked_by_arrival(seated: Iterable[WorkerRequest]) -> list[Ranked]:
    """Return seated requests before all that wait."""
    return [((-1,), running) for running in seated]


class RankedRequests:
    """Seated requests in one sorted list per rank. `kept` has the decodes, where their order is kept."""

    def __init__(self, seated: Iterable[WorkerRequest], at: StepContext, kept: DecodeOrder | None = None) -> None:
        self._kept, self._now, self._most_s = kept, at.now, at.times.most_s
        late, document_key = at.policy.late, at.policy.ordering.document_key
        self._lists: dict[float, list[Ranked]] = {rank: [] for rank in Rank}
        for running in seated:
            standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
            key: tuple[Any, ...] = standing.key(at.times, late)
            if key[0] is Rank.BE:
                key = (*key[:3], *document_key(standing), standing.remaining)
            self._lists[key[0]].append(((*key, standing.arrival_at, standing.id), running))
        for ranks in self._lists.values():
            ranks.sort(key=key_of)

    def __iter__(self) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(is_rt)
        for is_rt in (True, False):
            yield from in_turn(self.decodes(is_rt), self.prompts(is_rt))
        yield from self.dropped()

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        found = self._lists[Rank.URGENT_RT if is_rt else Rank.URGENT_BE]
        return found if self._kept is None else in_turn(self._kept.urgent(self._now, self._most_s, is_rt), found)

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the decodes that are not urgent."""
        if self._kept is not None:
            return self._kept.later(self._now, self._most_s, is_rt)
        return [found for found in self._lists[Rank.RT if is_rt else Rank.BE] if found[1].decodes]

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the prompts that are not urgent."""
        return [found for found in self._lists[Rank.RT if is_rt else Rank.BE] if not found[1].decodes]

    def dropped(self) -> Iterable[Ranked]:
        """Return the late requests, which are dropped to the end."""
        found = self._lists[Rank.LATE]
        return found if self._kept is None else in_turn(self._kept.late(self._now), found)


def key_of(ranked: Ranked) -> Any:
    return ranked[0]


def in_turn(*orders: Iterable[Ranked]) -> Iterable[Ranked]:
    """Return several sorted orders as one."""
    return merge(*orders, key=key_of)


_DRIFT = 0.2  # of step times, before all are filed again
_ONE = Work()  # token


@dataclass(slots=True)
class _Lists:
    """Places of decodes, each list sorted. Places that count no more are passed over until they are swept out."""

    rt: list[Place] = field(default_factory=list)
    in_time: list[Place] = field(default_factory=list)  # real-time decodes that have missed nothing
    be: list[Place] = field(default_factory=list)
    be_later: list[Place] = field(default_factory=list)
    dropped: list[Place] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Place]]:
        return iter((self.rt, self.in_time, self.be, self.be_later, self.dropped))

    def add(self, fresh: _Lists) -> None:
        """Add places. Decodes that ran are due at about the same time: only the stretch from the first new place to
        the last is sorted."""
        for places, more in zip(self, fresh, strict=True):
            if more:
                more.sort()
                first, last = bisect_left(places, more[0]), bisect_left(places, more[-1])
                places[first:last] = sorted(more + places[first:last])

    def sweep(self, gone: set[int], most: int) -> None:
        """Take out places that count no more: all once there are more than `most`; until then only places at the front,
        where the decodes of the last step stood."""
        for places in self:
            if len(gone) > most:
                places[:] = [place for place in places if place[-2] not in gone]
            else:
                del places[: next((at for at, place in enumerate(places) if place[-2] not in gone), len(places))]
        if len(gone) > most:
            gone.clear()


@dataclass(slots=True)
class _FiledDecode:
    serial: int
    until: float  # the slack as an instant
    missed_s: float  # the promised time between two tokens if a due was missed; else 0
    changes_at: float  # when the place changes by itself


class DecodeOrder:
    def __init__(self, policy: Policy) -> None:
        self._late = policy.late
        self._times = StepTimes(-1.0, -1.0)  # that decodes are filed by
        self._filed: dict[WorkerRequest, _FiledDecode] = {}
        self._num_filed = 0
        self.most = 0  # decodes that a step has places for
        self._clear()

    def _clear(self) -> None:
        self._filed.clear()
        self._moved: dict[WorkerRequest, None] = {}  # decodes that ran, or changed, since the last filing
        self._has_priorities = False  # whether a real-time decode has a priority other than 0
        self._lists = _Lists()
        self._gone = set[int]()  # numbers of places that count no more
        self._missed: Counter[float] = Counter()  # tbt -> decodes that have missed something
        self._changes = Changes()  # of best-effort decodes; the front of `rt` tells of others; dropped decodes stay so

    def refresh(self, decodes: Sequence[WorkerRequest], most: int, now: float, times: StepTimes) -> None:
        """Bring the order up to date. This comes before anything below is asked at this moment."""
        if has_moved(self._times.mean_s, times.mean_s) or has_moved(self._times.most_s, times.most_s):
            self._times = times
            self._clear()
        self.most = most
        filed, ended = self._filed, set[WorkerRequest]()
        joined = list(filterfalse(filed.__contains__, decodes))
        if len(filed) + len(joined) > len(decodes):
            ended = filed.keys() - set(decodes)
        stale = list(filter(filed.__contains__, self._moved))
        stale += self._changes.before(now, filed)
        for place in self._lists.rt:  # no decode's due has passed that has slack
            if place[0] > now:
                break
            if (at := filed.get(place[-1])) is not None and at.serial == place[-2] and at.changes_at < now:
                stale.append(place[-1])
        stale = [running for running in dict.fromkeys(stale) if running not in ended]
        for running in (*stale, *ended):
            self._take_out(running)
        self._moved.clear()
        self._lists.sweep(self._gone, len(filed) // 2)
        fresh = _Lists()
        for running in (*stale, *joined):
            self._file(running, now, fresh)
        self._lists.add(fresh)
        self._changes.sweep(filed)

    def refile(self, running: WorkerRequest) -> None:
        """File a decode that is here again: something that the order depends on has changed."""
        if running in self._filed:
            self._moved[running] = None

    def forget(self) -> None:
        """Forget all places: no step is chosen by them."""
        if self._filed:
            self._clear()

    def note_run(self, decodes: Sequence[WorkerRequest]) -> None:
        """Note the decodes that run now: they get other places at the next refresh."""
        self._moved.update(dict.fromkeys(filter(self._filed.__contains__, decodes)))

    def _take_out(self, running: WorkerRequest) -> None:
        filed = self._filed.pop(running)
        self._gone.add(filed.serial)
        if filed.missed_s:
            self._missed[filed.missed_s] -= 1

    def _valid(self, places: Iterable[Place]) -> Iterator[Place]:
        gone = self._gone
        return (place for place in places if place[-2] not in gone)

    def _file(self, running: WorkerRequest, now: float, into: _Lists) -> None:
        """File a decode in the lists. This is most of what a step costs."""
        promise = running.promise
        standing = promise.standing(now, _ONE, self._times)
        until, missed_s = standing.slack_s + now, 0.0
        self._num_filed += 1
        end = (standing.remaining, standing.arrival_at, standing.id, self._num_filed, running)
        place: Place = (until, *end)
        if standing.is_late and self._late is Late.DROP_LAST:
            into.dropped.append(place)
        elif promise.is_rt:
            into.rt.append(place)
            self._has_priorities |= standing.priority != 0
            if promise.num_missed:
                missed_s = promise.tbt_s
                self._missed[missed_s] += 1
            else:
                into.in_time.append(place)
        else:
            into.be.append(place)
            into.be_later.append((standing.priority, standing.level, standing.restore_s, *end))
        if (changes_at := promise.changes_at(now)) < now:
            changes_at = inf
        elif not promise.is_rt:
            self._changes.add(changes_at, self._num_filed, running)
        self._filed[running] = _FiledDecode(self._num_filed, until, missed_s, changes_at)

    # --- In the order of slo.Standing.key

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        rank: tuple[float, ...] = (Rank.URGENT_RT,) if is_rt else (Rank.URGENT_BE, False)
        gone = self._gone
        for place in self._lists.rt if is_rt else self._lists.be:
            if place[0] - now > most_s:
                return
            if place[-2] not in gone:
                yield (*rank, place[0] - now, *place[1:-2]), place[-1]

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        if not is_rt:
            for place in self._valid(self._lists.be_later):
                if self._filed[place[-1]].until - now > most_s:
                    yield (Rank.BE, False, *place[:-2]), place[-1]
            return
        first = bisect_left(self._lists.rt, True, key=lambda place: place[0] - now > most_s)
        places = self._valid(islice(self._lists.rt, first, None))
        if self._has_priorities:
            places = iter(sorted(places, key=lambda place: place[-1].request.priority))
        for place in places:
            yield (Rank.RT, place[-1].request.priority, place[0] - now, *place[1:-2]), place[-1]

    def late(self, now: float) -> Iterator[Ranked]:
        for place in self._valid(self._lists.dropped):
            yield (Rank.LATE, place[0] - now, *place[1:-2]), place[-1]

    def real_time(self, most: int | None = None) -> Sequence[WorkerRequest]:
        """Return at most `most` real-time decodes that are not dropped, by slack."""
        return [place[-1] for place in islice(self._valid(self._lists.rt), most)]

    def in_time(self) -> Iterator[tuple[float, WorkerRequest]]:
        """Yield real-time decodes that have missed nothing, each with an instant before its next due.

        The instants rise: a step that ends by such an instant makes no decode late that is yielded later.
        """
        for place in self._valid(self._lists.in_time):
            yield place[0] + self._times.mean_s, place[-1]

    @property
    def least_missed_s(self) -> float:
        """Return the least time between two tokens that was promised to a decode that has missed something."""
        return min((tbt_s for tbt_s, count in self._missed.items() if count), default=inf)
