"""Where an engine computes: the CPU, or one GPU. What only a GPU asks for stands here, and costs a CPU nothing.

Not yet run on a GPU (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from alignedserve.errors import ConfigError, MemoryTooSmall

if TYPE_CHECKING:
    from alignedserve.memory import Demand

CPU = torch.device("cpu")
RESERVE = 1 << 30  # bytes of a GPU that are left to its libraries, to fragments, and to what steps vary by
_MIB = 1 << 20


def device_of(kind: str, number: int) -> torch.device:
    """The worker process of this number has a GPU of its own where there are enough, else they share them in turn."""
    if kind == "cpu":
        return CPU
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f": this torch, {torch.__version__}, was built without CUDA"
        raise ConfigError(f"engine.device {kind} needs a GPU that torch sees{built}: set it to cpu")
    return torch.device(kind, number % torch.cuda.device_count())


def name_of(device: torch.device) -> str | None:
    """Of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def use(device: torch.device) -> None:
    """What this process makes without saying where is made there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def finish(device: torch.device) -> None:
    """What this thread has ordered is done when this returns."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def after_now(device: torch.device) -> Callable[[], None]:
    """What this thread has ordered so far goes before whatever another one orders once it has called this."""
    if device.type != "cuda":
        return lambda: None
    so_far = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(so_far)


def beside_steps(device: torch.device) -> AbstractContextManager[object]:
    """For a thread whose copies go on while steps run: a stream of its own."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return nullcontext()


def check_free(device: torch.device, kv_memory_mb: int, demand: Demand) -> None:
    """Once the weights are there: whether the cache and a step fit beside them."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        check_room(str(device), free, kv_memory_mb, demand)


def check_room(device: str, free: int, kv_memory_mb: int, demand: Demand) -> None:
    cache, step = demand.cache, demand.step
    room = free - step - RESERVE
    if cache > room:
        advice = (
            f"lower engine.kv_memory_mb from {kv_memory_mb} to {room // _MIB}" if room > _MIB else "free some of it"
        )
        raise MemoryTooSmall(
            f"{device} has {free // _MIB} MB free beside the weights, {cache // _MIB} MB of KV, {step // _MIB} for a"
            f" step and a reserve of {RESERVE // _MIB} are needed: {advice}"
        )
