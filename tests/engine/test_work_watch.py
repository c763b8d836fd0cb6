"""The watch over steps, by a clock that is handed in: what is late, what is too late, and what is neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from subprocess import PIPE

import pytest

from alignedserve.core import CopyCost, StepPlan
from alignedserve.executor.work_watch import LEAST_S, ON_GPU_S, UNKNOWN_S, WorkWatch
from alignedserve.signs import ExitCode

STEP = StepPlan(1)
LOOK_S = 0.5


class Watched:
    """A watch that looks each half second of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, watch: WorkWatch) -> None:
        self.now, self.watch, self.ended = time.monotonic(), watch, list[int]()
        monkeypatch.setattr("alignedserve.executor.work_watch.monotonic", lambda: self.now)
        monkeypatch.setattr("os._exit", self.ended.append)
        monkeypatch.setattr("signal.setitimer", lambda *_: None)
        self.watch.late_s()

    def passes(self, seconds: float, each_s: float = LOOK_S) -> float:
        """Return for how long the step is late at the end of this time."""
        late_s = 0.0
        for _ in range(round(seconds / each_s)):
            self.now += each_s
            late_s = self.watch.late_s()
        return late_s


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, WorkWatch())


def test_a_step_is_late_after_half_of_its_limit_and_ends_the_process_at_its_limit(watched: Watched) -> None:
    watched.watch.begins(STEP)
    assert watched.passes(LEAST_S / 2) == 0
    assert watched.passes(2 * LOOK_S) > LEAST_S / 2
    assert watched.ended == []
    watched.passes(LEAST_S / 2)
    assert watched.ended[0] == ExitCode.WORK_HUNG


def test_a_step_may_take_twenty_times_as_long_as_predicted(watched: Watched) -> None:
    watched.watch.begins(replace(STEP, predicted_s=2.0))
    assert watched.passes(20.0) == 0
    assert watched.passes(19.0) > 0
    assert watched.ended == []
    watched.passes(3.0)
    assert watched.ended


def test_steps_that_end_are_never_late_however_many_run(watched: Watched) -> None:
    for number in range(100):
        watched.watch.begins(StepPlan(number))
        watched.watch.begins(StepPlan(number + 1))  # the next one is begun while this one runs
        assert watched.passes(1.0) == 0
        watched.watch.ends(number + 1)  # in a pause of the first
        watched.watch.ends(number)


def test_no_plans_are_compared_where_another_thread_may_end_one(watched: Watched) -> None:
    """The thread of steps ends a step in its pause while another thread ends the step before."""

    class Plan(StepPlan):
        def __eq__(self, other: object) -> bool:
            watched.watch.ends(1)
            return self is other

        __hash__ = None

    for number in (1, 2):
        watched.watch.begins(Plan(number))
    watched.watch.ends(2)
    watched.watch.ends(1)
    assert not watched.watch.is_busy


def test_without_a_step_nothing_is_late(watched: Watched) -> None:
    assert watched.passes(10 * LEAST_S) == 0


def test_a_process_that_stood_still_is_not_late_for_that(watched: Watched) -> None:
    watched.watch.begins(STEP)
    watched.passes(2 * LOOK_S)
    assert watched.passes(1_000.0, each_s=1_000.0) == 0
    assert watched.ended == []


def test_the_first_step_may_take_longer_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, WorkWatch(first_s=UNKNOWN_S))
    watched.watch.begins(STEP)
    assert watched.passes(UNKNOWN_S / 2) == 0
    watched.watch.ends(STEP.number)
    watched.watch.begins(StepPlan(2))
    watched.passes(2 * LEAST_S)
    assert watched.ended


COPYING = CopyCost(token_s=0.001)


def test_a_copy_has_a_limit_of_its_own_and_the_step_behind_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, WorkWatch(copying=COPYING))
    watched.watch.begins(STEP)
    with watched.watch.between("a copy", tokens=5_000):  # 100 s
        assert watched.passes(49.0) == 0
        assert watched.passes(40.0) > 0
        assert watched.ended == []
    assert watched.passes(LEAST_S / 2) == 0
    with watched.watch.between("a copy", tokens=5):
        watched.passes(LEAST_S + 2 * LOOK_S)
    assert watched.ended[0] == ExitCode.WORK_HUNG


def test_a_copy_beside_steps_may_take_any_time_while_its_pieces_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, WorkWatch())
    for _ in range(20):
        with watched.watch.beside("a copy"):
            assert watched.passes(ON_GPU_S / 2) == 0
    assert not watched.watch.is_busy, "the core's loop does not wait for it"
    with watched.watch.beside("a copy"):
        watched.passes(ON_GPU_S + 2 * LOOK_S)
    assert watched.ended[0] == ExitCode.WORK_HUNG


WITH_A_STEP = """
import os, re, signal, sys, threading, time
from alignedserve.core import StepPlan
from alignedserve.executor import work_watch
from alignedserve.executor.work_watch import WorkWatch
watch = WorkWatch(still_s=0.2, first_s={limit_s})
watch.begins(StepPlan(1))
def look():
    while True:
        watch.late_s()
        time.sleep(0.05)
threading.Thread(target=look, daemon=True).start()
{then}
"""


def test_a_step_that_keeps_pythons_lock_ends_the_process() -> None:
    """A regular expression that never ends, since the module `re` keeps the lock."""
    code = WITH_A_STEP.format(limit_s=0.2, then='re.match("(a+)+$", "a" * 60 + "b")')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGPROF
    assert "in match" in done.stderr  # where it stood


FREEZES = """
work_watch._MOST_PASSED_S = 0.1  # so that a look that comes late on a busy machine does not count for seconds either
os.kill(os.getpid(), signal.SIGSTOP)
print("still here", flush=True)
"""


def test_a_process_that_was_frozen_goes_on() -> None:
    """It freezes itself, and so at once, however busy the machine is."""
    code = WITH_A_STEP.format(limit_s=3.0, then=FREEZES)
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, text=True) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        time.sleep(4.0)  # longer than a step may take
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "still here\n"
    assert process.returncode == 0
