"""Registers the arena's mapping with CUDA: copies between pinned memory and a GPU need no stop in between."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from alignedserve.engine.device.devices import forget_error, use
from alignedserve.fallbacks import fell_back, works
from alignedserve.kvpool.arena.arena import POPULATE_WRITE, Arena

log = logging.getLogger("alignedserve.engine")

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process
_MIB = 1 << 20
PIECE_BYTES = 256 << 20  # the driver is held for about 15 ms
_MAPPED_AT_ONCE = 16 << 20
_WHAT = "pinned memory"  # falls back to memory that is not


class Cudart(Protocol):
    """The part of `torch.cuda.cudart()` that pins memory; each call returns a cudaError, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


def cudart_for(device: torch.device) -> Cudart | None:
    """Return the CUDA runtime, or None for a device that copies from any memory."""
    return torch.cuda.cudart() if device.type == "cuda" else None


class Pinner:
    """Pins an arena in a thread of its own, piece by piece, while the worker serves.

    A copy to or from a piece that is not pinned yet, or never will be, goes through CUDA's own memory: it takes longer.
    CUDA refuses a copy that lies in two pieces, so no page does. The system maps a piece before it is registered, since
    that takes most of the time and the driver, which begins no step while it registers, is then busy for milliseconds.
    """

    def __init__(self, arena: Arena, cudart: Cudart, device: torch.device) -> None:
        self._cudart, self._device = cudart, device
        self._pieces = arena.pieces(PIECE_BYTES)
        with arena.memory() as memory:
            self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._pinned: list[int] = []  # addresses
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pinning", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the thread has ended."""
        self._thread.join()

    def stop(self) -> None:
        """Pin no further piece, and end the thread."""
        self._is_stopped.set()
        self.wait()

    def unpin(self) -> None:
        """Pin no further piece, and unpin all; this must be called before the arena is closed."""
        self.stop()
        for address in self._pinned:
            if error := int(self._cudart.cudaHostUnregister(address)):
                forget_error(self._device)
                log.warning("the KV pool's memory could not be unpinned: cudaHostUnregister says %d", error)
        self._pinned.clear()

    def _run(self) -> None:
        use(self._device)
        began, num_bytes = perf_counter(), 0
        for start, size in self._pieces:
            _map(self._address + start, size, self._is_stopped)
            if self._is_stopped.is_set():
                return
            if error := int(self._cudart.cudaHostRegister(self._address + start, size, _PORTABLE)):
                forget_error(self._device)
                whole = sum(size for _, size in self._pieces)
                why = f"cudaHostRegister says {error} after {num_bytes // _MIB} of the KV pool's {whole // _MIB} MiB"
                fell_back(
                    _WHAT, f"{why}: raise the limit of locked memory (ulimit -l)", "copies to the rest are slower"
                )
                return
            self._pinned.append(self._address + start)
            num_bytes += size
        works(_WHAT)
        log.info("the KV pool's %d MiB are pinned, in %.1f s", num_bytes // _MIB, perf_counter() - began)


def pin(arena: Arena, cudart: Cudart, device: torch.device) -> Callable[[], None]:
    """Pin the arena at once; return the function that unpins it, which must be called before the arena is closed."""
    pinner = Pinner(arena, cudart, device)
    pinner.wait()
    return pinner.unpin


def _map(address: int, size: int, is_stopped: threading.Event) -> None:
    """Have the system map memory, where it can; no other thread waits for that, as ctypes gives up Python's lock."""
    libc = ctypes.CDLL(None)
    for start in range(address, address + size, _MAPPED_AT_ONCE):
        if is_stopped.is_set():
            return
        count = min(_MAPPED_AT_ONCE, address + size - start)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(count), POPULATE_WRITE):
            return  # registering maps it too
