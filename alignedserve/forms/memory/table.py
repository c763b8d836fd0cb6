"""Which memory a policy asks for."""

from __future__ import annotations

from alignedserve.forms.memory.hybrid import WeighedMemory
from alignedserve.forms.memory.two_ended import TwoEndedMemory
from alignedserve.forms.rules import Cache, Layout
from alignedserve.scheduling.policy import Policy, SchedulerName
from alignedserve.worker.memory import PlainMemory


def memory_for(policy: Policy) -> type[PlainMemory]:
    if policy.blocks is Layout.BIDIRECTIONAL:
        return TwoEndedMemory
    if policy.cache is Cache.HYBRID or policy.scheduler is SchedulerName.APT_SERVE:  # it weighs requests as KV, too
        return WeighedMemory
    return PlainMemory
