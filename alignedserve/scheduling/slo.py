"""Deadlines: when the next token is due, how much time is left until then, and which request goes first.

A real-time request (RT) has a due for its first token and one for every token after it:

    arrival ── ttft ──▶ due ·· first token ── tbt ──▶ due ·· next token ── tbt ──▶ due ··

A best-effort request (BE) has a completion window, cut into as many equal allowances as it has steps. Its dues do not
move, whenever its steps end:

    arrival ─ jct/n ─▶ due 1 ─ jct/n ─▶ due 2 ─ ... ─▶ due n = arrival + jct

So a step that ends late leaves less time to the next step, a step that ends early leaves more, and the whole never
takes longer than was promised (AccelGen §4.3). Slack is the time until the due less the work before it (BROS §4.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import ceil, inf
from typing import TypeVar

from alignedserve.core import Due, Request, ServiceClass

_T = TypeVar("_T")

DECAY = 0.4  # factor of a request's value, and of how soon its next token is due, at each miss (Apt-Serve §5)
MOST_MISSES = 4  # misses in a row that count


class Late(str, Enum):
    """The treatment of a request that has missed a due, so that it does not make others late."""

    DECAY = "decay"  # its next due is later from miss to miss
    DROP_LAST = "drop_last"  # it goes behind all requests that are in time
    KEEP = "keep"  # it keeps its place


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The recent step times of one worker, by which work is predicted."""

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


class TokenDues:
    """The times at which the tokens of an RT request are due. Preemptions move none: only emitted tokens do."""

    __slots__ = ("_allowance_s", "_late", "_next_s", "has_missed", "next_due_at", "num_missed")

    def __init__(self, request: Request, late: Late = Late.DECAY, due: Due | None = None) -> None:
        """Go on from the `due` of another worker; without it, the last token of an earlier attempt counts."""
        slo = request.slo
        self._late = late
        self._next_s = self._allowance_s = slo.tbt_s
        if due is None:
            last_at = request.emitted_at
            if last_at is None:
                last_at, self._allowance_s = request.arrival_at, slo.ttft_s
            due = Due(last_at + self._allowance_s)
        self.next_due_at = due.at  # `due_at` moves it once it has passed
        self.num_missed = due.num_missed  # misses in a row
        self.has_missed = due.num_missed > 0  # whether this worker knows of any miss

    @property
    def due(self) -> Due:
        """Return the state that another worker goes on from."""
        return Due(self.next_due_at, self.num_missed)

    def due_at(self, now: float) -> float:
        """Return when the next token is due; a due that has passed counts as a miss here."""
        if now > self.next_due_at and self._late is Late.DECAY:
            self._miss(now)
        return self.next_due_at

    def is_late(self, now: float) -> bool:
        return self.num_missed > 0 or now > self.next_due_at

    @property
    def worth(self) -> float:
        """Return the factor of the request's value (Apt-Serve §5)."""
        return DECAY**self.num_missed if self._late is Late.DECAY else 1.0

    def emitted(self, now: float) -> None:
        """Count a token that reached the client: it sets the next due."""
        self._allowance_s = self._next_s
        if now <= self.next_due_at:
            self.num_missed, self.next_due_at = 0, now + self._next_s
        elif self._late is Late.DECAY:
            self._miss(now)
        else:
            self.num_missed, self.next_due_at, self.has_missed = self.num_missed + 1, now + self._next_s, True

    def _miss(self, now: float) -> None:
        self.num_missed, self.has_missed = min(self.num_missed + 1, MOST_MISSES), True
        self.next_due_at = now + self._allowance_s / DECAY**self.num_missed


class StepDues:
    """The times at which the steps of a BE request are due: a plan of n steps over its completion window.

    The last due is the end of the window and never moves. A new prediction of the length spaces the remaining steps
    over the remaining time.
    """

    def __init__(self, request: Request, steps: int) -> None:
        self._from_at, self._end_at = request.arrival_at, request.arrival_at + request.slo.jct_s
        self._from_step, self._steps = 0, max(1, steps)
        self.num_done = 0

    @property
    def num_left(self) -> int:
        return max(1, self._steps - self.num_done)

    def due_at(self) -> float:
        """Return when the next step is due; once the plan has run out, the end of the window."""
        steps, ahead = self._steps - self._from_step, self.num_done + 1 - self._from_step
        if ahead > steps:
            ahead = steps
        return self._from_at + ahead * (self._end_at - self._from_at) / steps

    @property
    def end_at(self) -> float:
        return self._end_at

    def is_late(self, now: float) -> bool:
        return now > self._end_at

    def done(self, steps: int = 1) -> None:
        self.num_done += steps

    def replan(self, now: float, steps_left: int) -> None:
        left = max(1, steps_left)
        if left == self._steps - self.num_done:
            return
        self._from_at, self._from_step = min(now, self._end_at), self.num_done
        self._steps = self.num_done + left


@dataclass(frozen=True, slots=True)
class Work:
    """The work before the next due: the rest of a prompt in chunks, or a token to decode."""

    prompt: int = 0  # prompt tokens that must run before the next token can be sampled
    chunk: int = 1  # prompt tokens that run in a step, on average
    transfer_s: float = 0.0  # time until missing KV is on the device

    def seconds(self, times: StepTimes, counts_chunks: bool = True) -> float:
        """Return the time of the work; of a prompt, that of its next chunk alone where chunks do not count."""
        if self.prompt:
            return (self.num_chunks if counts_chunks else 1) * times.most_s + self.transfer_s
        return times.mean_s + self.transfer_s

    @property
    def num_chunks(self) -> int:
        return ceil(self.prompt / self.chunk)


def token_slack_s(due_at: float, now: float, work: Work, times: StepTimes, counts_chunks: bool = True) -> float:
    """Return the slack of an RT request."""
    return due_at - now - work.seconds(times, counts_chunks)


def step_slack_s(due_at: float, now: float, times: StepTimes) -> float:
    """Return the slack of a BE request: at 0 or below, the request is behind its plan.

    Preemptions take too little of the slack to count (docs/how/deadlines.md).
    """
    return due_at - now - times.most_s


class Rank(IntEnum):
    """Ranks of requests in every step, prefill or decode, in order."""

    URGENT_RT = 1
    URGENT_BE = 2  # behind its plan, or nearly
    RT = 3
    BE = 4
    LATE = 5  # only with Late.DROP_LAST


@dataclass(slots=True)  # made whenever a request is ranked; a frozen one takes ten times as long
class Standing:
    """Everything that a request's place in the order depends on."""

    id: str
    service: ServiceClass
    slack_s: float
    arrival_at: float
    is_late: bool = False
    priority: int = 0  # lower first, among requests that are not urgent
    level: int = 0  # of a BE request (levels.py)
    restore_s: float = 0.0  # time until its KV is back on the device
    remaining: float = 0.0  # predicted tokens
    is_prompt: bool = False  # decodes go before prompts among BE requests: their memory is freed earlier
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


def step_room_s(dues: TokenDues, now: float, steps: int, step_s: float, alone_s: float) -> float:
    """Return how long the coming step may take so that the request, which needs `steps` steps, is in time.

    R, the bound of a step, is the least over all real-time requests. The coming step itself is not subtracted: the
    question is whether it fits. A request that is late, or would be late even in a step of its own, sets no
    bound (AccelGen §4.2).
    """
    due_at = dues.next_due_at
    if now > due_at:
        due_at = dues.due_at(now)
    room_s = due_at - now - (steps - 1) * step_s
    return inf if dues.num_missed or room_s < alone_s else room_s
