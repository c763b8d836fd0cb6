"""The orders in which requests are served wherever some have to wait: one class per order, and one table.

To add an order, add a member of `Order`, a class and a line of `ORDERINGS`: the pool, the router and both workers
follow it. An order by a fixed key of each request is a `ByKey` with the key alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

from alignedserve.core import ServiceClass
from alignedserve.policies.guard import Guard
from alignedserve.policies.kinds import RequestInLine
from alignedserve.scheduling.levels import TOP
from alignedserve.scheduling.slo import Late, Standing, StepTimes, by_standing

_T = TypeVar("_T")


class Order(str, Enum):
    """The rule for which request goes first, wherever some have to wait."""

    DUE = "due"  # by promises: slo.in_order, prompts by when their first token is due
    SLACK = "slack"  # the same, prompts by what their chunks leave until then (BROS, AccelGen)
    FCFS = "fcfs"  # by arrival
    SHORTEST_REMAINING = "shortest_remaining"  # by the tokens still to run, with the output as long as expected
    LEVELS = "levels"  # by five levels of predicted steps, in which requests rise with age (ALISE)


class Ordering:
    """An order; as it stands, by promises (slo.Standing.key)."""

    is_by_arrival = False  # requests are served as they came: nothing has to be sorted
    goes_by_promises = False  # places change with time: an urgent request overtakes others
    counts_chunks = True  # a prompt has less slack by all of its chunks, and not by its next one alone
    has_levels = False  # all requests have levels, whatever their class

    def sort(
        self, requests: Iterable[_T], standing_of: Callable[[_T], Standing], times: StepTimes, late: Late
    ) -> Iterable[_T]:
        """Return the requests, which are given by arrival, as they are to be served."""
        return requests if self.is_by_arrival else by_standing(requests, standing_of, times, late)

    @property
    def of_waits(self) -> Ordering:
        """Return the order by which expected waits are reckoned (ALISE §3.2)."""
        return self if self.is_by_arrival or self.has_levels else ORDERINGS[Order.SLACK]

    def puts_first(self, service: ServiceClass) -> bool:
        """Return whether requests of this class are served before those of the other."""
        return self.goes_by_promises and service is ServiceClass.RT


class ByArrival(Ordering):
    is_by_arrival = True


class ByPromises(Ordering):
    goes_by_promises = True


class ByDue(ByPromises):
    """The prompt that is due first goes first.

    The order by slack puts a long prompt before shorter ones that are due earlier. Where time is too short for all of
    them, the short ones would be late for a long one that is late too.
    """

    counts_chunks = False


class ByKey(Ordering, ABC):
    """An order by a key of each request, which changes only when its promise says so (Promise.changes_at)."""

    @abstractmethod
    def key(self, standing: Standing) -> tuple[float, ...]:
        """Return the key of the order, the least first; requests with equal keys go by arrival."""

    def sort(
        self, requests: Iterable[_T], standing_of: Callable[[_T], Standing], times: StepTimes, late: Late
    ) -> Iterable[_T]:
        def place(request: _T) -> tuple[tuple[float, ...], float, str]:
            standing = standing_of(request)
            return self.key(standing), standing.arrival_at, standing.id

        return sorted(requests, key=place)


class ByRemaining(ByKey):
    def key(self, standing: Standing) -> tuple[float, ...]:
        return (standing.remaining,)


class ByLevels(ByKey):
    """By level, within a level the shortest first; by arrival above the levels, so that no request waits for ever."""

    has_levels = True

    def key(self, standing: Standing) -> tuple[float, ...]:
        return standing.level, standing.remaining if standing.level > TOP else 0.0


class ByOwnPolicy(ByKey):
    """The order of a custom policy. Requests without an answer go last, by when their next step has to begin."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def key(self, standing: Standing) -> tuple[float, ...]:
        starts_by = standing.at + standing.slack_s
        is_rt, remaining = standing.service is ServiceClass.RT, standing.remaining
        told = standing.id, is_rt, standing.priority, standing.arrival_at, starts_by, remaining
        key = self._guard.ask(RequestInLine(*told, standing.is_prompt, standing.is_late))
        return (1.0, starts_by) if key is None else (0.0, float(key))


ORDERINGS: dict[Order, Ordering] = {
    Order.DUE: ByDue(),
    Order.SLACK: ByPromises(),
    Order.FCFS: ByArrival(),
    Order.SHORTEST_REMAINING: ByRemaining(),
    Order.LEVELS: ByLevels(),
}
