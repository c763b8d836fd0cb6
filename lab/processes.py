"""Processes that share a piece of work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from traceback import format_exc
from types import MappingProxyType, ModuleType
from typing import TypeVar, cast

from alignedserve.errors import ProcessLost
from alignedserve.machine.resources import usable_cores

# What numpy and torch read when they are loaded.
ONE_THREAD: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Let numpy compute in one thread if this block loads it, and so in all processes that the block starts."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ |= ONE_THREAD
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


T = TypeVar("T")
R = TypeVar("R")

_SPAWN = get_context("spawn")


def one_for_each_core() -> int:
    return max(1, round(usable_cores()))


class Processes:
    """Processes at the ends of pipes: they share no queue and no lock, so one that is killed holds up nobody.

    They ignore Ctrl-C: a terminal sends it to all of them, and this process ends the others. A process whose parent
    is gone ends when it has computed what it was given. Where there may be one alone, this process does the work.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._started: list[SpawnProcess] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}  # with the number of its item

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
        for process in self._started:
            process.kill()  # it holds nothing that others need
        for process in self._started:
            process.join()

    def _results(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        """Yield each result with the number of its item."""
        if self._most == 1:
            yield from ((number, function(item)) for number, item in enumerate(items))
            return
        assert not self._busy, "the results of the last call are all taken"
        left = enumerate(items)
        self._hand_out(function, left)
        while self._busy:
            for pipe in cast(list[Connection], wait(list(self._busy))):
                with _telling_of_losses():
                    result, error, traceback = pipe.recv()
                number = self._busy.pop(pipe)
                self._idle.append(pipe)
                self._hand_out(function, left)
                if error is not None:
                    raise error from _InTheProcess(traceback)
                yield number, result

    def _hand_out(self, function: Callable[[T], R], left: Iterator[tuple[int, T]]) -> None:
        while self._idle or len(self._started) < self._most:
            if (numbered := next(left, None)) is None:
                return
            number, item = numbered
            pipe = self._idle.pop() if self._idle else self._start()
            with _telling_of_losses():
                pipe.send((function, item))
            self._busy[pipe] = number

    def _start(self) -> Connection:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_compute, args=(theirs,), daemon=True)
        with _inherited():
            process.start()
            self._started.append(process)
        theirs.close()  # the pipe ends with the process
        return ours


@contextmanager
def processes(most: int | None = None) -> Iterator[Processes]:
    """Give at most `most` processes, or one for each core, which start when there is work for them, and end them with
    the block.

    Each computes in one thread: a second one would only take a core from another process.
    """
    most = most or one_for_each_core()
    if most > 1:
        resource_tracker.ensure_running()  # it would let Ctrl-C through again where a process starts it
    started = Processes(most)
    try:
        with one_compute_thread():
            yield started
    finally:
        started.end()


@contextmanager
def _inherited() -> Iterator[None]:
    """Let a process that starts here ignore Ctrl-C, and not run the caller's script again.

    A new process runs the file of `__main__`, so that it knows what is defined there: a script that has no guard
    against that would start its work again. What is computed here is defined in modules.
    """
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    script = sys.modules["__main__"]
    try:
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = script
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


@contextmanager
def _telling_of_losses() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        why = "a process that shared the work was killed, perhaps since memory ran out: try fewer jobs"
        raise ProcessLost(why) from None


# --- In each process


def _compute(pipe: Connection) -> None:
    """Compute what comes, until the command is gone."""
    with suppress(EOFError, ConnectionError):
        while True:
            function, item = pipe.recv()
            try:
                answer = function(item), None, ""
            except Exception as error:
                answer = None, error, format_exc()
            pipe.send(answer)


class _InTheProcess(Exception):
    """Shows where in the process the error was raised."""
