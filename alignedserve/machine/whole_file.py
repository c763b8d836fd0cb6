"""A file that is written beside its name and renamed: who reads it finds all of it, or what was there before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Raises OSError. Where it is not written to its end nothing is left of it; of a process that is killed, a file
    with .part at its end. What is no file, such as /dev/stdout, is written to as it is."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            if path.exists():
                shutil.copymode(path, beside)
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
