"""The line in which chats wait that asked for no promise: their places, and how far predicted waits are off.

A chat that asked for nothing is refused only where it would wait for longer than the server's patience. Until then it
waits in order of arrival, and callers take turns by their weights (worker/caller_shares.py). For example, a caller has
three chats in line and another one has one: the second caller's chat has one prompt before it, not three.

Predictions of waits learn their own error. Each prompt that begins tells how long it has really waited since it was
last predicted: on a machine that other programs share, waits were three to ten times as long as the steps alone say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from alignedserve.core import Request
from alignedserve.protocol.messages import Place

TOLD_S = 1.0  # a chat with a shorter wait is not told of it
_WEIGHT = 0.2  # of the newest wait in the learnt error
_MOST_OFF = 10.0  # times that one wait counts at most
_LEAST_S = 0.5  # shorter waits tell more of the moment of a step than of the machine


class WaitError:
    """By how much waits were longer than predicted lately: the mean of their ratios, as logarithms."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log)

    def learn(self, predicted_s: float, waited_s: float) -> None:
        """Learn from a wait that has ended; `predicted_s` is without the factor."""
        if max(predicted_s, waited_s) < _LEAST_S:
            return
        off = max(waited_s, _LEAST_S) / max(predicted_s, _LEAST_S)
        self._log += _WEIGHT * (log(min(_MOST_OFF, max(1 / _MOST_OFF, off))) - self._log)


@dataclass(frozen=True, slots=True)
class _Predicted:
    at: float
    wait_s: float  # until its prompt begins, without the factor


class Line:
    """The chats in line, each with what was last predicted for it."""

    def __init__(self) -> None:
        self.error = WaitError()
        self._predicted: dict[str, _Predicted] = {}  # chat in line -> its newest prediction

    def __contains__(self, request: object) -> bool:
        return request in self._predicted

    def __len__(self) -> int:
        return len(self._predicted)

    def joined(self, request: str, wait_s: float, now: float) -> None:
        """Note that a chat is in line, and that its prompt begins in about `wait_s`."""
        self._predicted[request] = _Predicted(now, wait_s)

    def began(self, request: str, now: float) -> None:
        """Note that the prompt of a request begins, and learn from its wait."""
        if (told := self._predicted.pop(request, None)) is not None:
            self.error.learn(told.wait_s, now - told.at)

    def left(self, request: str) -> None:
        self._predicted.pop(request, None)

    def places(self, waiting: Sequence[Request], queue_s: float, now: float) -> Iterator[Place]:
        """Yield the places of a worker's chats in line; `waiting` are all real-time prompts that have not begun there,
        in order of arrival, and together they take `queue_s`."""
        all_tokens = sum(len(request.prompt) for request in waiting)
        weights = {request.caller: request.weight for request in waiting}
        before, tokens = Counter[str](), Counter[str]()  # by caller, as the walk goes on
        sizes, numbers = Counter[str](), Counter(request.caller for request in waiting)
        for request in waiting:
            sizes[request.caller] += len(request.prompt)
        for request in waiting:
            caller = request.caller
            tokens[caller] += len(request.prompt)
            if request.id in self._predicted and all_tokens:
                num = before[caller] + _of_others(numbers, weights, caller, before[caller] + 1)
                to_run = tokens[caller] + _of_others(sizes, weights, caller, tokens[caller])
                first_s = queue_s * to_run / all_tokens
                self.joined(request.id, first_s * (1 - len(request.prompt) / to_run), now)
                yield Place(request.id, request.attempt, round(num), first_s * self.error.factor)
            before[caller] += 1


def _of_others(counted: Mapping[str, int], weights: Mapping[str, int], caller: str, own: float) -> float:
    """Return what other callers have before a caller has had `own`: each gets as much in turn, by its weight."""
    each = own / weights[caller]
    return sum(min(size, each * weights[other]) for other, size in counted.items() if other != caller)
