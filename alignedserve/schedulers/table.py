"""The table of schedulers: which one a policy means.

schedule.packing   schedule.order                   scheduler
rt_be              due, slack                       Aligned, BestFit; AccelGen by its paper's rules
rt_be              shortest_remaining, own policy   InOrder
rt_be              levels                           Alise; InOrder where memory is given at once
others             fcfs                             FirstCome and those that are made of it, below
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from alignedserve.schedulers.accelgen import AccelGen
from alignedserve.schedulers.aligned import Aligned
from alignedserve.schedulers.alise import Alise
from alignedserve.schedulers.apt_serve import AptServe
from alignedserve.schedulers.best_fit import BestFit
from alignedserve.schedulers.fastserve import FastServe, Mlfq
from alignedserve.schedulers.fcfs import FirstCome, LongestLeaves
from alignedserve.schedulers.in_order import InOrder
from alignedserve.schedulers.round_robin import RoundRobin
from alignedserve.schedulers.scheduler import Scheduler, SchedulerSetup
from alignedserve.schedulers.tgi import Tgi
from alignedserve.scheduling.policy import Chunking, Packing, Policy, PromptChoice
from alignedserve.worker.step.view import Selection, StepView, all_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

BY_ARRIVAL: Mapping[Packing, type[Scheduler]] = MappingProxyType(
    {
        Packing.FCFS: FirstCome,
        Packing.LONGEST: LongestLeaves,
        Packing.ROUND_ROBIN: RoundRobin,
        Packing.MLFQ: Mlfq,
        Packing.SKIP_JOIN: FastServe,
        Packing.KNAPSACK: AptServe,
    }
)


def scheduler_of(setup: SchedulerSetup, is_prefill: bool = False) -> Scheduler:
    """Return a new scheduler for the setup's policy. On a prefill worker prompts take turns with nobody."""
    policy = setup.policy
    kind = FirstCome if is_prefill and policy.ordering.is_by_arrival else _kind_of(policy)
    if policy.chunking is Chunking.NONE and not policy.is_plain:
        kind = type(f"Whole{kind.__name__}", (WholePrompts, kind), {})
    return kind(setup)


def _kind_of(policy: Policy) -> type[Scheduler]:
    if policy.ordering.is_by_arrival:
        return Tgi if policy.waiting_ratio else BY_ARRIVAL.get(policy.packing, FirstCome)
    if not policy.ordering.goes_by_promises:
        return Alise if policy.swaps else InOrder
    if policy.as_in_paper:
        return AccelGen
    return BestFit if policy.selection is PromptChoice.MULTI_RESOURCE else Aligned


class WholePrompts(Scheduler):
    """An ablation of a scheduler that fills steps: prompts are not cut, and run in steps of their own."""

    def plan(self, view: StepView) -> Selection:
        """Return a step of whole prompts; one of decodes where no prompt can run."""
        at, decodes = view.at, view.decodes
        if at.seated is not None and len(decodes) <= at.batch:
            at.seated.forget()
        if view.prompts or view.waiting:
            found = super().plan(view._replace(decodes=(), at=replace(at, seated=None)))  # type: ignore[safe-super]
            if not found.is_empty:
                return found
        if len(decodes) > at.batch:
            return super().plan(view._replace(prompts=(), waiting=WaitingPrompts(at.policy)))  # type: ignore[safe-super]
        return all_of(decodes[: at.room], (), at)
