"""The line in which chats wait that asked for no promise: their places, and the pace at which the line moves.

A chat that asked for nothing is refused only where it would wait for longer than the server's patience. Until then it
waits in order of arrival, and callers take turns by their weights (worker/caller_shares.py). For example, a caller has
three chats in line and another one has one: the second caller's chat has one prompt before it, not three.

How long a chat waits is learnt from the line itself. Each prompt has the time that it takes alone, by the cost model.
While the line is not empty, the time from one begin to the next, over that of the prompt which ran meanwhile, is the
pace: 1.4 where decodes run beside the prompts, 4 on a machine that other programs share, 0.5 where two workers share
the line. A chat with prompts of 20 s before it waits 28, 80, or 10 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from alignedserve.core import Request
from alignedserve.protocol.messages import Place

TOLD_S = 1.0  # a chat with a shorter wait is not told of it
_KEPT = 0.8  # of what was learnt, at each begin
_FEWEST = 3  # begins from which a pace is known
_KNOWN_S = 60.0  # a line that was empty for so long has another pace


class Line:
    """The chats in line, each with the time of its prompt alone, and when its turn comes."""

    def __init__(self) -> None:
        self._alone_s: dict[str, float] = {}  # chat in line -> the time of its prompt
        self._turn_at: dict[str, float] = {}  # chat in line -> when its prompt begins, as was predicted when it came
        self.work_s = 0.0  # the sum of these
        self._began_at: float | None = None  # the newest begin, where others were in line then
        self._left_at = 0.0  # the same, in any case
        self._runs_s = 0.0  # the time alone of the prompt that began then
        self._took_s, self._took_alone_s, self._num_learnt = 0.0, 0.0, 0

    def __len__(self) -> int:
        return len(self._alone_s)

    @property
    def pace(self) -> float | None:
        """Return how many times as long prompts took lately as they do alone; None where that is not known."""
        return self._took_s / self._took_alone_s if self._num_learnt >= _FEWEST and self._took_alone_s else None

    def turn_at(self, request: str) -> float | None:
        """Return when the turn of a chat comes, as was predicted; None where it is not in line."""
        return self._turn_at.get(request)

    def joined(self, request: str, alone_s: float, wait_s: float, now: float) -> None:
        """Note that a chat is in line: its prompt alone takes `alone_s`, and its turn comes after `wait_s`."""
        if not self._alone_s and now - self._left_at > _KNOWN_S:
            self._num_learnt = 0
        self.left(request)
        self._alone_s[request], self._turn_at[request] = alone_s, now + wait_s
        self.work_s += alone_s

    def began(self, request: str, now: float) -> None:
        """Note that the prompt of a chat begins, and learn from the time since the last one."""
        if (alone_s := self._alone_s.get(request)) is None:
            return
        before_at = self._began_at
        self.left(request)
        if before_at is not None:
            self._took_s = _KEPT * self._took_s + now - before_at
            self._took_alone_s = _KEPT * self._took_alone_s + self._runs_s
            self._num_learnt += 1
        self._began_at, self._left_at, self._runs_s = now if self._alone_s else None, now, alone_s

    def left(self, request: str) -> None:
        self._turn_at.pop(request, None)
        self.work_s -= self._alone_s.pop(request, 0.0)
        if not self._alone_s:
            self.work_s, self._began_at = 0.0, None

    def places(self, waiting: Sequence[Request], queue_s: float) -> Iterator[Place]:
        """Yield the places of a worker's chats in line; `waiting` are all real-time prompts that have not begun there,
        in order of arrival, and together they take `queue_s`, by the worker's own reckoning."""
        alone_s = {request.id: self._time_of(request) for request in waiting}
        if not (all_s := sum(alone_s.values())):
            return
        pace = queue_s / all_s if self.pace is None else self.pace
        weights = {request.caller: request.weight for request in waiting}
        before, ran_s = Counter[str](), dict.fromkeys(weights, 0.0)  # by caller, as the walk goes on
        numbers, sizes_s = Counter(request.caller for request in waiting), dict.fromkeys(weights, 0.0)
        for request in waiting:
            sizes_s[request.caller] += alone_s[request.id]
        for request in waiting:
            caller = request.caller
            ran_s[caller] += alone_s[request.id]
            if request.id in self._alone_s:
                num = before[caller] + _of_others(numbers, weights, caller, before[caller] + 1)
                first_s = pace * (ran_s[caller] + _of_others(sizes_s, weights, caller, ran_s[caller]))
                yield Place(request.id, request.attempt, round(num), first_s)
            before[caller] += 1

    def _time_of(self, request: Request) -> float:
        """Return the time of a prompt alone; of one that asked for a promise only its length is known here."""
        known_s = self._alone_s.get(request.id)
        if known_s is not None or not self._alone_s:
            return known_s or 0.0
        return self.work_s / len(self._alone_s)


def _of_others(counted: Mapping[str, float], weights: Mapping[str, int], caller: str, own: float) -> float:
    """Return what other callers have before a caller has had `own`: each gets as much in turn, by its weight."""
    each = own / weights[caller]
    return sum(min(size, each * weights[other]) for other, size in counted.items() if other != caller)
