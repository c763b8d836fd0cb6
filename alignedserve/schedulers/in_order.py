"""Schedulers by a fixed order, by arrival or by a key of each request, in which steps end in time.

All decodes come first where they fit together. Then each request, in order, gets what is left.
"""

from __future__ import annotations

from alignedserve.schedulers.aligned import is_worth_gaps, prompt_budget, step_bounds, waiting_in_order
from alignedserve.schedulers.scheduler import NO_LIMIT, Scheduler
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.step.ranks import in_turn, ranked
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds, StepBuilder
from alignedserve.worker.step.view import PlannedStep, StepView


class InOrder(Scheduler):
    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self.bounds_steps = self.policy.chunking is Chunking.SLO

    def plan(self, view: StepView) -> PlannedStep:
        """Fill the next step in the order of the policy."""
        at, prompts = view.at, view.prompts
        view.waiting.refresh(at.now, at.times, at.chunk)
        if (decodes := self.all_decodes(view)) is not None:
            return decodes
        waiting, again = waiting_in_order(view), waiting_in_order(view)
        step = InOrderStep(view, self.bounds(view), prompt_budget(at), self.most)
        step.add_together(view.decodes)
        ranks = ranked((*step.others_of(view.decodes), *prompts), at)
        step.add(in_turn(ranks, step.seatable(waiting)))
        if step.is_empty:
            step.add_one_alone(ranks, again)
        return step.selection

    def bounds(self, view: StepView) -> StepBounds:
        return step_bounds(view) if self.bounds_steps else UNBOUNDED


class InOrderStep(StepBuilder):
    def is_worth_gaps(self, prompt: WorkerRequest, size: int, most: int) -> bool:
        return is_worth_gaps(self, prompt, size, most)
