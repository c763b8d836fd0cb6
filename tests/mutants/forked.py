"""Run work in a child process that may hang, crash or burn time, and end all that it has started."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

IDLE_S = 25.0  # a child that has not wanted to compute for so long, all in all, waits for ever
_LOOK_S = 0.5
_SUBREAPER, _DIES_WITH_PARENT = 36, 1  # of prctl: orphans below become children of this process; a signal for a child
_TICKS = os.sysconf("SC_CLK_TCK")


class TakesTooLong(Exception):
    pass


class Crashed(Exception):
    pass


def forked(work: Callable[[], Any], cpu_s: float, idle_s: float = IDLE_S) -> Any:
    """Return what work returns in a child process, as JSON brings it here.

    The limit is processor time, so that a busy machine makes no mutant look slow. Its output is dropped.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    others = _children()  # such as the deployments of other tests
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _work(work, writes)
    os.close(writes)
    try:
        answer = _read(reads, child, cpu_s, idle_s)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(reads)
        _end_children(others)
    if status == -signal.SIGPROF:
        raise TakesTooLong
    if status or not answer:
        raise Crashed(answer.decode())
    return json.loads(answer)


def limit(cpu_s: float) -> None:
    """End this process when it has computed for so long from now on."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _work(work: Callable[[], Any], writes: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    status = 1
    try:
        answer = json.dumps(work()).encode()
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(answer)
        status = 0
    except BaseException:
        os.write(writes, traceback.format_exc().encode())
        raise
    finally:
        os._exit(status)  # nothing of what the parent prepared is torn down here


def _read(reads: int, child: int, cpu_s: float, idle_s: float) -> bytes:
    answer, waited_s = b"", 0.0
    while True:
        if select.select([reads], [], [], _LOOK_S)[0]:
            if not (piece := os.read(reads, 1 << 20)):
                return answer
            answer += piece
            continue
        states, used_s = _states_and_cpu_s(child)
        if states.startswith("Z"):  # it has ended, and what it has started keeps the pipe open
            return answer
        if "R" not in states:  # on a busy machine one that wants to compute runs, by its state, all the same
            waited_s += _LOOK_S
        if used_s > cpu_s or waited_s > idle_s:
            raise TakesTooLong


def _states_and_cpu_s(session: int) -> tuple[str, float]:
    """Return the states of a session's processes, its first's in front, and the processor time that they had."""
    states, cpu_s = "", 0.0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session, *fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(its_session) == session:
                states = state + states if file.parts[2] == str(session) else states + state
                cpu_s += sum(map(int, fields[7:11])) / _TICKS
    return states, cpu_s


def _end_children(others: set[int]) -> None:
    """End the child and all orphans of what it started, in whatever session they are; those of others go on."""
    while children := _children() - others:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8")
    return {int(child) for child in listed.split()}
