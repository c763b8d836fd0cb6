"""The threads that torch and the kernels share. docs/how/kernels.md says what follows from that."""

from __future__ import annotations

import ctypes
from pathlib import Path


def openmp_libraries() -> set[str]:
    """Names of the OpenMP libraries in this process; more than one means more than one pool of spinning threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return set()
    mapped = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    return {name for name in mapped if name.startswith(("libgomp", "libiomp", "libomp"))}


def compute_alone() -> None:
    """Kernels that this thread calls run in it alone: what goes on beside a step is not to take the step's cores."""
    for name in openmp_libraries():
        ctypes.CDLL(name).omp_set_num_threads(1)  # of the calling thread; it is loaded already, so this loads nothing
