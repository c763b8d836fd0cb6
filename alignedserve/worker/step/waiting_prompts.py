"""Prompts that wait for room on a worker, kept in the order of service.

Where thousands wait, to rank all prompts at every step would take longer than the step. What the order depends on moves
alike for all prompts, but for three things: a due that passes, a level that rises with age, and the step times by which
work is reckoned. So each prompt is filed once by its slack as an instant (due - work), and again when its due passes or
its level rises; all are filed again when the step times or the size of chunks have moved by a fifth (BROS §4.2).

Prompts are served by arrival, by a fixed key, or by promises. A prompt comes with the key that ranks it among requests
with a seat. With promises there is a list for each rank of prompts:

    RT      ─ by slack: the first are urgent;   and by (priority, slack): the others
    BE      ─ by slack: the first are urgent;   and by (priority, ...): the others
    late    ─ by slack, where late requests are dropped to the end
    in time ─ by slack, real-time prompts that have missed no due: the first that can be in time bounds the step
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from math import inf
from typing import Any, TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.scheduling.dues import BEHIND, Promise, StepPromise
from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, Rank, Standing, StepTimes
from alignedserve.worker.step.device_pages import NOTHING_SHARED, DevicePages
from alignedserve.worker.step.request import WorkerRequest

_DRIFT = 0.2  # of step times and chunks, before all are filed again
_HOPELESS = 32  # prompts to look through for a prompt that can still be in time
_FEW = 64  # changes that are kept, even of prompts that have left

Place: TypeAlias = tuple[Any, ...]  # the values to sort by, a unique number, and the prompt
Ranked: TypeAlias = tuple[tuple[Any, ...], WorkerRequest]  # the key by which a request is ranked, and the request
Filing: TypeAlias = tuple[list[Place], Place]  # a list, and a place in it


@dataclass(slots=True)
class FiledPrompt:
    """The places of a prompt in the lists."""

    serial: int  # a new number at each filing
    until: float  # the slack as an instant
    places: list[Filing] = field(default_factory=list)


class PromiseLine:
    """Prompts in the order of their promises: a list for each rank."""

    def __init__(self, policy: Policy, filed: Mapping[WorkerRequest, FiledPrompt]) -> None:
        """`filed` says where each prompt is, and changes with what waits."""
        self._drops_late = policy.late is Late.DROP_LAST
        self._document_key = policy.ordering.document_key
        self._filed = filed
        self._rt: list[Place] = []
        self._rt_later: list[Place] = []
        self._be: list[Place] = []
        self._be_later: dict[str | None, list[Place]] = {}  # by caller; None: chats that yield
        self._behind: frozenset[str] = frozenset()
        self._late: list[Place] = []

    def file(self, standing: Standing, by_slack: Place, end: Place) -> list[Filing]:
        """Return the places of a prompt. `by_slack` begins with the slack as an instant; `end` tells equals apart."""
        if standing.is_late and self._drops_late:
            return [(self._late, by_slack)]
        if standing.service is ServiceClass.RT:
            return [(self._rt, by_slack), (self._rt_later, (standing.priority, *by_slack))]
        later = (standing.priority, *self._document_key(standing), standing.remaining, *end)
        running = end[-1]
        caller = running.request.caller if isinstance(running.promise, StepPromise) else None
        return [(self._be, by_slack), (self._be_later.setdefault(caller, []), later)]

    def in_order(self, now: float, most_s: float) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(now, most_s, is_rt)
        for is_rt in (True, False):
            yield from self.later(now, most_s, is_rt)
        yield from self.late(now)

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        """Yield prompts with less slack than a step."""
        rank: tuple[float, ...] = (Rank.URGENT_RT,) if is_rt else (Rank.URGENT_BE, True)
        for place in self._rt if is_rt else self._be:
            if place[0] - now > most_s:
                return
            yield (*rank, place[0] - now, *place[1:4]), place[-1]

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        """Yield prompts that are not urgent, by priority and then the rest of the key."""
        rank: tuple[float, ...] = (Rank.RT,) if is_rt else (Rank.BE, True)
        for place in self._rt_later if is_rt else self._be_in_order():
            if self._filed[place[-1]].until - now > most_s:
                yield (*rank, place[0], place[1] - now if is_rt else place[1], *place[2:-2]), place[-1]

    def _be_in_order(self) -> Iterable[Place]:
        """Return the places of best-effort prompts by priority and then the rest of the key. The callers behind others
        change often, and a caller may have thousands of prompts, so prompts are filed as if no caller came behind."""
        if not all(self._be_later.values()):
            self._be_later = {caller: places for caller, places in self._be_later.items() if places}
        if not self._behind:
            return merge(*self._be_later.values())
        first = [places for caller, places in self._be_later.items() if caller not in self._behind]
        last = [places for caller, places in self._be_later.items() if caller in self._behind]
        return merge(*first, ((place[0] + BEHIND, *place[1:]) for place in merge(*last)))

    def put_behind(self, callers: frozenset[str]) -> None:
        """Put non-urgent best-effort prompts of these callers, and of no others, behind those of other callers."""
        self._behind = callers

    def late(self, now: float) -> Iterator[Ranked]:
        """Yield late prompts, which are dropped to the end."""
        for place in self._late:
            yield (Rank.LATE, place[0] - now, *place[1:4]), place[-1]


class Changes:
    """A heap of the moments when places change by themselves.

    Entries of requests that were filed again since, or have left, count no more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WorkerRequest]] = []

    def add(self, at: float, serial: int, running: WorkerRequest) -> None:
        heappush(self._heap, (at, serial, running))

    def before(self, now: float, filed: Mapping[WorkerRequest, FiledPrompt]) -> Iterator[WorkerRequest]:
        """Take out and yield the requests with places that have changed by now."""
        while self._heap and self._heap[0][0] < now:
            _, serial, running = heappop(self._heap)
            if (at := filed.get(running)) is not None and at.serial == serial:
                yield running

    def sweep(self, filed: Mapping[WorkerRequest, FiledPrompt]) -> None:
        """Take out requests that have left: the heap would keep them, with all their tokens, for days."""
        if len(self._heap) > 2 * len(filed) + _FEW:
            self._heap = [entry for entry in self._heap if entry[2] in filed and filed[entry[2]].serial == entry[1]]
            heapify(self._heap)


class WaitingPrompts:
    """The requests in State.WAITING, which `Requests.move` adds and removes (worker/requests.py)."""

    def __init__(self, policy: Policy, pages: DevicePages = NOTHING_SHARED) -> None:
        self._policy, self._pages = policy, pages
        # Requests in the order of arrival, each with the number of tokens that was counted: the known beginning may
        # change.
        self._all: OrderedDict[WorkerRequest, int] = OrderedDict()
        self._real_time: OrderedDict[WorkerRequest, None] = OrderedDict()  # in the order of arrival
        self._best_effort: OrderedDict[WorkerRequest, None] = OrderedDict()
        self._in_place = True  # whether that order holds: a prompt that changes its class comes to the end at first
        self._again: dict[WorkerRequest, None] = {}  # had a seat before, and go before others of the same class
        self.fetched: dict[WorkerRequest, None] = {}  # requests with pages in the pool, which are copied with the seat
        self.callers: Counter[str] = Counter()  # tokens of real-time prompts, also of yielding ones (caller_shares.py)
        self.documents: dict[str, dict[WorkerRequest, None]] = {}  # the best-effort prompts, by caller
        self._behind: frozenset[str] = frozenset()  # callers with documents that come behind other callers' documents
        self.num_tokens = self.num_rt_tokens = 0  # to compute, of all prompts and of real-time prompts
        self._filed: dict[WorkerRequest, FiledPrompt] = {}
        self._unfiled: dict[WorkerRequest, None] = {}
        self._moved: dict[WorkerRequest, None] = {}  # to be filed again: more or less is here than at the filing
        self._serial = 0
        self._times, self._chunk = StepTimes(), 1  # that prompts are filed by
        self.line = PromiseLine(policy, self._filed)
        self._by_key: list[Place] = []  # where the order is by a fixed key
        self._in_time: list[Place] = []
        self._dues = Changes()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WorkerRequest]:
        """Iterate in the order of arrival."""
        return iter(self._all)

    def __contains__(self, running: object) -> bool:
        return running in self._all

    @property
    def come_first(self) -> bool:
        """Return whether a prompt waits that comes before best-effort requests of the pool: of a chat, or of a request
        that had a seat before."""
        return bool(self._real_time or self._again)

    @property
    def real_time(self) -> OrderedDict[WorkerRequest, None]:
        """Return the real-time prompts in the order of arrival."""
        self._put_in_place()
        return self._real_time

    @property
    def best_effort(self) -> OrderedDict[WorkerRequest, None]:
        """Return the best-effort prompts in the order of arrival."""
        self._put_in_place()
        return self._best_effort

    def _alone(self, running: WorkerRequest) -> OrderedDict[WorkerRequest, None]:
        return self._real_time if running.promise.is_rt else self._best_effort

    def _put_in_place(self) -> None:
        if not self._in_place:
            self._in_place = True
            for running in self._all:
                self._alone(running).move_to_end(running)

    def add(self, running: WorkerRequest) -> None:
        running.look_again()
        self._pages.look(running)
        self._all[running] = running.num_ahead
        self._alone(running)[running] = None
        self._count(running, running.num_ahead)
        self._note_fetch(running)
        if running.request.service is ServiceClass.BE and isinstance(running.promise, StepPromise):
            self.documents.setdefault(running.request.caller, {})[running] = None
        self._unfiled[running] = None

    def _count(self, running: WorkerRequest, tokens: int) -> None:
        self.num_tokens += tokens
        if running.request.service is ServiceClass.RT:
            self.callers[running.request.caller] += tokens
        if running.promise.is_rt:
            self.num_rt_tokens += tokens

    def look(self, running: WorkerRequest) -> None:
        """Note what is here by now of a prompt's beginning; the prompt's place changes at the next refresh."""
        self._pages.look(running)
        self._note_fetch(running)
        if running.num_ahead != self._all[running]:
            self._count(running, running.num_ahead - self._all[running])
            self._all[running] = running.num_ahead
            self._moved[running] = None

    def _note_fetch(self, running: WorkerRequest) -> None:
        if running.is_fetched:
            self.fetched[running] = None
        else:
            self.fetched.pop(running, None)

    def add_first(self, running: WorkerRequest) -> None:
        """Add a request that had a seat, before all that have arrived."""
        self.add(running)
        # A prompt that lost its seat before the first token is again ordered by length: long prompts wait for others.
        if running.output or self._policy.ordering.is_by_arrival:
            self._again[running] = None
        self._all.move_to_end(running, last=False)
        self._alone(running).move_to_end(running, last=False)

    def remove(self, running: WorkerRequest) -> None:
        self._count(running, -self._all.pop(running))
        del self._alone(running)[running]
        self._again.pop(running, None)
        self.fetched.pop(running, None)
        caller = running.request.caller
        if running.request.service is ServiceClass.RT:
            if not self.callers[caller]:
                del self.callers[caller]
        elif isinstance(running.promise, StepPromise):
            del self.documents[caller][running]
            if not self.documents[caller]:
                del self.documents[caller]
        self._unfiled.pop(running, None)
        self._moved.pop(running, None)
        self._take_out(running)

    def set_promise(self, running: WorkerRequest, promise: Promise) -> None:
        """Give a request another promise. A prompt that waits here keeps its place by arrival, whatever its class."""
        tokens = self._all.get(running)
        if tokens is None:
            running.promise = promise
            return
        self._count(running, -tokens)
        del self._alone(running)[running]
        running.promise = promise
        self._count(running, tokens)
        self._alone(running)[running] = None
        self._in_place = False
        self.refile(running)

    def refile(self, running: WorkerRequest) -> None:
        """File a prompt that waits here again: something that the order depends on has changed."""
        if running in self._all:
            self._take_out(running)
            self._unfiled[running] = None

    def put_behind(self, callers: frozenset[str]) -> None:
        """Put the best-effort prompts of these callers, and of no others, behind those of other callers."""
        if callers != self._behind:
            self._behind = callers
            self.line.put_behind(callers)

    # --- The order

    def refresh(self, now: float, times: StepTimes, chunk: int) -> None:
        """Bring the order up to date. This comes before `line`, or anything below, is asked at this moment."""
        if has_moved(self._times.most_s, times.most_s) or has_moved(self._chunk, chunk):
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

    def in_order(self, now: float, most_s: float) -> Iterator[Ranked]:
        """Yield all prompts in the order of service.

        With promises and with a fixed key, the keys compare with those of seated requests (ranks.py).
        """
        if self._policy.ordering.goes_by_promises:
            return self.line.in_order(now, most_s)
        if isinstance(self._policy.ordering, ByKey):
            return ((place[:3], place[-1]) for place in self._by_key)
        return (((number,), running) for number, running in enumerate(self._all))

    def _refile_all(self) -> None:
        self._filed.clear()
        self.line = PromiseLine(self._policy, self._filed)
        self.line.put_behind(self._behind)
        self._by_key, self._in_time = [], []
        self._dues = Changes()
        self._unfiled = dict.fromkeys(self._all)

    def _take_out(self, running: WorkerRequest) -> None:
        filed = self._filed.pop(running, None)
        for places, place in filed.places if filed is not None else ():
            del places[bisect_left(places, place)]

    def _file(self, running: WorkerRequest, now: float) -> None:
        standing = running.promise.standing(now, running.work(self._chunk), self._times)
        until = standing.slack_s + now
        self._serial += 1
        end = (standing.arrival_at, standing.id, self._serial, running)
        by_slack: Place = (until, standing.remaining, *end)
        ordering, places = self._policy.ordering, list[Filing]()
        if ordering.goes_by_promises:
            places = self.line.file(standing, by_slack, end)
        elif isinstance(ordering, ByKey):
            places = [(self._by_key, (ordering.key(standing), *end))]
        if running.promise.is_rt and not running.promise.num_missed:
            places.append((self._in_time, by_slack))
        for among, place in places:
            insort(among, place)
        self._filed[running] = FiledPrompt(self._serial, until, places)
        changes_at = running.promise.changes_at(now)
        if changes_at >= now:
            self._dues.add(changes_at, self._serial, running)

    def bound_s(self, now: float, chunk_s: Callable[[int], float]) -> float:
        """Return the most time that the prompts that wait leave for a step (`Promise.step_room_s`).

        A prompt does not bind if its next chunk, which takes `chunk_s`, would already be late. Such prompts are at the
        front, and where there are more than a few, the prompts behind them will hardly be in time either.
        """
        from_s = now - self._times.most_s  # the slack of prompts counts a step that is still to come
        first = bisect_left(self._in_time, (from_s + chunk_s(1),))
        for place in islice(self._in_time, first, first + _HOPELESS):
            room_s = float(place[0]) - from_s
            if room_s >= chunk_s(min(place[-1].num_ahead, self._chunk)):
                return room_s
        return inf


def has_moved(before: float, value: float) -> bool:
    """Return whether a time, or a size, has changed so much that all are filed again."""
    return abs(value - before) > _DRIFT * before if before >= 0 else True
