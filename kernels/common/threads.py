"""The threads that torch and the kernels share; docs/how/kernels.md explains the consequences."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def openmp_libraries() -> set[str]:
    """Return the names of this process's OpenMP libraries; several mean several pools of spinning threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return set()
    mapped = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    return {name for name in mapped if name.startswith(("libgomp", "libiomp", "libomp"))}


def compute_alone() -> None:
    """Let torch and the kernels run in this thread alone whatever it calls: work beside a step must not take the step's
    cores.

    Helpers of this thread would cost steps more than the cores: once a process has more OpenMP threads than cores,
    libgomp spins a tenth as long where threads wait for each other, so they sleep, and every loop of a step wakes them.
    """
    torch.get_num_threads()  # torch sets the number at a thread's first use: later it would undo ours
    for name in openmp_libraries():
        ctypes.CDLL(name).omp_set_num_threads(1)  # for the calling thread; the library is loaded already
