"""Tests of the watch over loops: who turns gives signs of life, and who stands still ends its process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from alignedserve.shell.clock import Clock, ClockOrigin
from alignedserve.shell.links import Links
from alignedserve.shell.loop_watch import LOOKS, LoopWatch
from alignedserve.shell.shell import Shell
from alignedserve.signs import ExitCode
from tests.shell.conftest import DEADLINE_S, Start
from tests.shell.test_shell import Bench

STILL_S = 0.3


class Watched:
    """A watch whose signs of life, and ends of its process, are noted in their order."""

    def __init__(self) -> None:
        self.noted: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: a sign
        self.watch = LoopWatch(STILL_S, lambda: self.noted.put(None))

    def next(self, number: int) -> list[int | None]:
        return [self.noted.get(timeout=DEADLINE_S) for _ in range(number)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched()
    monkeypatch.setattr("os._exit", watched.noted.put)
    monkeypatch.setattr("faulthandler.dump_traceback", lambda: None)
    yield watched
    watched.watch.end()


def test_a_turn_loop_that_has_nothing_to_do_turns_when_it_is_woken(watched: Watched, start: Start) -> None:
    links: Links = start("router")
    shell = Shell(Bench(links), links, Clock(ClockOrigin.read()))

    def run() -> None:
        with watched.watch.over("turn loop", shell.wake) as turns:
            shell.run(turns=turns)

    thread = threading.Thread(target=run)
    thread.start()
    assert watched.next(3 * LOOKS) == [None] * 3 * LOOKS
    shell.stop()
    thread.join()


def test_a_loop_that_stands_still_gives_no_signs_and_ends_its_process_though_another_turns(watched: Watched) -> None:
    with watched.watch.over("turn loop", lambda: None), watched.watch.over("event loop", lambda: turns()) as turns:
        noted = watched.next(3)
        assert ExitCode.BROKEN in noted
        assert noted.index(ExitCode.BROKEN) <= 1, "a sign for the turn before it stood still, and no other"


def test_a_loop_that_is_busy_with_work_that_has_a_limit_may_stand_still(watched: Watched) -> None:
    with watched.watch.over("turn loop", lambda: None, is_busy=lambda: True):
        assert watched.next(3 * LOOKS) == [None] * 3 * LOOKS


def test_a_process_without_loops_gives_signs_too(watched: Watched) -> None:
    watched.watch.begin()
    assert watched.next(LOOKS) == [None] * LOOKS
