"""Makes a decode worker's core with the scheduler and the memory that the policy names."""

from __future__ import annotations

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.forms.table import memory_for, parts_of
from alignedserve.schedulers.table import scheduler_of
from alignedserve.worker.setup import WorkerSetup


def decode_core(setup: WorkerSetup) -> DecodeCore:
    scheduler = scheduler_of(setup.policy, setup.limits.max_batch)
    return DecodeCore(setup, scheduler, memory_for(setup.policy), parts_of)
