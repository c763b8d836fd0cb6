"""The memory, and the parts, that forms add to a worker's core by its policy."""

from __future__ import annotations

from alignedserve.forms.memory.hybrid import WeighedMemory
from alignedserve.forms.memory.two_ended import TwoEndedMemory
from alignedserve.forms.pool.worker_part import PageRewriting
from alignedserve.forms.prefetch.buffers import Buffers
from alignedserve.forms.prefetch.decode_part import Prefetching
from alignedserve.scheduling.form_rules import Cache, Layout
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import FormPart, Worker
from alignedserve.worker.scheduler import Scheduler


def memory_for(policy: Policy, scheduler: Scheduler) -> type[PlainMemory]:
    """Return the memory of a decode worker."""
    if policy.blocks is Layout.BIDIRECTIONAL:
        return TwoEndedMemory
    if policy.cache is Cache.HYBRID or scheduler.weighs_memory:  # it weighs requests as KV, too
        return WeighedMemory
    return PlainMemory


def parts_of(worker: Worker, offering: Offering) -> tuple[FormPart, FormPart]:
    """Return the part that rewrites pages for the pool, and the part for KV that prefill workers hold for others."""
    rewriting = PageRewriting(worker)
    if not worker.memory.pace.policy.prefetch:
        return rewriting, FormPart(worker)
    return rewriting, Prefetching(worker, offering) if worker.memory.decodes else Buffers(worker, offering)
