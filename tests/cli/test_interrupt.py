"""Tests of Ctrl-C at any moment: the status is 130, and the command prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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
from alignedserve.simulator.machines.clock import Agenda
turn = Agenda.{method}
def interrupted(self, *rest):
    os.killpg(0, signal.SIGINT)
    return turn(self, *rest)
Agenda.{method} = interrupted
"""
PROCESSES_STARTED = """
from multiprocessing.pool import Pool
start = Pool.__init__
def interrupted(self, *rest, **more):
    start(self, *rest, **more)
    os.killpg(0, signal.SIGINT)
Pool.__init__ = interrupted
"""
FIRST_VERDICT = """
from multiprocessing.pool import Pool
imap = Pool.imap
def interrupted(self, *rest, **more):
    for one in imap(self, *rest, **more):
        os.killpg(0, signal.SIGINT)
        yield one
Pool.imap = interrupted
"""
THEN_RUN = """
sys.argv[1:] = {argv!r}
import runpy
runpy.run_module("alignedserve", run_name="__main__", alter_sys=True)
"""


def _interrupted(moment: str, line: str, folder: Path) -> tuple[int, str, str]:
    code = f"import os, signal, sys\n{moment}{THEN_RUN.format(argv=line.split())}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("alignedserve.cli.terminal.interrupt", "simulate"),
        ("alignedserve.cli.main", "simulate"),
        ("alignedserve.config.config", "fuzz"),
        ("alignedserve.cli.simulate", "simulate --out new"),
        ("alignedserve.simulator.machines.world", "simulate --out new"),
        ("alignedserve.simulator.fuzzing.shrink", "fuzz --jobs 2"),
    ],
)
def test_while_modules_are_imported(module: str, line: str, tmp_path: Path) -> None:
    assert _interrupted(IMPORTING.format(module=module), line, tmp_path) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["simulate --out new/folder", "simulate --seeds 1,2", "fuzz", "fuzz --seed 3"])
def test_in_the_midst_of_a_run(line: str, tmp_path: Path) -> None:
    assert _interrupted(STEPPING.format(method="at"), line, tmp_path) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", [PROCESSES_STARTED, FIRST_VERDICT], ids=["they import", "they run"])
def test_processes_of_the_fuzzer_say_nothing_either(moment: str, tmp_path: Path) -> None:
    assert _interrupted(moment, "fuzz --until-failure --jobs 2", tmp_path) == (130, "", "")
