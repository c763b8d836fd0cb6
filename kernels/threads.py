"""The threads that torch and the kernels share. docs/kernels.md says what follows from that."""

from __future__ import annotations

from pathlib import Path


def openmp_libraries() -> set[str]:
    """Names of the OpenMP libraries in this process; more than one means more than one pool of spinning threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return set()
    mapped = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    return {name for name in mapped if name.startswith(("libgomp", "libiomp", "libomp"))}
