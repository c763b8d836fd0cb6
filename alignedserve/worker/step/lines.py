"""The order of prompts that wait for room: by arrival, by a fixed key, or by promises.

A line files each prompt in sorted lists once, and yields the prompts with the keys by which they are ranked among those
that are seated. With promises there is a list for each way in which prompts come to their turn:

    RT      ─ by slack: those at the front are urgent;   and by (priority, slack): the others
    BE      ─ by slack: those at the front are urgent;   and by (priority, ...): the others
    late    ─ by slack, where late requests are dropped to the end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, Rank, Standing
from alignedserve.worker.step.running import Running

Place: TypeAlias = tuple[Any, ...]  # what it is sorted by, a number of its own, and the prompt
Ranked: TypeAlias = tuple[tuple[Any, ...], Running]  # the key by which a request is ranked, and the request
Filing: TypeAlias = tuple[list[Place], Place]  # a place and the list that it is in


@dataclass(slots=True)
class FiledPrompt:
    """The places of a prompt in the lists."""

    serial: int
    until: float  # its slack as an instant
    places: list[Filing] = field(default_factory=list)


class WaitingLine(ABC):
    def file(self, standing: Standing, by_slack: Place, end: Place) -> list[Filing]:
        """Return the places of a prompt. `by_slack` begins with its slack as an instant, and may be in several lists;
        `end` tells equal prompts apart."""
        return []

    @abstractmethod
    def in_order(self, now: float, most_s: float, only_rt: bool = False) -> Iterator[Ranked]:
        """Yield all prompts, the real-time ones (and those that are late), or the others, as they are to be served.

        Their keys compare with those of `Standing.key`.
        """

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        """Yield prompts whose slack is less than a step."""
        return iter(())

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        """Yield prompts that are not urgent, by priority and what comes after it."""
        return iter(())

    def late(self, now: float) -> Iterator[Ranked]:
        """Yield prompts that are dropped to the end because they are late."""
        return iter(())


class ArrivalLine(WaitingLine):
    def __init__(self, prompts: Iterable[Running], real_time: Iterable[Running]) -> None:
        """Both are in the order of arrival, and change with what waits."""
        self._prompts, self._real_time = prompts, real_time

    def in_order(self, now: float, most_s: float, only_rt: bool = False) -> Iterator[Ranked]:
        for number, running in enumerate(self._real_time if only_rt else self._prompts):
            yield (number,), running


class KeyLine(WaitingLine):
    def __init__(self, ordering: ByKey) -> None:
        self._ordering = ordering
        self._by_key: list[Place] = []

    def file(self, standing: Standing, by_slack: Place, end: Place) -> list[Filing]:
        return [(self._by_key, (self._ordering.key(standing), *end))]

    def in_order(self, now: float, most_s: float, only_rt: bool = False) -> Iterator[Ranked]:
        classes = _classes(only_rt)
        for place in self._by_key:
            if place[-1].promise.is_rt in classes:
                yield place[:3], place[-1]


class PromiseLine(WaitingLine):
    def __init__(self, policy: Policy, filed: Mapping[Running, FiledPrompt]) -> None:
        """`filed` says where each prompt is, and changes with what waits."""
        self._drops_late = policy.late is Late.DROP_LAST
        self._ranks_be_by_slack = policy.ranks_be_by_slack
        self._filed = filed
        self._rt: list[Place] = []
        self._rt_later: list[Place] = []
        self._be: list[Place] = []
        self._be_later: list[Place] = []
        self._late: list[Place] = []

    def file(self, standing: Standing, by_slack: Place, end: Place) -> list[Filing]:
        if standing.is_late and self._drops_late:
            return [(self._late, by_slack)]
        if standing.service is ServiceClass.RT:
            return [(self._rt, by_slack), (self._rt_later, (standing.priority, *by_slack))]
        key = (by_slack[0],) if self._ranks_be_by_slack else (standing.level, standing.restore_s)
        later = (standing.priority, *key, standing.remaining, *end)
        return [(self._be, by_slack), (self._be_later, later)]

    def in_order(self, now: float, most_s: float, only_rt: bool = False) -> Iterator[Ranked]:
        classes = _classes(only_rt)
        for is_rt in classes:
            yield from self.urgent(now, most_s, is_rt)
        for is_rt in classes:
            yield from self.later(now, most_s, is_rt)
        yield from self.late(now)

    def urgent(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        rank: tuple[float, ...] = (Rank.URGENT_RT,) if is_rt else (Rank.URGENT_BE, True)
        for place in self._rt if is_rt else self._be:
            if place[0] - now > most_s:
                return
            yield (*rank, place[0] - now, *place[1:4]), place[-1]

    def later(self, now: float, most_s: float, is_rt: bool) -> Iterator[Ranked]:
        rank: tuple[float, ...] = (Rank.RT,) if is_rt else (Rank.BE, True)
        for place in self._rt_later if is_rt else self._be_later:
            if self._filed[place[-1]].until - now > most_s:
                key = (place[0], place[1] - now) if is_rt or self._ranks_be_by_slack else place[:2]
                yield (*rank, *key, *place[2:-2]), place[-1]

    def late(self, now: float) -> Iterator[Ranked]:
        for place in self._late:
            yield (Rank.LATE, place[0] - now, *place[1:4]), place[-1]


def _classes(only_rt: bool) -> tuple[bool, ...]:
    """Return which classes are asked for: True is real-time."""
    return (True,) if only_rt else (True, False)
