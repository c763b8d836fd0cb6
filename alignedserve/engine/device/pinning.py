"""Registers the arena's mapping with CUDA: copies between pinned memory and a GPU need no stop in between.

Not yet run on a GPU (docs/how/gpu.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from alignedserve.engine.device.devices import forget_error
from alignedserve.kvpool.arena.arena import Arena

log = logging.getLogger("alignedserve.engine")

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process
_MIB = 1 << 20


class Cudart(Protocol):
    """The part of `torch.cuda.cudart()` that pins memory; each call returns a cudaError, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


def cudart_for(device: torch.device) -> Cudart | None:
    """Return the CUDA runtime, or None for a device that copies from any memory."""
    return torch.cuda.cudart() if device.type == "cuda" else None


def pin(arena: Arena, cudart: Cudart, device: torch.device) -> Callable[[], None]:
    """Register the whole mapping; return the function that unpins it, which must be called before the arena is closed.

    If CUDA refuses, copies go through CUDA's own memory and are slower.
    """
    with arena.memory() as memory:
        address, size = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)
    error = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if error:
        forget_error(device)
        log.warning(
            "the KV pool's %d MiB are not pinned (cudaHostRegister says %d), and copies are slower:"
            " raise the limit of locked memory (ulimit -l)",
            *(size // _MIB, error),
        )
        return lambda: None

    def unpin() -> None:
        if error := int(cudart.cudaHostUnregister(address)):
            forget_error(device)
            log.warning("the KV pool's memory could not be unpinned: cudaHostUnregister says %d", error)

    return unpin
