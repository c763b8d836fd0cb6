"""The parts that forms add to a worker's core by its policy."""

from __future__ import annotations

from alignedserve.forms.pool.worker_part import PageRewriting
from alignedserve.forms.prefetch.buffers import Buffers
from alignedserve.forms.prefetch.decode_part import Prefetching
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import FormPart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests


def parts_of(
    here: Requests, memory: PlainMemory, pool: PoolLink, log: WorkerLog, offering: Offering
) -> tuple[FormPart, FormPart]:
    """Return the part that rewrites pages for the pool, and the one of KV that prefill workers hold for others."""
    rewriting = PageRewriting(here, memory, pool)
    if not memory.pace.policy.prefetch:
        return rewriting, FormPart()
    common = here, memory, pool, log
    return rewriting, Prefetching(*common, offering) if memory.decodes else Buffers(*common)
