"""Write a file beside its name and rename it: a reader finds all of it, or what was there before.

Processes that would all make the same file take turns: the first makes it, and the others find it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield the open file and rename it at the end; raise OSError where that fails.

    A write that fails leaves nothing, a process that is killed leaves a file that ends in .part. A path that is no
    regular file, such as /dev/stdout, is written directly.
    """
    path = path.resolve()  # a link stays a link
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


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[bool]:
    """Let one process of this machine work on the folder's files at a time, and make the folder.

    Yield False, without waiting, where the folder cannot be written. The lock ends with its process, however that ends.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        yield False
        return
    with lock:
        yield True
