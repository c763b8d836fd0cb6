"""When a kernel fails as it runs: another takes its place, unless the fault is not its own.

What a GPU cannot compile may show only at a shape that nobody has tried. Kernels say so before anything has run, so the
same call can be made again. Too little memory is the step's to deal with, and a device that is lost, after which every
call fails, ends the process: its launcher starts the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from alignedserve.errors import AlignedServeError, DeviceLost
from alignedserve.kernels.common.reference import Reference

log = logging.getLogger("alignedserve.kernels")

_NOT_ITS_FAULT = (AlignedServeError, MemoryError, torch.OutOfMemoryError)


def in_a_line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def loss(device: torch.device, synchronize: Callable[[torch.device], object] = torch.cuda.synchronize) -> str | None:
    """Why nothing can be computed on the device any more, or None where it still computes."""
    if device.type != "cuda" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        synchronize(device)
    except Exception as error:  # of the driver, of torch: whatever it is, the next would be the same
        return in_a_line(error)
    return None


@contextmanager
def noticing_loss(device: torch.device) -> Iterator[None]:
    """An error within is DeviceLost where it is the device that has failed."""
    try:
        yield
    except AlignedServeError:
        raise
    except Exception as error:
        if why := loss(device):
            raise _lost(device, why) from error
        raise


def fault_of_kernel(error: Exception, device: torch.device) -> str:
    """In a line, for the log; what is no fault of the kernel is raised."""
    if isinstance(error, _NOT_ITS_FAULT) or "out of memory" in str(error).lower():
        raise error
    if why := loss(device):
        raise _lost(device, why) from error
    return in_a_line(error)


def _lost(device: torch.device, why: str) -> DeviceLost:
    return DeviceLost(f"{device} computes nothing any more ({why}): this process ends, and is started anew")


def guard(kernels: Reference, names: Iterable[str], device: torch.device) -> None:
    """In place: each of these kernels is replaced by the reference when it first fails."""
    for name in names:
        setattr(kernels, name, _Guarded(kernels, name, device))


def is_replaced(kernels: Reference, name: str) -> bool:
    """Whether the reference has taken the place of this kernel, at the start or since."""
    own = vars(kernels).get(name)
    return own is not None and not isinstance(own, _Guarded)


class _Guarded:
    def __init__(self, kernels: Reference, name: str, device: torch.device) -> None:
        self._of, self._name, self._device = kernels, name, device
        self._run: Callable[..., Any] = getattr(kernels, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._run(*args, **named)
        except (TypeError, ValueError):  # what was asked for cannot be
            raise
        except Exception as error:
            why = fault_of_kernel(error, self._device)
        log.warning("%s: %s has failed (%s): %s takes its place", self._of.name, self._name, why, Reference.name)
        instead = getattr(Reference(), self._name)
        setattr(self._of, self._name, instead)
        return instead(*args, **named)
