"""Tests of a machine on which no process can begin: a deployment's processes fail to, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.absent import Absent
from tests.chaos.no_fork import ProcessRoom

_BEGIN = """
import errno, os, subprocess, sys, threading


def fork():
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)


ways = fork, lambda: subprocess.run(["true"]), lambda: subprocess.Popen(["true"], close_fds=False).wait()
ways += (lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0),)
for _ in sys.stdin:
    said = []
    for way in ways:
        try:
            way()
        except OSError as error:
            said.append(errno.errorcode[error.errno])
        else:
            said.append("began")
    thread = threading.Thread(target=said.append, args=("thread",))
    thread.start()
    thread.join()
    print(*said, flush=True)
"""


def test_no_process_begins_until_there_is_room_again(tmp_path: Path) -> None:
    try:
        room = ProcessRoom(tmp_path)
    except Absent as why:
        pytest.skip(str(why))
    environment, pipe = os.environ | dict(room.environment), subprocess.PIPE
    command = [sys.executable, "-c", _BEGIN]
    with subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def begin() -> list[str]:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().split()

        assert begin() == ["began"] * 4 + ["thread"]
        with room.full():
            assert begin() == ["EAGAIN"] * 4 + ["thread"]
            subprocess.run(["true"], check=True)  # other processes are not hurt
        assert begin() == ["began"] * 4 + ["thread"]
        process.stdin.close()
