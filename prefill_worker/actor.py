"""The prefill worker as a process."""

from __future__ import annotations

from alignedserve.engine_hands import run_worker
from alignedserve.parts import OnStart, Part
from alignedserve.prefill_worker.state import PrefillCore


def run(part: Part, on_start: OnStart) -> None:
    run_worker(part, on_start, PrefillCore)
