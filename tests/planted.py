"""Faults that tests and benchmarks plant into a deployment from outside: poison, hangs, and logs that are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# A request of such a temperature ends its worker, or holds it up, at this place of a step; or a core fails that hears
# of it.
TEMPERATURES = {"prompt": 0.661, "decode": 0.662, "sampling": 0.663, "end": 0.664, "hang": 0.665}
CORES = {"router": 0.666, "worker": 0.667, "owner": 0.668}
TEMPERATURES |= CORES
_MOST_TOKENS = 12
HUNG_S = 5.0  # the limit of a step of a planted launcher, where it is not known what steps take
_SPOIL = """
import os, signal, time

SIXTH, LAST, DEATHS = 5, {last}, {deaths!r}


def die(how):
    with open(DEATHS, "a") as file:
        file.write(f"{{how}}\\n")
    while how == {hang}:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(engine):
    begin = engine.begin

    def begin_or_die(self, plan):
        parts = [part for part in (*plan.chunks, *plan.decodes) if part.sampling is not None]
        for part in parts:
            how = part.sampling.temperature
            is_decode = part in plan.decodes and part.index >= SIXTH
            if how == {prompt} or (how in ({decode}, {hang}) and is_decode):
                die(how)
        begun = begin(self, plan)
        for part in parts:
            how = part.sampling.temperature
            if (how == {sampling} and part.index >= SIXTH) or (how == {end} and part.index == LAST):
                die(how)
        return begun

    engine.begin = begin_or_die
"""
_LOADED = f"""
from alignedserve.engine.engine import Engine
from alignedserve.executor import worker_process

spoil(Engine)
worker_process.UNKNOWN_S = {HUNG_S}

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.owner.core import OwnerCore
from alignedserve.router.state import RouterCore


def fail(core, temperature):
    handle = core.handle

    def handle_or_fail(self, event, now):
        said = getattr(event, "message", event)
        said = getattr(said, "entry", said)
        declared = getattr(said, "requests", ())
        for request in (getattr(said, "request", None), *(declared if isinstance(declared, tuple) else ())):
            if getattr(getattr(request, "sampling", None), "temperature", None) == temperature:
                with open(DEATHS, "a") as file:
                    file.write(core.__name__ + chr(10))
                raise ZeroDivisionError("planted")
        return handle(self, event, now)

    core.handle = handle_or_fail


for core, temperature in zip((RouterCore, DecodeCore, OwnerCore), {tuple(CORES.values())}):
    fail(core, temperature)
"""
_WHEN_LOADED = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "alignedserve.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            spoil(module.Engine)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


class Poison:
    """Makes workers fall for the requests of `poisonous`: by `plant`, which a launcher that has loaded everything runs,
    or by a folder before all others on the path of Python."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._deaths = folder, folder / "deaths"  # a line for each
        self._spoil = _SPOIL.format(deaths=str(self._deaths), last=_MOST_TOKENS - 1, **TEMPERATURES)

    @property
    def plant(self) -> str:
        return self._spoil + _LOADED

    @property
    def environment(self) -> dict[str, str]:
        (self._folder / "sitecustomize.py").write_text(self._spoil + _WHEN_LOADED)
        path = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path)}

    @property
    def num_deaths(self) -> int:
        return len(self._deaths.read_text().splitlines()) if self._deaths.exists() else 0


def poisonous(model: str, how: str) -> dict[str, Any]:
    """Return the body of a chat that ends its worker at this place."""
    asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": _MOST_TOKENS}
    return {**asked, "temperature": TEMPERATURES[how], "ignore_eos": True}


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
