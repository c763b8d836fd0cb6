"""Schedulers by a fixed order, by arrival or by a key of each request, in which steps end in time.

All decodes come first where they fit together. Then each request, in order, gets what is left.
"""

from __future__ import annotations

from alignedserve.schedulers.aligned import (
    fits_ahead,
    is_in_time,
    is_worth_gaps,
    prompt_budget,
    step_bounds,
    waiting_in_order,
)
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.ranks import in_turn, ranked
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import StepBuilder, all_decodes
from alignedserve.worker.step.view import PlannedStep, StepAhead, StepView


class InOrder(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        """Fill the next step in the order of the policy."""
        at, prompts = view.at, view.prompts
        view.waiting.refresh(at.now, at.times, at.chunk)
        bounds = step_bounds(view)
        if (decodes := all_decodes(view, self.most, bounds)) is not None:
            return decodes
        waiting, again = waiting_in_order(view), waiting_in_order(view)
        step = InOrderStep(view, bounds, prompt_budget(at), self.most)
        step.add_together(view.decodes)
        ranks = ranked((*step.others_of(view.decodes), *prompts), at)
        step.add(in_turn(ranks, step.seatable(waiting)))
        if step.is_empty:
            step.add_one_alone(ranks, again)
        return step.selection

    def goes_on(self, ahead: StepAhead, at: StepContext) -> bool:
        return fits_ahead(ahead, at, self.most) and is_in_time(ahead, at)


class InOrderStep(StepBuilder):
    def is_worth_gaps(self, prompt: WorkerRequest, size: int, most: int) -> bool:
        return is_worth_gaps(self, prompt, size, most)
