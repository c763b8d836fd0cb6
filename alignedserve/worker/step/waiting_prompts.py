"""Prompts that wait for room on a worker, kept in the order in which they are to be served.

To rank all of them at every step would take longer than the step where thousands wait. What their order depends on
moves alike for all, but for three things: a due that passes, a level that rises with age, and the step times that work
is reckoned with. So each prompt is filed once by its slack as an instant (due - work), and again when its due passes or
its level rises; all are filed again when the step times or the size of chunks have moved by a fifth (BROS §4.2).

    in time ─ by slack, real-time prompts whose due still counts: the first of them that can make it bounds the step
    line    ─ as they are served (lines.py)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Protocol

from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.promise import TokenPromise
from alignedserve.scheduling.slo import Late, StepTimes
from alignedserve.worker.step.device_pages import NOTHING_SHARED, DevicePages
from alignedserve.worker.step.lines import ArrivalLine, FiledPrompt, KeyLine, Place, PromiseLine, WaitingLine
from alignedserve.worker.step.running import Running

_DRIFT = 0.2  # of step times and chunks, before all are filed again
_HOPELESS = 32  # prompts that are looked at for one that can still be in time
_FEW = 64  # changes that are kept, whether their prompts are here or not


class Serial(Protocol):
    serial: int  # no two that were ever filed have the same


class Changes:
    """A heap of the moments when places change by themselves.

    Entries of requests that were filed again since, or have left, count no more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Running]] = []

    def add(self, at: float, serial: int, running: Running) -> None:
        heappush(self._heap, (at, serial, running))

    def before(self, now: float, filed: Mapping[Running, Serial]) -> Iterator[Running]:
        """Take out and yield the requests whose places have changed by now."""
        while self._heap and self._heap[0][0] < now:
            _, serial, running = heappop(self._heap)
            if (at := filed.get(running)) is not None and at.serial == serial:
                yield running

    def sweep(self, filed: Mapping[Running, Serial]) -> None:
        """Take out requests that have left: with all their tokens they would stay until they would have been late,
        which may be days."""
        if len(self._heap) > 2 * len(filed) + _FEW:
            self._heap = [entry for entry in self._heap if entry[2] in filed and filed[entry[2]].serial == entry[1]]
            heapify(self._heap)


class WaitingPrompts:
    def __init__(self, policy: Policy, pages: DevicePages = NOTHING_SHARED) -> None:
        self._policy, self._pages = policy, pages
        # Requests in the order of arrival, each with the tokens that it was counted with, since its known beginning may
        # change.
        self._all: OrderedDict[Running, int] = OrderedDict()
        self._rt_alone: OrderedDict[Running, None] = OrderedDict()  # the real-time ones of them
        self._be_alone: OrderedDict[Running, None] = OrderedDict()
        self._again: dict[Running, None] = {}  # those that had a seat before, and go before others of their class
        self._fetched: dict[Running, None] = {}  # those with pages in the pool, which are copied here
        self._named: dict[str, list[Running]] = {}
        self._ttfts: Counter[float] = Counter()  # promised time to the first token -> real-time prompts
        self.num_tokens = self.num_rt_tokens = 0  # to be computed of all prompts, and of the real-time ones
        self.num_pooled = 0  # prompts that ask for a vector
        self._ranks_be_by_slack = policy.ranks_be_by_slack
        self._drops_late = policy.late is Late.DROP_LAST
        self._filed: dict[Running, FiledPrompt] = {}
        self._unfiled: dict[Running, None] = {}
        self._moved: dict[Running, None] = {}  # filed by what was here of them before
        self._serial = 0
        self._times, self._chunk = StepTimes(), 1  # that prompts are filed by
        self.line = self._new_line()
        self._in_time: list[Place] = []
        self._dues = Changes()

    def _new_line(self) -> WaitingLine:
        ordering = self._policy.ordering
        if isinstance(ordering, ByKey):
            return KeyLine(ordering)
        if ordering.goes_by_promises:
            return PromiseLine(self._policy, self._filed)
        return ArrivalLine(self._all, self._rt_alone)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Running]:
        """Iterate in the order of arrival."""
        return iter(self._all)

    @property
    def real_time(self) -> Iterator[Running]:
        """Iterate over real-time prompts in the order of arrival."""
        return iter(self._rt_alone)

    @property
    def best_effort(self) -> Iterator[Running]:
        """Iterate over best-effort prompts in the order of arrival."""
        return iter(self._be_alone)

    @property
    def num_rt(self) -> int:
        return len(self._rt_alone)

    @property
    def come_first(self) -> bool:
        """Return whether a prompt waits that comes before best-effort requests which the pool has: of a chat, or of a
        request that had a seat before and is the first of its class to get one again."""
        return bool(self._rt_alone or self._again)

    def _alone(self, running: Running) -> OrderedDict[Running, None]:
        return self._rt_alone if running.promise.is_rt else self._be_alone

    def add(self, running: Running) -> None:
        running.looked_up = -1  # the pool may have more of it, or less, than at the last look
        self._pages.look(running)
        self._all[running] = running.num_ahead
        self._alone(running)[running] = None
        self._named.setdefault(running.request.id, []).append(running)
        self.num_pooled += not running.has_tokens
        self._count(running, running.num_ahead)
        self._note_fetch(running)
        if running.promise.is_rt:
            self._ttfts[running.request.slo.ttft_s] += 1
        self._unfiled[running] = None

    def _count(self, running: Running, tokens: int) -> None:
        self.num_tokens += tokens
        if running.promise.is_rt:
            self.num_rt_tokens += tokens

    def look(self, running: Running) -> None:
        """Note what is here by now of a prompt's beginning; its place in the order changes when that is refreshed."""
        self._pages.look(running)
        self._note_fetch(running)
        if running.num_ahead != self._all[running]:
            self._count(running, running.num_ahead - self._all[running])
            self._all[running] = running.num_ahead
            self._moved[running] = None

    def _note_fetch(self, running: Running) -> None:
        if running.is_fetched:
            self._fetched[running] = None
        else:
            self._fetched.pop(running, None)

    @property
    def fetched(self) -> Iterable[Running]:
        """Return the prompts whose first pages are copied from the pool when they are seated."""
        return self._fetched

    def add_first(self, running: Running) -> None:
        """Add a request that had a seat before all that have arrived."""
        self.add(running)
        # A prompt that lost its seat before its first token goes by its length again: long ones wait for all others.
        if running.output or self._policy.ordering.is_by_arrival:
            self._again[running] = None
        self._all.move_to_end(running, last=False)
        self._alone(running).move_to_end(running, last=False)

    def remove(self, running: Running) -> None:
        self._count(running, -self._all.pop(running))
        del self._alone(running)[running]
        self._again.pop(running, None)
        self._fetched.pop(running, None)
        self.num_pooled -= not running.has_tokens
        same = self._named[running.request.id]
        same.remove(running)
        if not same:
            del self._named[running.request.id]
        if running.promise.is_rt:
            self._forget_ttft(running.request.slo.ttft_s)
        self._unfiled.pop(running, None)
        self._moved.pop(running, None)
        self._take_out(running)

    def _forget_ttft(self, ttft_s: float) -> None:
        self._ttfts[ttft_s] -= 1
        if not self._ttfts[ttft_s]:
            del self._ttfts[ttft_s]

    def drop(self, request: str, attempt: int) -> list[Running]:
        """Remove the prompts of this request up to this attempt, and return them."""
        leaving = [running for running in self._named.get(request, ()) if running.is_of(request, attempt)]
        for running in leaving:
            self.remove(running)
        return leaving

    def named(self, request: str) -> Sequence[Running]:
        return self._named.get(request, ())

    def refile(self, running: Running) -> None:
        """File a prompt again because what its order depends on has changed, if it waits here."""
        if running in self._all:
            self._take_out(running)
            self._unfiled[running] = None

    # --- Their order

    def refresh(self, now: float, times: StepTimes, chunk: int) -> None:
        """Bring the order up to date. This comes before `line`, or anything below, is asked at this moment."""
        if _has_moved(self._times.most_s, times.most_s) or _has_moved(self._chunk, chunk):
            self._times, self._chunk = times, chunk
            self._refile_all()
        for running in (*self._moved, *self._dues.before(now, self._filed)):
            self._take_out(running)
            self._unfiled[running] = None
        for running in self._unfiled:
            self._file(running, now)
        self._unfiled.clear()
        self._moved.clear()
        self._dues.sweep(self._filed)

    def _refile_all(self) -> None:
        self._filed.clear()
        self.line = self._new_line()
        self._in_time = []
        self._dues = Changes()
        self._unfiled = dict.fromkeys(self._all)

    def _take_out(self, running: Running) -> None:
        filed = self._filed.pop(running, None)
        for places, place in filed.places if filed is not None else ():
            del places[bisect_left(places, place)]

    def _file(self, running: Running, now: float) -> None:
        standing = running.promise.standing(now, running.work(self._chunk), self._times)
        until = standing.slack_s + now
        self._serial += 1
        end = (standing.arrival_at, standing.id, self._serial, running)
        by_slack = (until, standing.remaining, *end)
        places = self.line.file(standing, by_slack, end)
        if isinstance(running.promise, TokenPromise) and not running.promise.dues.num_missed:
            places.append((self._in_time, by_slack))
        for among, place in places:
            insort(among, place)
        self._filed[running] = FiledPrompt(self._serial, until, places)
        changes_at = running.promise.changes_at(now)
        if (running.promise.is_rt or self._drops_late or not self._ranks_be_by_slack) and changes_at >= now:
            self._dues.add(changes_at, self._serial, running)

    def bound_s(self, now: float, chunk_s: Callable[[int], float]) -> float:
        """Return the most time that the prompts that wait leave for a step (slo.step_room_s).

        A prompt that could not even run its next chunk in time, which takes `chunk_s`, binds only if all of it in one
        step would be in time; else not at all. Such prompts are at the front, and where there are more than a few,
        those behind them will hardly make it either.
        """
        from_s, bound = now - self._times.most_s, inf  # a step that is still to come is in their slack
        first = bisect_left(self._in_time, (from_s + chunk_s(1),))
        for place in islice(self._in_time, max(0, first - _HOPELESS), first + _HOPELESS):
            room_s, ahead = float(place[0]) - from_s, place[-1].num_ahead
            if room_s >= chunk_s(min(ahead, self._chunk)):
                return min(bound, room_s)
            left_s = place[-1].promise.due_at(now) - now - place[-1].fetch_s
            if chunk_s(ahead) <= left_s < bound and not place[-1].promise.is_late(now):
                bound = left_s
        return bound

    @property
    def least_ttft_s(self) -> float:
        """Return the least time to the first token that was promised to a real-time prompt, for AccelGen's budget."""
        return min(self._ttfts, default=inf)


def _has_moved(before: float, value: float) -> bool:
    return abs(value - before) > _DRIFT * before
