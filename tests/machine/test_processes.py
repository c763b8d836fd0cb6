"""Tests of the processes that share a command's work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest

from alignedserve.errors import ProcessLost
from alignedserve.lab.processes import processes

ROOT = Path(__file__).resolve().parents[2]


def tenth(number: int) -> float:
    return number / 10


def inverse(number: int) -> float:
    return 1 / number


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def large(_: int) -> bytes:
    return bytes(1_000_000)


def test_results_come_in_the_order_of_items_that_have_no_end() -> None:
    with processes(2) as started:
        assert list(islice(started.in_order(tenth, count()), 50)) == [number / 10 for number in range(50)]


def test_processes_compute_for_call_after_call() -> None:
    with processes(2) as started:
        assert set(started.as_done(tenth, range(5))) == {0, 0.1, 0.2, 0.3, 0.4}
        assert list(started.in_order(inverse, [4, 2])) == [0.25, 0.5]


def test_where_one_is_enough_this_process_does_the_work() -> None:
    with processes(1) as started:
        assert list(started.as_done(lambda _: os.getpid(), range(2))) == 2 * [os.getpid()]
        assert list(islice(started.in_order(tenth, count()), 3)) == [0, 0.1, 0.2]


def compute_threads(_: int) -> str | None:
    return os.environ.get("OPENBLAS_NUM_THREADS")


@pytest.mark.parametrize("most", [1, 2])
def test_each_process_computes_in_one_thread(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that does the work itself may load numpy only then."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with processes(most) as started:
        assert list(started.as_done(compute_threads, range(2))) == ["1", "1"]
    assert compute_threads(0) is None


def test_the_caller_still_hears_of_ctrl_c() -> None:
    with processes(2) as started:
        assert list(started.as_done(tenth, [1])) == [0.1]
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_error_says_where_in_the_process_it_was_raised() -> None:
    with processes(2) as started, pytest.raises(ZeroDivisionError) as raised:
        list(started.as_done(inverse, [0]))
    assert "in inverse" in str(raised.value.__cause__)


def test_a_process_that_is_killed_is_told_of() -> None:
    with processes(2) as started, pytest.raises(ProcessLost, match="fewer jobs"):
        list(started.as_done(killed, range(4)))


def test_the_block_ends_while_processes_write_results_that_nobody_reads() -> None:
    with processes(2) as started:
        next(started.as_done(large, count()))


def test_the_end_of_a_block_ends_no_process_of_another() -> None:
    with processes(2) as outer:
        results = outer.as_done(tenth, [1, 2, 3])
        first = next(results)
        with processes(2) as inner:
            assert sorted(inner.as_done(tenth, [4])) == [0.4]
        assert sorted([first, *results]) == [0.1, 0.2, 0.3]


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def odd(_: int) -> None:
    raise TwoArguments("a", "b")


def test_an_error_that_cannot_be_read_is_not_taken_for_lack_of_memory() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"), processes(2) as shared:
        [*shared.as_done(odd, [1])]


def test_no_process_outlives_a_command_that_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from alignedserve.lab.processes import processes\n"
        "from tests.machine.test_processes import tenth\n"
        "with processes(2) as started:\n"
        "    for _ in started.in_order(tenth, range(9)):\n"
        "        pass\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    # The pipe of its output closes when the last process has ended.
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
