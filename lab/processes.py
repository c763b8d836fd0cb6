"""Processes that share a piece of work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread
from types import ModuleType
from typing import TypeVar

from alignedserve.errors import ProcessLost
from alignedserve.machine.one_thread import one_compute_thread
from alignedserve.machine.resources import usable_cores

T = TypeVar("T")
R = TypeVar("R")


def one_for_each_core() -> int:
    return max(1, round(usable_cores()))


class Processes:
    """Processes that start when there is work for them. Where there may be one alone, this process does the work."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ProcessPoolExecutor(most, _Context(), _end_with_parent) if most > 1 else None

    def as_done(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield the function's results as they come."""
        return (result for _, result in self._results(function, items))

    def in_order(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield the function's results in the order of the items, which may have no end."""
        early: dict[int, R] = {}
        wanted = 0
        for number, result in self._results(function, items):
            early[number] = result
            while wanted in early:
                yield early.pop(wanted)
                wanted += 1

    def end(self) -> None:
        if self._pool is None:
            return
        for process in [*(self._pool._processes or {}).values()]:  # Python 3.14 has `kill_workers`
            process.kill()  # it holds nothing that others need
        self._pool.shutdown(cancel_futures=True)

    def _results(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        """Yield each result with the number of its item."""
        numbered, begun = enumerate(items), dict[Future[R], int]()
        if self._pool is None:
            yield from ((number, function(item)) for number, item in numbered)
            return
        try:
            while True:
                for number, item in islice(numbered, self._most - len(begun)):
                    begun[self._pool.submit(function, item)] = number
                if not begun:
                    return
                for done in wait(begun, return_when=FIRST_COMPLETED).done:
                    yield begun.pop(done), done.result()
        except BrokenProcessPool as broken:
            if broken.__cause__ is not None:  # an error that cannot be read here: the cause tells of it
                raise
            why = "a process that shared the work was killed, perhaps since memory ran out: try fewer jobs"
            raise ProcessLost(why) from None


@contextmanager
def processes(most: int | None = None) -> Iterator[Processes]:
    """Give at most `most` processes, or one for each core, and end them with the block, whatever they compute then.

    Each computes in one thread: a second one would only take a core from another process.
    """
    with one_compute_thread():
        started = Processes(most or one_for_each_core())
        try:
            yield started
        finally:
            started.end()


class _Process(SpawnProcess):
    """Ignores Ctrl-C, and does not run the caller's script again.

    A terminal sends Ctrl-C to all processes, and the caller's ends the others. A new process runs the file of
    `__main__`, so that it knows what is defined there: a script that has no guard against that would start its work
    again. What is computed here is defined in modules.
    """

    def start(self) -> None:
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        script = sys.modules["__main__"]
        try:
            sys.modules["__main__"] = ModuleType("__main__")
            super().start()
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)


class _Context(SpawnContext):
    Process = _Process


def _end_with_parent() -> None:
    """End this process as soon as the command is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, name="parent-watch", daemon=True).start()
