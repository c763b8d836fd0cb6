"""Real-time requests beyond their caller's part of a worker give way to those of others.

A worker's seats are limited, and so are the prompt tokens of a step. Where callers together want more of
either, each has a part by its weight (scheduling/shares.py). So a caller that stays within its part is served as
promised, whatever others send; and what nobody else wants, any caller may have.

    beyond its part of the seats      it is served as best-effort requests are (Yielding), and may lose its seat
    a prompt beyond that of a step    it comes behind all other real-time requests
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from alignedserve.core import ServiceClass
from alignedserve.scheduling.promise import TokenPromise, Yielding
from alignedserve.scheduling.shares import beyond_parts
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class CallerShares:
    def __init__(self, seats: int, pace: Pace, waiting: WaitingPrompts) -> None:
        self._seats, self._pace, self._waiting = seats, pace, waiting
        self._yielding: dict[WorkerRequest, None] = {}
        self._behind: dict[WorkerRequest, None] = {}

    def divide(self, seated: Sequence[WorkerRequest]) -> Sequence[WorkerRequest]:
        """Let requests give way that are beyond their caller's part, and others no longer; return those that yield now,
        or do no longer.

        `seated` are the requests that may be in a step."""
        if not (self._waiting.callers or self._yielding or self._behind):
            return ()
        yielding, behind = self._beyond(seated)
        changed = _changed(self._yielding, yielding)
        for running in changed:
            promise = running.promise
            anew = promise.kept if isinstance(promise, Yielding) else Yielding(promise)
            self._waiting.promise_anew(running, anew)
        for running in _changed(self._behind, behind):
            kept = running.promise.kept if isinstance(running.promise, Yielding) else running.promise
            assert isinstance(kept, TokenPromise)
            kept.is_behind = running in behind
            self._waiting.refile(running)
        self._yielding, self._behind = yielding, behind
        return changed

    def _beyond(self, seated: Sequence[WorkerRequest]) -> tuple[dict[WorkerRequest, None], dict[WorkerRequest, None]]:
        """Return the requests beyond their caller's part of the seats, and the prompts beyond that of a step."""
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
    """Return the requests that are in one of the two, in an order that does not depend on where they lie in memory."""
    return [one for one in before if one not in now] + [one for one in now if one not in before]
