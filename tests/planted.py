"""Faults that tests plant into a deployment from outside: hangs, and logs that are lost. tests/poison has poison."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

HUNG_S = 5.0  # the limit of a step of a planted launcher, where it is not known what steps take

# Where a part can hang: in a turn of its core, in a step, in a copy, in a use of the store, or in its event loop; and
# how: it sleeps, computes in Python, or keeps Python's lock in code that is not Python.
PLACES = ("turn", "step", "copy", "store", "event loop")
WAYS = ("sleeps", "computes", "keeps the lock")
_HANG = """
import ctypes, os, signal, time

WANTED = {{}}  # place -> how a part that comes there hangs


def hang(place):
    how = WANTED.pop(place, None)
    try:
        os.rename(f"{folder}/{{os.getpid()}}", f"{folder}/{{os.getpid()}}.hangs")
    except FileNotFoundError:  # it is not wanted any more
        return
    while how == "computes":
        pass
    if how == "keeps the lock":
        ctypes.PyDLL(None).sleep(10 ** 6)
    while True:
        time.sleep(1.0)


def told(number, frame):
    with open(f"{folder}/{{os.getpid()}}") as file:
        place, how = file.read().split(", ")
    WANTED[place] = how
    if place == "event loop":
        hang(place)


def before(kind, name, place):
    inner = getattr(kind, name)

    def outer(self, *given):
        if place in WANTED:
            hang(place)
        return inner(self, *given)

    setattr(kind, name, outer)


from alignedserve.engine.engine import Engine
from alignedserve.executor import worker_process
from alignedserve.executor.copies import PoolCopies
from alignedserve.shell.turn import TurnLoop
from alignedserve.store.sqlite_store import SqliteStore

before(TurnLoop, "turn", "turn")
before(Engine, "begin", "step")
before(PoolCopies, "perform", "copy")
before(SqliteStore, "_execute", "store")
worker_process.LEAST_S = worker_process.UNKNOWN_S = {hung_s}
signal.signal(signal.SIGUSR1, told)
"""


class Hangs:
    """Makes parts hang that `plant` was put into, each when a test says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.plant = _HANG.format(folder=folder, hung_s=HUNG_S)

    def is_planted(self, pid: int) -> bool:
        """Return whether the process can be told to hang: not where it began without its fork server."""
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
            return bool(caught >> (signal.SIGUSR1 - 1) & 1)
        return False

    def tell(self, pid: int, place: str, how: str) -> None:
        """Have the process hang so as soon as it comes to this place."""
        (self._folder / str(pid)).write_text(f"{place}, {how}")
        os.kill(pid, signal.SIGUSR1)

    def hangs(self, pid: int) -> bool:
        return (self._folder / f"{pid}.hangs").exists()

    def take_back(self, pid: int) -> bool:
        """Return whether the process will not hang any more; else it hangs already."""
        try:
            (self._folder / str(pid)).unlink()
        except FileNotFoundError:
            return False
        return True


LOST_LOGS = ("its reader has gone", "its disk is full", "nobody reads it")


@contextmanager
def lost_log(how: str) -> Iterator[IO[bytes]]:
    """Yield a file that takes no log: as of `serve 2>&1 | head`, of a full disk, or of a `less` that was stopped."""
    if how == "its disk is full":
        with open("/dev/full", "wb", buffering=0) as full:
            yield full
        return
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as reader, os.fdopen(writes, "wb", buffering=0) as log:
        if how == "its reader has gone":
            reader.close()
        else:
            os.set_blocking(writes, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(writes, b"x" * 4_096)
            os.set_blocking(writes, True)
        yield log
