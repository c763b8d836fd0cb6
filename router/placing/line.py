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

from collections import defaultdict
from collections.abc import Iterable, Iterator
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


def before_in_turns(sizes: Iterable[tuple[str, float, int]], request: Request, own: float) -> float:
    """Return what other callers get before the request's caller has got `own`: each as much in turn, by its weight.
    `sizes` has callers, each with what it has to get and its weight."""
    each = own / request.weight
    return sum(min(size, each * weight) for caller, size, weight in sizes if caller != request.caller)


@dataclass(slots=True)
class _CallerLine:
    """What a caller has in line."""

    weight: int = 1
    num: int = 0
    takes_s: float = 0.0
    last_first_at: float = 0.0  # the latest first token that was planned for its chats


@dataclass(slots=True)
class _Waiting:
    request: Request
    takes_s: float  # its prompt, beside what runs
    first_at: float  # when its first token comes, as was predicted when it came


class Line:
    """The chats in line on one worker, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._of: dict[str, _CallerLine] = {}  # caller -> its chats
        self._last_at = 0.0  # when the newest prompt began ...
        self._ran_s = 0.0  # ... what that prompt takes ...
        self._begun_at: float | None = None  # ... and again when it began, if others were in line then
        self._more_s, self._num_seen, self._num_learnt = 0.0, 0.0, 0  # sums that forget

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def takes_s(self) -> float:
        """Return what all prompts in line take together."""
        return sum(own.takes_s for own in self._of.values())

    @property
    def is_known(self) -> bool:
        """Return whether enough prompts have begun to know how the line moves."""
        return self._num_learnt >= _FEWEST

    def turn(self, request: Request, takes_s: float, now: float) -> Turn:
        """Return the turn of a chat that comes now; its prompt takes `takes_s`."""
        own = self._of.get(request.caller) or _CallerLine()
        return self._turn(request, own.num + 1, own.takes_s + takes_s, takes_s, now)

    def turns(self, now: float) -> Iterator[tuple[Request, Turn]]:
        """Yield the chats with their turns."""
        upto = defaultdict[str, _CallerLine](_CallerLine)
        for waiting in self._waiting.values():
            own = upto[waiting.request.caller]
            own.num, own.takes_s = own.num + 1, own.takes_s + waiting.takes_s
            turn = self._turn(waiting.request, own.num, own.takes_s, waiting.takes_s, now)
            if not self.is_known and (left_s := waiting.first_at - now) > turn.first_s:
                turn = Turn(turn.num_before, left_s - waiting.takes_s, left_s)
            yield waiting.request, turn

    def _turn(self, request: Request, num: int, all_s: float, takes_s: float, now: float) -> Turn:
        """Return the turn of a chat whose caller has `num` chats up to it, which take `all_s` together."""
        callers = self._of.items()
        before = num - 1 + before_in_turns(((name, of.num, of.weight) for name, of in callers), request, num)
        before_s = before_in_turns(((name, of.takes_s, of.weight) for name, of in callers), request, all_s)
        before_s += all_s - takes_s
        wait_s = max(0.0, before_s)
        if self.is_known:
            more_s = self._more_s / self._num_seen
            wait_s = max(0.0, self._ran_s + more_s - (now - self._last_at)) + max(0.0, before_s + before * more_s)
        return Turn(round(before), wait_s, wait_s + takes_s)

    def join(self, request: Request, takes_s: float, first_s: float, now: float) -> float:
        """Add a chat; its prompt takes `takes_s`, and its first token is expected after `first_s`. Return the time that
        its worker plans for: never before the caller's earlier chats, whose waits may have been predicted longer."""
        if not self._waiting and now - self._last_at > _KNOWN_S:
            self._more_s, self._num_seen, self._num_learnt = 0.0, 0.0, 0
        self._waiting[request.id] = _Waiting(request, takes_s, now + first_s)
        own = self._of.setdefault(request.caller, _CallerLine())
        own.weight, own.num, own.takes_s = request.weight, own.num + 1, own.takes_s + takes_s
        own.last_first_at = max(now + first_s, own.last_first_at)
        return own.last_first_at - now

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
        own = self._of[waiting.request.caller]
        own.num, own.takes_s = own.num - 1, own.takes_s - waiting.takes_s
        if not own.num:
            del self._of[waiting.request.caller]
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
