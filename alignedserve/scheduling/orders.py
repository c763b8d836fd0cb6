"""The orders in which requests are served wherever some have to wait.

A scheduler's rules name its order (policy.py): the pool, the router and both workers then use the order. An order by a
fixed key of each request is a `ByKey` with a `key` method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from alignedserve.core import ServiceClass
from alignedserve.scheduling.slo import Late, Standing, StepTimes, by_standing

_T = TypeVar("_T")


@dataclass(eq=False)
class Ordering:
    """An order; this class itself orders by promises (slo.Standing.key)."""

    is_by_arrival: bool = False  # requests are served by arrival: nothing has to be sorted
    goes_by_promises: bool = False  # places change with time: an urgent request overtakes others
    counts_chunks: bool = True  # a prompt's slack is less the time of all its chunks, not only of the next
    has_levels: bool = False  # all requests have levels, of both classes

    def sort(
        self, requests: Iterable[_T], standing_of: Callable[[_T], Standing], times: StepTimes, late: Late
    ) -> Iterable[_T]:
        """Return the requests, which are given by arrival, in the order of service."""
        return requests if self.is_by_arrival else by_standing(requests, standing_of, times, late)

    @property
    def of_waits(self) -> Ordering:
        """Return the order by which expected waits are reckoned (ALISE §3.2)."""
        return self if self.is_by_arrival or self.has_levels else BY_SLACK

    def times_of(self, times: StepTimes) -> StepTimes:
        """Return the times of steps that a worker reckons with."""
        return times

    def document_key(self, standing: Standing) -> tuple[float, ...]:
        """Return what ranks a document that is not urgent among others of its priority: the fewest steps first."""
        return standing.level, standing.restore_s

    def puts_first(self, service: ServiceClass) -> bool:
        """Return whether requests of this class are served before requests of the other."""
        return self.goes_by_promises and service is ServiceClass.RT


class ByKey(Ordering, ABC):
    """An order by a key of each request. A key changes only when the promise says so (Promise.changes_at)."""

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


BY_ARRIVAL = Ordering(is_by_arrival=True)
# BROS §4.1: a request that is due in 300 ms, with 200 ms of work left, has a slack of 100 ms. The least goes first.
BY_SLACK = Ordering(goes_by_promises=True)
# The prompt that is due first goes first. The order by slack puts a long prompt before shorter prompts that are due
# earlier. Where time is too short for all, the short prompts would be late for a long prompt that is late too.
BY_DUE = Ordering(goes_by_promises=True, counts_chunks=False)
