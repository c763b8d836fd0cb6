"""Tests that turns beside a step are few, and that they have no limit while no step runs."""

from __future__ import annotations

import threading
import time

from alignedserve.engine.device.pace import CopyPace

DEADLINE_S = 60.0


class Turns:
    """A thread that takes turns: the test sees each turn begin, and lets it end."""

    def __init__(self, pace: CopyPace, most: int = 1000) -> None:
        self._pace, self._most = pace, most
        self.begun, self._ended = threading.Semaphore(0), threading.Semaphore(0)
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for _ in range(self._most):
            with self._pace.turn():
                self.count += 1
                self.begun.release()
                self._ended.acquire()

    def let_end(self) -> None:
        self._ended.release()

    def await_begun(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE_S)


def test_while_no_step_runs_turns_follow_and_meet_each_other() -> None:
    pace = CopyPace(share=1e-9)
    first, second = Turns(pace), Turns(pace)
    for turns in (first, second):
        turns.await_begun()
    for _ in range(3):
        first.let_end()
        first.await_begun()
    assert (first.count, second.count) == (4, 1)


def test_in_a_step_the_next_turn_waits_for_its_share_of_time_or_for_the_end_of_the_step() -> None:
    pace = CopyPace(share=1e-9)
    with pace.step():
        turns = Turns(pace)
        turns.await_begun()
        turns.let_end()
        assert not turns.begun.acquire(timeout=0.05), "a turn of a microsecond is to be followed by many minutes"
    turns.await_begun()
    turns.let_end()
    turns.await_begun()
    assert turns.count == 3


def test_after_a_rest_time_for_a_turn_is_saved_first() -> None:
    pace = CopyPace(share=1e-9)
    with pace.turn():
        sum(range(1000))
    with pace.step():
        turns = Turns(pace)
        assert not turns.begun.acquire(timeout=0.05)
    turns.await_begun()


def test_in_a_step_there_is_one_turn_at_a_time() -> None:
    pace = CopyPace(share=1.0)
    with pace.step():
        first = Turns(pace, most=1)
        first.await_begun()
        second = Turns(pace, most=1)
        assert not second.begun.acquire(timeout=0.05)
        first.let_end()
        second.await_begun()
        assert first.count == 1


def test_what_a_thread_computes_between_two_turns_counts() -> None:
    """Copies may take half of the time, so the thread computes as much for other requests before the next turn
    begins."""
    pace = CopyPace(share=0.5)
    with pace.step():
        with pace.turn():
            pass
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        with pace.turn():
            pass
        began, turns = time.process_time(), Turns(pace, most=1)
        while not turns.begun.acquire(blocking=False):
            assert time.process_time() - began < DEADLINE_S
        assert time.process_time() - began > 0.04
