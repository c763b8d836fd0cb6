"""Schedulers by a fixed order, by arrival or by a key of each request, in which steps end in time.

All decodes come first where they fit together. Then each request, in its order, gets what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from alignedserve.schedulers.accelgen import paper_budget
from alignedserve.schedulers.aligned import is_worth_gaps, prompt_budget, step_bounds, waiting_in_order
from alignedserve.schedulers.best_fit import add_best_fit
from alignedserve.schedulers.scheduler import Scheduler, SchedulerSetup
from alignedserve.scheduling.policy import Chunking, PromptChoice
from alignedserve.worker.step.lines import Ranked
from alignedserve.worker.step.ranks import in_turn, ranked, ranked_by_arrival
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds, StepBuilder
from alignedserve.worker.step.view import Selection, StepView


class InOrder(Scheduler):
    def __init__(self, setup: SchedulerSetup) -> None:
        super().__init__(setup)
        self.bounds_steps = self.policy.chunking is Chunking.SLO and not self.policy.as_in_paper

    def plan(self, view: StepView) -> Selection:
        """Fill the next step in the order of the policy."""
        at, prompts = view.at, view.prompts
        view.waiting.refresh(at.now, at.times, at.chunk)
        if (decodes := self.all_decodes(view)) is not None:
            return decodes
        waiting, again = waiting_in_order(view), waiting_in_order(view)
        budget = paper_budget(view) if self.policy.as_in_paper else prompt_budget(at)
        step = InOrderStep(view, self.bounds(view), budget)
        step.add_together(view.decodes)
        seated = (*step.others_of(view.decodes), *prompts)
        if self.policy.selection is PromptChoice.MULTI_RESOURCE:
            ranks: Iterable[Ranked] = ranked_by_arrival(seated)
            step.add(found for found in ranks if found[1].decodes)
            running = (running for running in prompts if not running.decodes)
            rest = chain(running, (found for _, found in step.seatable(waiting)))
            add_best_fit(step, (((0, found.request.arrival_at), found) for found in rest), self.policy.as_in_paper)
        else:
            ranks = ranked(seated, at)
            step.add(in_turn(ranks, step.seatable(waiting)))
        if step.is_empty:
            step.add_one_alone(ranks, again)
        return step.selection

    def bounds(self, view: StepView) -> StepBounds:
        return step_bounds(view) if self.bounds_steps else UNBOUNDED


class InOrderStep(StepBuilder):
    def is_worth_gaps(self, prompt: Running, size: int, most: int) -> bool:
        return is_worth_gaps(self, prompt, size, most)
