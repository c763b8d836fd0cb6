"""Which scheduler a policy means."""

from __future__ import annotations

from alignedserve.errors import ConfigError
from alignedserve.schedulers.aligned import Aligned
from alignedserve.scheduling.offered import NO_PAPERS, of_papers, offered
from alignedserve.scheduling.policy import ALIGNED, Chunking, Policy
from alignedserve.worker.scheduler import NO_LIMIT, Scheduler


def scheduler_of(policy: Policy, most: int = NO_LIMIT) -> Scheduler:
    """Return a new scheduler for the policy, with `most` requests in a step.

    Without a limit it is for a prefill worker, on which prompts do not take turns. Whole prompts alone are a rule of
    the papers, with our scheduler too."""
    if policy.scheduler == ALIGNED and policy.chunking is not Chunking.NONE:
        return Aligned(policy, most)
    papers = of_papers("table")
    if papers is not None and policy.scheduler in papers.SCHEDULERS:
        found: Scheduler = papers.scheduler_of(policy, most)
    elif policy.scheduler == ALIGNED:
        raise ConfigError(f"schedule.chunking none {NO_PAPERS}")
    else:
        found = offered(policy.scheduler)(policy, most)
    return found
