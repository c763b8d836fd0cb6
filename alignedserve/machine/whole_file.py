"""Write a file beside its name and rename it: a reader finds all of it, or what was there before.

Processes that would all make the same file take turns: the first makes it, and the others find it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from alignedserve.locks import LockHeld, NotPrivate, locked

log = logging.getLogger("alignedserve.machine")

TURN_S = 1800.0  # to read a large model, or to measure it, takes minutes


@contextmanager
def whole_file(path: Path, is_private: bool = False) -> Iterator[IO[bytes]]:
    """Yield the open file and rename it at the end; raise OSError where that fails. Nobody else may open a private one.

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
            if is_private:
                os.fchmod(file.fileno(), 0o600)
            elif path.exists():
                shutil.copymode(path, beside)
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(directory: Path, waits: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Let one process of this machine work on the folder's files at a time, and make the folder. `waits` is called
    again and again while another one does.

    Yield False, without waiting, where the folder cannot be written, or after `TURN_S` in vain. The lock ends with its
    process, however that ends.
    """
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(directory / ".lock", TURN_S, TURN_S / 30, waits))
            is_alone = True
        except OSError:
            is_alone = False
        except (NotPrivate, LockHeld) as error:
            log.warning("no turns are taken at %s: %s", directory, error)
            is_alone = False
        yield is_alone
