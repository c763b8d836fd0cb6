"""AccelGen's own scheduler (§4.2 to §4.4): a budget by the tightest deadline, and the best fit of tokens and memory.

The budget of prompt tokens is the number that saturates the hardware, times the tightest SLO, divided by the time of
such a step (formula 6); nothing else bounds the time of a step. All running decodes stay in the step, and use the
budget first. Chats and documents are equal: both go by slack.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import inf

from alignedserve.cost.model import Shape
from alignedserve.papers.best_fit import add_best_fit
from alignedserve.papers.policy import PaperPolicy
from alignedserve.schedulers.aligned import AlignedStep, first_decodes, ranks_of, waiting_in_order
from alignedserve.scheduling.policy import Chunking
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.ranks import in_turn, ranked_by_arrival
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBuilder, all_decodes
from alignedserve.worker.step.view import PlannedStep, StepView
from alignedserve.worker.step.waiting_prompts import Ranked

BOTH = (True, False)  # chats, then documents


class AccelGen(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        """Fill the next step with urgent requests, then decodes, then prompts; of each chats before documents."""
        at = view.at
        view.waiting.refresh(at.now, at.times, at.chunk)
        if (decodes := all_decodes(view, self.most)) is not None:
            return decodes
        line, waiting = view.waiting.line, waiting_in_order(view)
        step = EqualStep(view, self.most)
        step.add_together(first_decodes(view))
        ranks = ranks_of(view, step)
        for is_rt in BOTH:
            urgent = line.urgent(at.now, at.times.most_s, is_rt)
            step.add(in_turn(ranks.urgent(is_rt), step.seatable(urgent, not is_rt)))
        for is_rt in BOTH:
            step.add(ranks.decodes(is_rt))
        for is_rt in BOTH:
            later = line.later(at.now, at.times.most_s, is_rt)
            prompts = in_turn(ranks.prompts(is_rt), step.seatable(later, not is_rt))
            self.add_prompts(step, prompts, is_rt)
        step.add(in_turn(ranks.dropped(), step.seatable(line.late(at.now))))
        if step.is_empty:
            step.add_one_alone(ranks, waiting)
        return step.selection

    def add_prompts(self, step: StepBuilder, prompts: Iterable[Ranked], is_rt: bool) -> None:
        """Add prompts that are not urgent, by the best fit to what is left (§4.4)."""
        ahead = 1 if is_rt else 2  # of a key come before the priority and the slack
        add_best_fit(step, ((key[ahead : ahead + 2], running) for key, running in prompts))


class AccelGenNoBatch(AccelGen):
    """AccelGen's ablation /Batch (§6.3): prompts go strictly by slack."""

    def add_prompts(self, step: StepBuilder, prompts: Iterable[Ranked], is_rt: bool) -> None:
        step.add(prompts)


class AccelGenNoOrder(Scheduler):
    """The ablation /Order (§6.3): by arrival; within a window of arrivals the best fit."""

    def plan(self, view: StepView) -> PlannedStep:
        """Fill the next step with decodes, then with the prompts that best fill what is left."""
        at = view.at
        view.waiting.refresh(at.now, at.times, at.chunk)
        if (decodes := all_decodes(view, self.most)) is not None:
            return decodes
        waiting, again = waiting_in_order(view), waiting_in_order(view)
        step = OneLongPrompt(view, self.most)
        step.add_together(view.decodes)
        ranks = ranked_by_arrival((*step.others_of(view.decodes), *view.prompts))
        step.add(found for found in ranks if found[1].decodes)
        running = (running for running in view.prompts if not running.decodes)
        prompts = chain(running, (found for _, found in step.seatable(waiting)))
        add_best_fit(step, (((0, found.request.arrival_at), found) for found in prompts))
        if step.is_empty:
            step.add_one_alone(ranks, again)
        return step.selection


class OneLongPrompt(StepBuilder):
    """A step with which only one prompt of `Policy.long_prompt` tokens or more is unfinished (ERA, §4.2)."""

    def __init__(self, view: StepView, most: int) -> None:
        super().__init__(view, UNBOUNDED, paper_budget(view), most)
        self._long = PaperPolicy.of(self.policy).long_prompt if self.policy.chunking is Chunking.SLO else inf
        self._has_long = any(seated.num_tokens >= self._long for seated in view.here)

    def scales(self, tokens: int) -> tuple[int, int]:
        return 1, 1  # the nearest demand is that of the least distance in tokens (§4.4)

    def must_wait(self, running: WorkerRequest, is_urgent: bool = False) -> bool:
        if super().must_wait(running, is_urgent):
            return True
        return self._has_long and not (running.blocks or is_urgent) and running.num_tokens >= self._long

    def add_chunk(self, running: WorkerRequest, most: int) -> int:
        begins_long = not running.blocks and running.num_tokens >= self._long
        size = super().add_chunk(running, most)
        self._has_long |= begins_long and size > 0
        return size


class EqualStep(OneLongPrompt, AlignedStep):
    """A step in which chats and documents are equal."""

    blocks_all = StepBuilder.blocks_all


def paper_budget(view: StepView) -> int:
    """Return the most prompt tokens of a step: S_pf · SLO_min / T_pf, less the decodes (formula 6)."""
    at = view.at
    if at.policy.chunking is not Chunking.SLO:
        return at.room
    tbts = (running.request.slo.tbt_s for running in view.decodes if running.promise.is_rt)
    ttfts = (running.request.slo.ttft_s for running in view.prompts if running.promise.is_rt)
    waiting = (prompt.request.slo.ttft_s for prompt in view.waiting.real_time)
    least_s = at.policy.slo_scale * min(chain(tbts, ttfts, waiting), default=inf)
    pivot_s = at.cost.seconds(Shape.build([(at.pivot, 0)]))
    if least_s == inf or not pivot_s:
        return at.room
    return max(at.block_size, int(at.pivot * least_s / pivot_s) - len(view.decodes))
