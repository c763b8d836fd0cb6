"""Where an engine computes: the CPU, or one GPU. What only a GPU asks for stands here, and costs a CPU nothing.

Not yet run on a GPU (docs/how/gpu.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from alignedserve.errors import ConfigError, MemoryTooSmall

if TYPE_CHECKING:
    from alignedserve.machine.memory import MemoryDemand

CPU = torch.device("cpu")
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


def use(device: torch.device) -> torch.device:
    """What this process makes without saying where is made there. With its number, as tensors on it say it."""
    if device.type != "cuda":
        return device
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(number)
    return torch.device(device.type, number)


def finish(device: torch.device) -> None:
    """What this thread has ordered is done when this returns."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def forget_error(device: torch.device) -> None:
    """Of CUDA, which this thread was told of and has dealt with: else the next launch of a kernel is told it again."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.zeros(1, device=device)


class Mark:
    """What this thread has ordered of the device up to now."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            self._event.record(torch.cuda.current_stream(device))

    def go_behind(self) -> None:
        """What the calling thread orders from here on is done after it. Nobody waits."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Until it is done."""
        if self._event is not None:
            self._event.synchronize()


def beside_steps(device: torch.device) -> AbstractContextManager[object]:
    """For a thread whose copies go on while steps run: a stream of its own."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return nullcontext()


class ReadBack:
    """A tensor on its way to the CPU: it comes as soon as it is there, whatever is ordered of the device after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self._arrived = Mark(tensor.device)

    def read(self) -> torch.Tensor:
        """Waits for it."""
        self._arrived.wait()
        return self._host


def free_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that nobody has, once this process has given back what it may: what graphs keep, only they can use
    again. A CPU's are looked at before (memory.py)."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def check_shared(processes: int) -> None:
    """Each takes what its GPU has left: two on one would each take it all."""
    if processes > torch.cuda.device_count():
        raise ConfigError(
            f"{processes} processes of workers share {torch.cuda.device_count()} GPUs: set engine.kv_memory_mb to what"
            " each is to take"
        )


def cache_room(device: str, free: int, given_mb: int | None, demand: MemoryDemand, reserve: int) -> int:
    """Bytes for the device cache, of those that are free once the weights are there: what was given, or all that a
    step and the reserve leave."""
    cache, step = demand.cache, demand.step
    room = free - step - reserve
    if given_mb is not None and cache <= room:
        return cache
    needs = f"{step // _MIB} for a step and a reserve of {reserve // _MIB} are needed"
    if given_mb is not None:
        advice = f"lower engine.kv_memory_mb from {given_mb} to {room // _MIB}" if room > _MIB else "free some of it"
        needs = f"{cache // _MIB} MB of KV, {needs}"
    elif room > _MIB:
        return room
    else:
        advice = "free some of it, or lower engine.max_step_tokens, or engine.gpu_reserve_mb"
        needs = f"and beside KV {needs}"
    raise MemoryTooSmall(f"{device} has {free // _MIB} MB free beside the weights, {needs}: {advice}")
