"""The order of service by slack, which is the time until a due less the work before it, and the time of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import ceil
from typing import TypeVar

from alignedserve.core import ServiceClass

_T = TypeVar("_T")


class Late(str, Enum):
    """The treatment of a request that has missed a due, so that others are not late for it."""

    DECAY = "decay"  # the next due is later from miss to miss
    DROP_LAST = "drop_last"  # goes behind all requests that are in time
    KEEP = "keep"  # keeps the place


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The recent step times of a worker, by which work is predicted."""

    mean_s: float = 0.0
    most_s: float = 0.0


class RecentSteps:
    """The step times of a worker: their moving mean and recent maximum."""

    WINDOW = 64  # steps
    WEIGHT = 0.1  # weight of the newest step in the mean

    def __init__(self, first: StepTimes) -> None:
        self._mean_s = first.mean_s
        self._most: deque[tuple[int, float]] = deque([(0, first.most_s)])  # (step, seconds), falling
        self._number = 0

    def add(self, seconds: float) -> None:
        self._number += 1
        self._mean_s += self.WEIGHT * (seconds - self._mean_s)
        while self._most and self._most[-1][1] <= seconds:
            self._most.pop()
        self._most.append((self._number, seconds))
        while self._most[0][0] <= self._number - self.WINDOW:
            self._most.popleft()

    @property
    def now(self) -> StepTimes:
        return StepTimes(self._mean_s, self._most[0][1])


@dataclass(frozen=True, slots=True)
class Work:
    """The work before the next due: the rest of a prompt in chunks, or a token to decode."""

    prompt: int = 0  # prompt tokens that must run before the next token can be sampled
    chunk: int = 1  # prompt tokens that run in a step, on average
    transfer_s: float = 0.0  # time until missing KV is on the device

    def seconds(self, times: StepTimes, counts_chunks: bool = True) -> float:
        """Return the time of the work; for a prompt, the time of the next chunk alone where chunks do not count."""
        if self.prompt:
            return (ceil(self.prompt / self.chunk) if counts_chunks else 1) * times.most_s + self.transfer_s
        return times.mean_s + self.transfer_s


class Rank(IntEnum):
    """Ranks of requests in every step, prefill or decode, in order."""

    URGENT_RT = 1
    URGENT_BE = 2  # behind the plan, or nearly
    RT = 3
    BE = 4
    LATE = 5  # only with Late.DROP_LAST


@dataclass(slots=True)  # made whenever a request is ranked; a frozen class takes ten times as long
class Standing:
    """Everything that a request's place in the order depends on."""

    id: str
    service: ServiceClass
    slack_s: float
    arrival_at: float
    is_late: bool = False
    priority: int = 0  # lower first, among requests that are not urgent
    level: int = 0  # of a BE request (levels.py)
    restore_s: float = 0.0  # time until the KV is back on the device
    remaining: float = 0.0  # predicted tokens
    is_prompt: bool = False  # among BE requests decodes go before prompts: they free memory earlier
    at: float = 0.0  # when the slack was `slack_s`

    def rank(self, times: StepTimes, late: Late) -> Rank:
        if self.is_late and late is Late.DROP_LAST:
            return Rank.LATE
        urgent = self.slack_s <= times.most_s
        if self.service is ServiceClass.RT:
            return Rank.URGENT_RT if urgent else Rank.RT
        return Rank.URGENT_BE if urgent else Rank.BE

    def key(self, times: StepTimes, late: Late) -> tuple[float, ...]:
        """Return the sort key; arrival and id order requests with equal keys."""
        match rank := self.rank(times, late):
            case Rank.RT:
                return rank, self.priority, self.slack_s, self.remaining
            case Rank.BE:
                return rank, self.is_prompt, self.priority, self.level, self.restore_s, self.remaining
            case Rank.URGENT_BE:
                return rank, self.is_prompt, self.slack_s, self.remaining
        return rank, self.slack_s, self.remaining


def in_order(standings: Iterable[Standing], times: StepTimes, late: Late = Late.DECAY) -> list[Standing]:
    """Return the standings in the order of service, which does not depend on the order in which they are given."""
    return by_standing(standings, lambda standing: standing, times, late)


def by_standing(
    items: Iterable[_T], standing_of: Callable[[_T], Standing], times: StepTimes, late: Late = Late.DECAY
) -> list[_T]:
    """Return the items in the order of their standings."""

    def place(item: _T) -> tuple[tuple[float, ...], float, str]:
        standing = standing_of(item)
        return standing.key(times, late), standing.arrival_at, standing.id

    return sorted(items, key=place)
