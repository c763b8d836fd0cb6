"""The table of schedulers: which class plans steps under which name (names.py says what each does)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from alignedserve.papers.accelgen import AccelGen, AccelGenNoBatch, AccelGenNoOrder
from alignedserve.papers.alise import Alise
from alignedserve.papers.apt_serve import AptServe
from alignedserve.papers.best_fit import BestFit
from alignedserve.papers.bros import Bros
from alignedserve.papers.fastserve import FastServe, Mlfq
from alignedserve.papers.fcfs import (
    AlignedServePaper,
    DecodesFirst,
    FirstCome,
    PromptsFirst,
    RoundRobin,
    Tgi,
    by_arrival,
)
from alignedserve.papers.in_order import InOrder
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.wrapping import WholePrompts
from alignedserve.schedulers.aligned import Aligned
from alignedserve.scheduling.policy import ALIGNED, Chunking, Policy
from alignedserve.worker.scheduler import NO_LIMIT, Scheduler

SCHEDULERS: Mapping[str, type[Scheduler]] = MappingProxyType(
    {
        ALIGNED: Aligned,  # with prompts that are never cut
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
    if not policy.rules.fills and (most == NO_LIMIT or not issubclass(kind, FirstCome)):
        rule = by_arrival(policy)
        kind = kind if issubclass(kind, rule) else rule
    scheduler = kind(policy, most)
    if policy.chunking is Chunking.NONE and not policy.is_plain:
        return WholePrompts(scheduler)
    return scheduler
