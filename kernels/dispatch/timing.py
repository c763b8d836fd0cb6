"""Time what a GPU does."""

from __future__ import annotations

from collections.abc import Callable

import torch

Seconds = Callable[[Callable[[], object]], float]


def seconds_on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
