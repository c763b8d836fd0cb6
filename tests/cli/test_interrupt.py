"""Tests of Ctrl-C at any moment: the status is 130, and the command prints nothing; and of a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.interrupt import LeavesAtOnce
from alignedserve.signs import ExitCode
from tests.rare import rare, thinned

ROOT = Path(__file__).resolve().parents[2]
ENDED_S = 120.0  # on a busy machine

# Each program sends SIGINT, as a terminal does, to the command and to all that it has started, at the moment it waits
# for.
IMPORTING = """
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.killpg(0, signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
STEPPING = """
from alignedserve.lab.simulator.machines.clock import Agenda
turn = Agenda.{method}
def interrupted(self, *rest):
    os.killpg(0, signal.SIGINT)
    return turn(self, *rest)
Agenda.{method} = interrupted
"""
PROCESSES_STARTED = """
from multiprocessing.process import BaseProcess
start = BaseProcess.start
def interrupted(self):
    start(self)
    if len(multiprocessing.active_children()) == 2:
        os.killpg(0, signal.SIGINT)
BaseProcess.start = interrupted
"""
FIRST_VERDICT = """
from multiprocessing.connection import Connection
recv = Connection.recv
def interrupted(self):
    verdict = recv(self)
    {then}
    return verdict
Connection.recv = interrupted
"""
IN_A_FINALIZER = """
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            Finalized()
sys.meta_path.insert(0, Interrupt())
"""
INTERRUPT_ALL = "os.killpg(0, signal.SIGINT)"
KILL_A_PROCESS = "os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)"
THEN_RUN = """
sys.argv[1:] = {argv!r}
import runpy
runpy.run_module("alignedserve", run_name="__main__", alter_sys=True)
"""


def _interrupted(moment: str, line: str, folder: Path) -> tuple[int, str, str]:
    code = f"import multiprocessing, os, signal, sys\n{moment}{THEN_RUN.format(argv=line.split())}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=ENDED_S,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    thinned(
        [
            ("alignedserve.interrupt", "simulate"),
            ("alignedserve.cli.main", "simulate"),
            ("alignedserve.config.config", "fuzz"),
            ("alignedserve.lab.cli.simulate", "simulate --out new"),
            ("alignedserve.lab.simulator.machines.world", "simulate --out new"),
            ("alignedserve.lab.fuzzing.shrink", "fuzz --jobs 2"),
        ],
        usual=2,
    ),
)
def test_while_modules_are_imported(module: str, line: str, tmp_path: Path) -> None:
    assert _interrupted(IMPORTING.format(module=module), line, tmp_path) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("meaning", [signal.default_int_handler, signal.SIG_IGN, lambda *_: None])
def test_after_imports_ctrl_c_means_what_it_meant_before(meaning: Any) -> None:
    before = signal.signal(signal.SIGINT, meaning)
    try:
        with LeavesAtOnce():
            within = signal.getsignal(signal.SIGINT)
        assert (within is meaning) == (meaning is not signal.default_int_handler)
        assert signal.getsignal(signal.SIGINT) is meaning
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_launcher_hears_a_ctrl_c_that_python_drops(tmp_path: Path) -> None:
    """Python prints an exception in a finalizer, and goes on."""
    moment = IN_A_FINALIZER.format(module="alignedserve.launch.deployment")
    line = f"serve demo --port 0 --pool-directory {tmp_path} --pool-memory-mb 64 --jobs-directory {tmp_path}"
    status, _, err = _interrupted(moment, line, tmp_path)
    assert "Exception ignored in" in err
    assert (status, "it stops:" in err) == (ExitCode.STOPPED, True)


@pytest.mark.parametrize(
    "line", thinned(["simulate --out new/folder", "simulate --seeds 1,2 --jobs 1", "fuzz"], usual=1)
)
def test_in_the_midst_of_a_run(line: str, tmp_path: Path) -> None:
    assert _interrupted(STEPPING.format(method="at"), line, tmp_path) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@rare  # below are processes of simulations, and one of the fuzzer that is killed
@pytest.mark.parametrize(
    "moment",
    [PROCESSES_STARTED, FIRST_VERDICT.format(then=INTERRUPT_ALL)],
    ids=["they import", "they run"],
)
def test_processes_of_the_fuzzer_say_nothing_either(moment: str, tmp_path: Path) -> None:
    assert _interrupted(moment, "fuzz --until-failure --jobs 2", tmp_path) == (130, "", "")


def test_a_command_ends_when_one_of_its_processes_is_killed(tmp_path: Path) -> None:
    moment = FIRST_VERDICT.format(then=KILL_A_PROCESS)
    status, _, err = _interrupted(moment, "fuzz --until-failure --jobs 2", tmp_path)
    assert status == 2
    assert err.endswith("a process that shared the work was killed, perhaps since memory ran out: try fewer jobs\n")


def test_processes_of_simulations_say_nothing_either(tmp_path: Path) -> None:
    line = "simulate --seeds 1,2,3,4 --jobs 2 --out new"
    assert _interrupted(PROCESSES_STARTED, line, tmp_path) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_reproduction_says_what_is_lost(tmp_path: Path) -> None:
    status, shown, err = _interrupted(PROCESSES_STARTED, "reproduce alignedserve --figure 1 --jobs 2", tmp_path)
    assert (status, shown) == (130, "")
    first, last = err.splitlines()
    assert first == "reproduce: 36 simulated runs: about 2 min with 2 processes; estimated again as they end"
    assert last.startswith("alignedserve: interrupted after 0 of 36 runs, which are lost: --out FOLDER keeps them")
