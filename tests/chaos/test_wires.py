"""Tests of wires that spoil what they carry: links of a process notice it, and its other reads are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.absent import Absent
from tests.chaos.wires import Wires

_READ = """
import socket, sys, time

if sys.argv[1] == "TCP":
    server = socket.create_server(("127.0.0.1", 0))
else:
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    server.listen()
ours = socket.socket(server.family)
ours.connect(server.getsockname())
theirs, _ = server.accept()
for _ in sys.stdin:
    began, flipped = time.monotonic(), 0
    try:
        theirs.sendall(bytes(100))
        flipped = sum(byte.bit_count() for byte in ours.recv(100))
    except ConnectionResetError:
        flipped = -1
    print(flipped, time.monotonic() - began, flush=True)
"""


class Reader:
    """A process that sends itself 100 zeros for each line, and says how many bits came as ones, and after how long."""

    def __init__(self, folder: Path, where: str) -> None:
        try:
            self.wires = Wires(folder)
        except Absent as why:
            pytest.skip(str(why))
        command, env, pipe = (
            [sys.executable, "-c", _READ, where if where == "TCP" else str(folder / where)],
            os.environ | dict(self.wires.environment),
            subprocess.PIPE,
        )
        self.process = subprocess.Popen(command, text=True, env=env, stdin=pipe, stdout=pipe)

    def read(self) -> tuple[int, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        flipped, took_s = self.process.stdout.readline().split()
        return int(flipped), float(took_s)


LINKS, OTHERS = ("TCP", "alignedserve-x.sock"), ("redis", "alignedserve-x-ranks.sock")


@pytest.fixture(params=[*LINKS, *OTHERS])
def reader(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(tmp_path, request.param)
    yield made
    made.process.communicate()


def test_a_link_s_reads_are_hurt_as_told_and_no_others(reader: Reader, request: pytest.FixtureRequest) -> None:
    is_link, pid = request.node.callspec.params["reader"] in LINKS, reader.process.pid
    assert reader.read()[0] == 0
    with reader.wires.bad(pid, flips=2):
        assert [reader.read()[0] for _ in range(3)] == ([1, 1, 0] if is_link else [0] * 3)
    with reader.wires.bad(pid + 1, flips=2):
        assert reader.read()[0] == 0
    with reader.wires.bad(pid, delay_s=0.2):
        assert (reader.read()[1] > 0.2) == is_link
    with reader.wires.bad(pid, breaks=1):
        assert reader.read()[0] == (-1 if is_link else 0)
    assert reader.wires.num_hurt == (3 if is_link else 0)
