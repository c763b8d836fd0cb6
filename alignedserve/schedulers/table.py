"""The table of schedulers: which class plans steps under which name (scheduling/policy.py says what each does)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from alignedserve.policies.kinds import PolicyKind
from alignedserve.schedulers.accelgen import AccelGen, AccelGenNoBatch, AccelGenNoOrder
from alignedserve.schedulers.aligned import Aligned
from alignedserve.schedulers.alise import Alise
from alignedserve.schedulers.apt_serve import AptServe
from alignedserve.schedulers.best_fit import BestFit
from alignedserve.schedulers.bros import Bros
from alignedserve.schedulers.custom import Guarded
from alignedserve.schedulers.fastserve import FastServe, Mlfq
from alignedserve.schedulers.fcfs import (
    AlignedServePaper,
    DecodesFirst,
    FirstCome,
    PromptsFirst,
    RoundRobin,
    Tgi,
    by_arrival,
)
from alignedserve.schedulers.in_order import InOrder
from alignedserve.schedulers.scheduler import NO_LIMIT, Scheduler
from alignedserve.schedulers.wrapping import WholePrompts
from alignedserve.scheduling.policy import Chunking, Policy, SchedulerName

SCHEDULERS: Mapping[SchedulerName, type[Scheduler]] = MappingProxyType(
    {
        SchedulerName.ALIGNED: Aligned,
        SchedulerName.BEST_FIT: BestFit,
        SchedulerName.BROS: Bros,
        SchedulerName.SHORTEST: InOrder,
        SchedulerName.ALISE: Alise,
        SchedulerName.ACCELGEN: AccelGen,
        SchedulerName.ACCELGEN_NO_BATCH: AccelGenNoBatch,
        SchedulerName.ACCELGEN_NO_ORDER: AccelGenNoOrder,
        SchedulerName.FCFS: DecodesFirst,
        SchedulerName.VLLM_V0: PromptsFirst,
        SchedulerName.VLLM_V1: DecodesFirst,
        SchedulerName.ORCA: DecodesFirst,
        SchedulerName.SARATHI: DecodesFirst,
        SchedulerName.FASTGEN: InOrder,  # each chunk gets memory with its step (DeepSpeed-FastGen §3.B)
        SchedulerName.DISTSERVE: PromptsFirst,
        SchedulerName.LONGEST: AlignedServePaper,
        SchedulerName.ROUND_ROBIN: RoundRobin,
        SchedulerName.MLFQ: Mlfq,
        SchedulerName.FASTSERVE: FastServe,
        SchedulerName.APT_SERVE: AptServe,
        SchedulerName.TGI: Tgi,
    }
)


def scheduler_of(policy: Policy, most: int = NO_LIMIT) -> Scheduler:
    """Return a new scheduler for the policy, with `most` requests in a step.

    Without a limit it is for a prefill worker, on which prompts do not take turns. Where settings ask for another rule
    by arrival than the system's (`--preset sarathi --set schedule.chunking=none`), that rule plans."""
    kind = SCHEDULERS[policy.scheduler]
    if policy.own.decides(PolicyKind.ORDER):
        kind = InOrder
    elif not policy.rules.fills and (most == NO_LIMIT or not issubclass(kind, FirstCome)):
        rule = by_arrival(policy)
        kind = kind if issubclass(kind, rule) else rule
    scheduler = kind(policy, most)
    if policy.chunking is Chunking.NONE and not policy.is_plain:
        scheduler = WholePrompts(scheduler)
    guard = policy.own.guard(PolicyKind.SCHEDULER, policy, most)
    return scheduler if guard is None else Guarded(scheduler, guard)
