"""A custom policy chooses among the requests of a step; the scheduler decides all else.

    the policy names some    these may run, and requests that it has left out of MOST_LEFT_OUT steps in a row
    none of these can run    for lack of memory, say: the scheduler chooses among all
    no answer comes          the same

So whatever the policy says, each request with memory runs sooner or later, and every step runs something that can run.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.policies.guard import Guard
from alignedserve.policies.kinds import SeatedRequest
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.schedulers.wrapping import Wrapping
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, StepView

MOST_LEFT_OUT = 64  # steps in a row that a request with memory is left out of


class CustomChoice(Wrapping):
    def __init__(self, wrapped: Scheduler, guard: Guard) -> None:
        super().__init__(wrapped)
        self._guard = guard
        self._left_out: dict[str, int] = {}  # request -> steps in a row without the request
        self._counted = 0  # the number of the newest step that is counted

    def plan(self, view: StepView) -> PlannedStep:
        """Plan for the requests that the policy names; for all where none of those can run."""
        self._count(view)
        requests = (*view.decodes, *view.prompts)
        answer: Sequence[str] | None = self._guard.ask(tuple(map(_facts_of, requests))) if requests else None
        if answer is not None:
            names = {*answer, *(name for name, number in self._left_out.items() if number >= MOST_LEFT_OUT)}
            decodes, prompts = _named(view.decodes, names), _named(view.prompts, names)
            found = self.wrapped.plan(view._replace(decodes=decodes, prompts=prompts))
            if not found.is_empty:
                return found
        return self.wrapped.plan(view)

    def _count(self, view: StepView) -> None:
        """Count the steps that requests are left out of."""
        if view.ran.number == self._counted:
            return
        self._counted = view.ran.number
        ran = {running.request.id for running in (*view.ran.decodes, *view.ran.prompts)}
        here = (running.request.id for running in view.here)
        self._left_out = {name: self._left_out.get(name, 0) + 1 for name in here if name not in ran}


def _facts_of(running: WorkerRequest) -> SeatedRequest:
    request, ahead = running.request, 0 if running.decodes else running.num_ahead
    told = request.id, running.promise.is_rt, request.priority, request.arrival_at, running.num_tokens
    return SeatedRequest(*told, len(running.output), ahead)


def _named(requests: Sequence[WorkerRequest], names: set[str]) -> list[WorkerRequest]:
    return [running for running in requests if running.request.id in names]
