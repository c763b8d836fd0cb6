"""What a machine lacks for a fault."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class Absent(Exception):
    """Says why this machine cannot do a fault; the trial goes on without it, and the table says so."""


def preloadable(source: Path, folder: Path, so_not: str) -> Path:
    """Return the library of a C file, compiled into the folder; `so_not` says what does not happen without a
    compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Absent(f"{so_not}: there is no C compiler")
    library = folder / f"{source.stem}.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
