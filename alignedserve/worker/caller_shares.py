"""Requests beyond a caller's part of a worker give way to requests of other callers.

A worker's seats are limited, and so are the prompt tokens of its next step. As long as both are enough for all, each
caller takes what it wants. Otherwise each caller has a part by its weight, which is 1 unless its key says more; what
a caller leaves of its part is divided among the others (weighted max-min fairness). For example, of 64 seats caller A
with 1 request takes 1, and caller B with 160 requests has 63: the other 97 requests of B are beyond B's part. Of two
callers with 160 requests each, and weights 3 and 1, the first has 48 seats and the second 16.

    a request beyond the seats      is served like best-effort requests (Yielding), and may lose the seat
    a prompt beyond the step        comes behind all other real-time requests

Documents go by a clock of the tokens that each caller was served (Sheng et al., OSDI 2024). While documents of several
callers wait, the next document is of the caller with the least count, by weight; a token of an output counts as two of
a prompt. For example, caller A asks for long outputs and caller B for short ones: both get as many tokens in all, and B
more of prompts. A caller that comes starts at the least count of those that wait, so nobody saves up service. Once no
document waits, all counts end.

Gain: not weighed alone; docs/measured.md has first tokens beside the floods of another key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from alignedserve.core import Chunk, ServiceClass
from alignedserve.scheduling.dues import TokenPromise, Yielding
from alignedserve.scheduling.parts import part_of_one
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

_OUTPUT = 2  # tokens of a prompt that a token of an output counts as


class CallerShares:
    def __init__(self, seats: int, pace: Pace, waiting: WaitingPrompts) -> None:
        self._seats, self._pace, self._waiting = seats, pace, waiting
        self._yielding: dict[WorkerRequest, None] = {}
        self._behind: dict[WorkerRequest, None] = {}
        self._served: dict[str, float] = {}  # tokens by weight, by caller; empty where no two callers' documents wait
        self._waited = frozenset[str]()  # callers with documents that waited when the last step was planned

    def divide(self, seated: Sequence[WorkerRequest]) -> None:
        """Make requests beyond a caller's part yield."""
        self._waiting.put_behind(self._served_more())
        if not (self._waiting.callers or self._yielding or self._behind):
            return
        yielding, behind = self._beyond(seated)
        for running in _changed(self._yielding, yielding):
            promise = running.promise
            self._waiting.set_promise(running, promise.kept if isinstance(promise, Yielding) else Yielding(promise))
        for running in _changed(self._behind, behind):
            kept = running.promise.kept if isinstance(running.promise, Yielding) else running.promise
            assert isinstance(kept, TokenPromise)
            kept.is_behind = running in behind
            self._waiting.refile(running)
        self._yielding, self._behind = yielding, behind

    def count(self, selection: PlannedStep, running_of: Callable[[Chunk], WorkerRequest]) -> None:
        """Count the tokens of a step for the callers of its documents, while documents of several callers wait."""
        if not self._served:
            return
        parts = [(running.request, _OUTPUT) for running in selection.decodes]
        parts += [(running_of(chunk).request, chunk.num_computed) for chunk in selection.chunks]
        for request, tokens in parts:
            if request.service is ServiceClass.BE:
                self._served[request.caller] = self._served.get(request.caller, 0.0) + tokens / request.weight

    def _served_more(self) -> frozenset[str]:
        """Return the callers with documents that wait, but for those that were served least."""
        waiting, served = self._waiting.documents, self._served
        if not waiting or (len(waiting) == 1 and not served):
            served.clear()
            return frozenset()
        least = min((served[caller] for caller in waiting if caller in served and caller in self._waited), default=0.0)
        for caller in waiting:
            if caller not in self._waited or caller not in served:
                served[caller] = max(least, served.get(caller, 0.0))
        self._waited = frozenset(waiting)
        least = min(served[caller] for caller in waiting)
        return frozenset(caller for caller in waiting if served[caller] > least)

    def _beyond(self, seated: Sequence[WorkerRequest]) -> tuple[dict[WorkerRequest, None], dict[WorkerRequest, None]]:
        """Return the requests beyond a caller's part of the seats, and the prompts beyond a caller's part of a step."""
        callers = self._waiting.callers
        if not callers or (len(callers) == 1 and all(running.request.caller in callers for running in seated)):
            return {}, {}
        seats: defaultdict[str, dict[WorkerRequest, float]] = defaultdict(dict)
        prompts: defaultdict[str, dict[WorkerRequest, float]] = defaultdict(dict)
        weights: dict[str, int] = {}
        for running in (*seated, *self._waiting):
            if running.request.service is ServiceClass.RT:
                caller = running.request.caller
                seats[caller][running], weights[caller] = 1.0, running.request.weight
                if not running.decodes:
                    prompts[caller][running] = running.num_ahead
        prompts_beyond = beyond_parts(prompts, self._pace.pivot, weights, are_divisible=True)
        return beyond_parts(seats, self._seats, weights), prompts_beyond


def _changed(before: Mapping[WorkerRequest, None], now: Mapping[WorkerRequest, None]) -> list[WorkerRequest]:
    """Return the requests that are in `before` or `now` but not in both, in an order that is the same in every run."""
    return [one for one in before if one not in now] + [one for one in now if one not in before]


T = TypeVar("T", bound=Hashable)


def beyond_parts(
    amounts: Mapping[str, Mapping[T, float]], capacity: float, weights: Mapping[str, int], are_divisible: bool = False
) -> dict[T, None]:
    """Return the requests beyond a caller's part, in the given order.

    `amounts` says what each request of a caller takes, in the order of service. A request on the border of a part is
    within, so that each caller has at least one request. Where amounts are divisible, a request on the border is
    beyond: a caller that wants little does not wait for a caller that wants much."""
    beyond: dict[T, None] = {}
    if len(amounts) < 2:
        return beyond
    one = part_of_one([(sum(taken.values()), weights[caller]) for caller, taken in amounts.items()], capacity)
    for caller, taken in amounts.items():
        used, part = 0.0, one * weights[caller]
        for request, amount in taken.items():
            if used + amount > part if are_divisible else used >= part:
                beyond[request] = None
            used += amount
    return beyond
