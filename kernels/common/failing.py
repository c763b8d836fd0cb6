"""Replace a kernel that fails while it runs, unless the fault is not its own.

A shape that was not tried before may show that a GPU cannot compile a kernel. Kernels raise before anything has run, so
the same call can be made again. Too little memory is handled by the step. A lost device, on which every call fails,
ends the process: its launcher starts the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from alignedserve.errors import AlignedServeError, DeviceLost
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.reference import Reference

_TOO_LITTLE_MEMORY = ("out of memory", "status_alloc_failed")  # the second of CUDA's libraries
_INSTEAD = {"attend_new": "two kernels do what it did"}  # the reference has no such kernel, and says so
_NOT_ITS_FAULT = (AlignedServeError, MemoryError, torch.OutOfMemoryError)


def in_a_line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def loss(device: torch.device, synchronize: Callable[[torch.device], object] = torch.cuda.synchronize) -> str | None:
    """Return why the device cannot compute any more, or None where it still computes."""
    if device.type != "cuda" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        synchronize(device)
    except Exception as error:  # from the driver or from torch: the next call would raise the same
        return in_a_line(error)
    return None


@contextmanager
def noticing_loss(device: torch.device) -> Iterator[None]:
    """Turn an error within into DeviceLost where the device has failed."""
    try:
        yield
    except AlignedServeError:
        raise
    except Exception as error:
        if why := loss(device):
            raise _lost(device, why) from error
        raise


def fault_of_kernel(error: Exception, device: torch.device) -> str:
    """Return the fault as a line for the log; raise an error that is no fault of the kernel."""
    if isinstance(error, _NOT_ITS_FAULT) or any(words in str(error).lower() for words in _TOO_LITTLE_MEMORY):
        raise error
    if why := loss(device):
        raise _lost(device, why) from error
    return in_a_line(error)


def _lost(device: torch.device, why: str) -> DeviceLost:
    return DeviceLost(f"{device} computes nothing any more ({why}): this process ends, and is restarted")


def guard(kernels: Reference, names: Iterable[str], device: torch.device) -> None:
    """Replace each of these kernels by the reference when it first fails, in place."""
    for name in names:
        setattr(kernels, name, _Guarded(kernels, name, device))


def is_replaced(kernels: Reference, name: str) -> bool:
    """Return whether the reference has replaced this kernel, at the start or since."""
    own = vars(kernels).get(name)
    return own is not None and not isinstance(own, _Guarded)


def replaced(name: str, why: str) -> None:
    """Say that the reference takes the place of this kernel."""
    fell_back(f"kernel {name}", why, _INSTEAD.get(name, f"{Reference.name} takes its place"))


class _Guarded:
    def __init__(self, kernels: Reference, name: str, device: torch.device) -> None:
        self._of, self._name, self._device = kernels, name, device
        self._run: Callable[..., Any] = getattr(kernels, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._run(*args, **named)
        except (TypeError, ValueError):  # the caller's arguments are wrong
            raise
        except Exception as error:
            why = fault_of_kernel(error, self._device)
        replaced(self._name, why)
        instead = getattr(Reference(), self._name)
        setattr(self._of, self._name, instead)
        return instead(*args, **named)
