"""The memory, and the parts, that forms add to a worker's core by its policy."""

from __future__ import annotations

from alignedserve.forms.buffers import Buffers
from alignedserve.forms.page_rewriting import PageRewriting
from alignedserve.forms.prefetching import Prefetching
from alignedserve.scheduling.form_rules import PLAIN
from alignedserve.scheduling.offered import of_papers
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import FormPart, Worker


def memory_for(policy: Policy) -> type[PlainMemory]:
    """Return the memory of a decode worker."""
    if policy.memory == PLAIN:
        return PlainMemory
    found: type[PlainMemory] = of_papers("memory").memory_of(policy.memory)
    return found


def parts_of(worker: Worker, offering: Offering) -> tuple[FormPart, FormPart]:
    """Return the part that rewrites pages for the pool, and the part for KV that prefill workers hold for others."""
    rewriting = PageRewriting(worker)
    if not worker.memory.pace.policy.prefetch:
        return rewriting, FormPart(worker)
    return rewriting, Prefetching(worker, offering) if worker.memory.decodes else Buffers(worker, offering)
