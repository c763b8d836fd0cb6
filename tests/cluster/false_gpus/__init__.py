"""GPUs for tests of what is placed where: a driver's library that tells of them, and no GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from alignedserve.kernels.build import find_compiler

FOLDER = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"


def false_gpus(number: int, folder: Path, cuda: int = 13000) -> dict[str, str]:
    """Return the environment of a machine with so many false GPUs; the driver's library is built into the folder."""
    if not (library := folder / LIBRARY).exists():
        compiler = [*find_compiler(), "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(library)]
        subprocess.run([*compiler, str(FOLDER / "nvml.c")], check=True)
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": f"{folder}:{before}" if before else str(folder),
        "PYTHONPATH": str(FOLDER),
        "FALSE_GPUS": str(number),
        "FALSE_CUDA": str(cuda),
    }
