"""Schedulers that wrap another: they change the view or the plan, and all else is the other's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, RanStep, StepAhead, StepView, all_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class Wrapping(Scheduler):
    def __init__(self, wrapped: Scheduler) -> None:
        super().__init__(wrapped.policy, wrapped.most)
        self.wrapped, self.levels, self.most_seated = wrapped, wrapped.levels, wrapped.most_seated

    def goes_on(self, ahead: StepAhead, at: StepContext) -> bool:
        return self.wrapped.goes_on(ahead, at)

    def seating_order(self, waiting: WaitingPrompts, ran: RanStep) -> Iterable[WorkerRequest]:
        return self.wrapped.seating_order(waiting, ran)

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return self.wrapped.leaving(prompts, decodes, at)


class WholePrompts(Wrapping):
    """AccelGen /Chunk (§6.3, an ablation): a step of prompts that are not cut, or of decodes
    where no prompt can run."""

    def plan(self, view: StepView) -> PlannedStep:
        if view.prompts or view.waiting:
            found = self.wrapped.plan(view._replace(decodes=()))
            if not found.is_empty:
                return found
        if len(view.decodes) > self.most:
            return self.wrapped.plan(view._replace(prompts=(), waiting=WaitingPrompts(self.policy)))
        return all_of(view.decodes[: view.at.room], (), view.at)
