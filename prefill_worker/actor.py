"""The prefill worker as a process."""

from __future__ import annotations

from alignedserve.executor.worker_process import run_worker
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.shell.part import OnStart, Part


def run(part: Part, on_start: OnStart) -> None:
    run_worker(part, on_start, PrefillCore)
