"""The line of chats that asked for no promise and wait on a worker: their places, and how fast the line moves.

A chat that asked for nothing is refused only where it would wait for longer than the server's patience. Until then it
waits in order of arrival, and callers take turns by their weights (worker/caller_shares.py). For example, a caller has
three chats in line and another one has one: the second caller's chat has one prompt before it, not three.

How long a chat waits is learnt from the line itself. Each prompt has the time that it takes beside what runs, as its
worker told. While the line is not empty, the time from one begin to the next is that of the prompt that ran meanwhile,
and more: for decodes in the same steps, prompts of chats that asked for a promise, a seat, other programs. The mean of
this is counted for each prompt before a chat: with 12 prompts of 3 s, and 1.2 s more for each, the chat waits 50 s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core import Request

TOLD_S = 1.0  # a chat with a shorter wait is not told of it
_KEPT = 0.8  # of what was learnt, at each begin
_FEWEST = 3  # begins from which the mean is known
_KNOWN_S = 60.0  # after an empty line for so long nothing is known


class Turn(NamedTuple):
    """When a chat's turn comes."""

    num_before: int  # prompts that run before
    wait_s: float  # until its prompt begins
    first_s: float  # until its first token


NO_TURN = Turn(0, 0.0, 0.0)


def before_in_turns(sizes: Mapping[str, float], weights: Mapping[str, int], request: Request, own: float) -> float:
    """Return what other callers get before the request's caller has got `own`: each as much in turn, by its weight.
    `sizes` is what each caller has to get."""
    each, caller = own / request.weight, request.caller
    return sum(min(size, each * weights[other]) for other, size in sizes.items() if other != caller)


@dataclass(slots=True)
class _Waiting:
    request: Request
    takes_s: float  # its prompt, beside what runs
    first_at: float  # when its first token comes, as was predicted when it came


class Line:
    """The chats in line on one worker, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._num, self._takes_s = Counter[str](), dict[str, float]()  # by caller
        self._weights: dict[str, int] = {}
        self._last_first_at: dict[str, float] = {}  # caller -> the latest first token that was planned for its chats
        self._last_at = 0.0  # when the newest prompt began ...
        self._ran_s = 0.0  # ... what that prompt takes ...
        self._begun_at: float | None = None  # ... and again when it began, if others were in line then
        self._more_s, self._num_seen, self._num_learnt = 0.0, 0.0, 0  # sums that forget

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def takes_s(self) -> float:
        """Return what all prompts in line take together."""
        return sum(self._takes_s.values())

    @property
    def is_known(self) -> bool:
        """Return whether enough prompts have begun to know how the line moves."""
        return self._num_learnt >= _FEWEST

    def turn(self, request: Request, takes_s: float, now: float) -> Turn:
        """Return the turn of a chat that comes now; its prompt takes `takes_s`."""
        caller = request.caller
        return self._turn(request, self._num[caller] + 1, self._takes_s.get(caller, 0.0) + takes_s, takes_s, now)

    def turns(self, now: float) -> Iterator[tuple[Request, Turn]]:
        """Yield the chats with their turns."""
        num, all_s = Counter[str](), defaultdict[str, float](float)
        for waiting in self._waiting.values():
            caller = waiting.request.caller
            num[caller] += 1
            all_s[caller] += waiting.takes_s
            turn = self._turn(waiting.request, num[caller], all_s[caller], waiting.takes_s, now)
            if not self.is_known and (left_s := waiting.first_at - now) > turn.first_s:
                turn = Turn(turn.num_before, left_s - waiting.takes_s, left_s)
            yield waiting.request, turn

    def _turn(self, request: Request, num: int, all_s: float, takes_s: float, now: float) -> Turn:
        """Return the turn of a chat whose caller has `num` chats up to it, which take `all_s` together."""
        before = num - 1 + before_in_turns(self._num, self._weights, request, num)
        before_s = all_s - takes_s + before_in_turns(self._takes_s, self._weights, request, all_s)
        wait_s = max(0.0, before_s)
        if self.is_known:
            more_s = self._more_s / self._num_seen
            wait_s = max(0.0, self._ran_s + more_s - (now - self._last_at)) + max(0.0, before_s + before * more_s)
        return Turn(round(before), wait_s, wait_s + takes_s)

    def join(self, request: Request, takes_s: float, first_s: float, now: float) -> float:
        """Add a chat; its prompt takes `takes_s`, and its first token is expected after `first_s`. Return the time that
        its worker plans for: never before the caller's earlier chats, whose waits may have been predicted longer."""
        caller = request.caller
        if not self._waiting and now - self._last_at > _KNOWN_S:
            self._more_s, self._num_seen, self._num_learnt = 0.0, 0.0, 0
        self._waiting[request.id] = _Waiting(request, takes_s, now + first_s)
        self._num[caller] += 1
        self._takes_s[caller] = self._takes_s.get(caller, 0.0) + takes_s
        self._weights[caller] = request.weight
        self._last_first_at[caller] = planned_at = max(now + first_s, self._last_first_at.get(caller, 0.0))
        return planned_at - now

    def begin(self, request: str, now: float) -> None:
        """Note that the prompt of a chat begins, and learn from the time since the one before."""
        if (waiting := self._waiting.get(request)) is None:
            return
        if self._begun_at is not None:
            self._more_s = _KEPT * self._more_s + now - self._begun_at - self._ran_s
            self._num_seen = _KEPT * self._num_seen + 1
            self._num_learnt += 1
        self.leave(request)
        self._last_at, self._ran_s = now, waiting.takes_s
        self._begun_at = now if self._waiting else None

    def leave(self, request: str) -> None:
        if (waiting := self._waiting.pop(request, None)) is None:
            return
        caller = waiting.request.caller
        self._num[caller] -= 1
        self._takes_s[caller] -= waiting.takes_s
        if not self._num[caller]:
            del self._num[caller], self._takes_s[caller], self._weights[caller], self._last_first_at[caller]
        if not self._waiting:
            self._begun_at = None


class Lines:
    """The line of each worker."""

    def __init__(self) -> None:
        self._of: defaultdict[str, Line] = defaultdict(Line)
        self._at: dict[str, str] = {}  # chat in line -> its worker

    def __len__(self) -> int:
        return len(self._at)

    def of(self, worker: str | None) -> Line:
        return self._of[worker or ""]

    def join(self, worker: str, request: Request, takes_s: float, first_s: float, now: float) -> float:
        self.leave(request.id)
        self._at[request.id] = worker
        return self._of[worker].join(request, takes_s, first_s, now)

    def begin(self, request: str, now: float) -> None:
        if (worker := self._at.pop(request, None)) is not None:
            self._of[worker].begin(request, now)

    def leave(self, request: str) -> None:
        if (worker := self._at.pop(request, None)) is not None:
            self._of[worker].leave(request)

    def turns(self, now: float) -> Iterator[tuple[Request, Turn]]:
        for line in self._of.values():
            yield from line.turns(now)
