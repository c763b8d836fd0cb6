"""The device of an engine: the CPU, or one GPU. What only a GPU needs stands here, and costs a CPU nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from alignedserve.errors import ConfigError, MemoryTooSmall

if TYPE_CHECKING:
    from alignedserve.sizing.memory import MemoryDemand


CPU = torch.device("cpu")
_MIB = 1 << 20


def device_of(kind: str, number: int) -> torch.device:
    """Return the device of the worker process of this number: processes share GPUs in turn where there are too few.

    The launcher has decided what `auto` stands for (sizing/accelerator.py): workers of a deployment compute alike.
    """
    assert kind in ("cpu", "cuda"), kind
    if kind == "cpu":
        return CPU
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f": this torch, {torch.__version__}, was built without CUDA"
        raise ConfigError(f"engine.device {kind} needs a GPU that torch sees{built}: set it to cpu")
    return torch.device(kind, number % torch.cuda.device_count())


def name_of(device: torch.device) -> str | None:
    """Return the name of a GPU, None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU as its driver names it, nothing for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def use(device: torch.device) -> torch.device:
    """Make it this thread's default CUDA device, and return it with its number, as tensors on it report it."""
    if device.type != "cuda":
        return device
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(number)
    return torch.device(device.type, number)


def finish(device: torch.device) -> None:
    """Wait until the device has done everything that this thread has ordered."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def forget_error(device: torch.device) -> None:
    """Clear a CUDA error that this thread has handled: otherwise the next launch of a kernel reports it again."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.zeros(1, device=device)


class Mark:
    """A mark behind everything that this thread has ordered of the device so far."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
            self._event.record(torch.cuda.current_stream(device))

    def go_behind(self) -> None:
        """Put what the calling thread orders from now on behind the mark; the thread does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Wait until the device has reached the mark."""
        if self._event is not None:
            self._event.synchronize()


def beside_steps(device: torch.device) -> AbstractContextManager[object]:
    """Return a stream context for a thread whose copies go on while steps run."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return nullcontext()


class ReadBack:
    """A tensor on its way to the CPU: it can be read once it is copied, whatever is ordered of the device after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        self._host.copy_(tensor, non_blocking=True)  # the next step may put its own there
        self._arrived = Mark(tensor.device)

    def read(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        self._arrived.wait()
        return self._host


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, None for a CPU, whose memory is checked earlier (sizing/memory.py).

    First this process gives back what it can: memory that graphs keep, only graphs can use again.
    """
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def check_shared(processes: int) -> None:
    """Refuse processes that share a GPU without a set size: each takes all free memory, so two would both take it."""
    if processes > torch.cuda.device_count():
        raise ConfigError(
            f"{processes} processes of workers share {torch.cuda.device_count()} GPUs: set engine.kv_memory_mb to what"
            " each is to take"
        )


def cache_room(device: str, free: int, given_mb: int | None, demand: MemoryDemand, reserve: int) -> int:
    """Return the bytes for the device cache, out of those free once the weights are loaded: the given size, or all that
    a step and the reserve leave."""
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


# Messages of torch that are not an OutOfMemoryError: from the CPU's allocator, oneDNN and MKL, and from CUDA's
# libraries, such as CUBLAS_STATUS_ALLOC_FAILED.
_MESSAGES = (
    *("can't allocate memory", "not enough memory", "could not create a memory"),
    *("out of memory", "status_alloc_failed"),
)


def out_of_memory(error: BaseException) -> str | None:
    """Return the first line of the error, or None if memory was not its reason."""
    message = str(error).partition("\n")[0]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return message or "out of memory"
    if isinstance(error, RuntimeError) and any(words in message.lower() for words in _MESSAGES):
        return message
    return None
