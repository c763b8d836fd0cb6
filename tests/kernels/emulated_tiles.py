"""The library with AMX's tiles in plain C++, which CPUs without AMX run (emulated_tiles.h): right, and slow."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from alignedserve.kernels import build

BEST_BELOW = "avx512bf16"  # the set whose instructions the code for AMX has too


def with_emulated_tiles(folder: Path) -> Path:
    """Compile the library into a folder, which takes a minute, and return its path."""
    made = folder / build.LIBRARY.name
    compiler = " ".join(build.find_compiler())
    emulating = f"{compiler} -DEMULATED_TILES -include {Path(__file__).with_suffix('.h')}"
    sets = {isa: build.X86[isa] for isa in ("generic", BEST_BELOW, "amx")}
    with patch.dict(os.environ, CXX=emulating), patch.object(build, "X86", sets):
        build.build(made)
    return made
