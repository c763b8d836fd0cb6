"""The decode worker as a process."""

from __future__ import annotations

from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.executor.worker_process import run_worker
from alignedserve.shell.part import OnStart, Part


def run(part: Part, on_start: OnStart) -> None:
    run_worker(part, on_start, decode_core)
