"""Tests of what memory, stores and limits lose in trials: bits of pages, the end of a log, room for more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
import redis

from alignedserve.kvpool.arena.arena import Arena, Contents
from alignedserve.protocol.extents import PageKind
from tests.chaos.absent import Absent
from tests.chaos.load import run_batch
from tests.chaos.losses import flip_pages
from tests.chaos.memory_group import MemoryGroup
from tests.chaos.recording import Question, Seen
from tests.gateway.conftest import PATIENT_S
from tests.redis_server import RedisServer

PAGES, BYTES = 40, 256
WRITTEN = Contents(PageKind.KV, 4, 77)
_TAKE = """
import sys
for line in sys.stdin:
    print(len(b"x" * int(line)), flush=True)
"""


def test_a_bit_is_flipped_in_half_of_the_pages_that_hold_something(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"no arena")
    arena = Arena.create(tmp_path / "arena", pages=PAGES, payload_bytes=BYTES, page_size=4, incarnation=1)
    for page in range(0, PAGES, 2):
        arena.begin_write(page)
        arena.payload(page)[:] = bytes(BYTES)
        arena.end_write(page, WRITTEN, crc32(bytes(BYTES)))
    flipped = flip_pages(tmp_path, Random(1))
    ones = [sum(byte.bit_count() for byte in arena.payload(page)) for page in range(PAGES)]
    assert (sum(ones), max(ones), sum(ones[1::2])) == (flipped, 1, 0)
    assert 5 < flipped < 15
    intact = [arena.read(page, WRITTEN, crc32) for page in range(0, PAGES, 2)]
    assert intact == [not num for num in ones[::2]], "the checksum of a page tells"
    arena.close()


def test_a_redis_forgets_all_or_what_came_last(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)

    def there() -> list[bytes]:
        with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
            return [key for key in (b"first", b"last") if client.get(key)]

    try:
        with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
            for key in (b"first", b"last"):
                client.set(key, "x" * 100)
        server.kill()
        server.cut_log(20)
        server.start()
        assert there() == [b"first"]
        server.forget()
        assert there() == []
    finally:
        server.kill()


@pytest.fixture
def group() -> MemoryGroup:
    try:
        return MemoryGroup()
    except Absent as why:
        pytest.skip(str(why))


def test_a_process_that_takes_more_memory_than_it_may_is_killed(group: MemoryGroup) -> None:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", _TAKE]
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def take(num_bytes: int) -> str:
            process.stdin.write(f"{num_bytes}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert take(50 << 20)
        for most_bytes in (8 << 20, 1 << 16, 8 << 20):  # what was taken under one limit is no part of the next
            with group.holding(process.pid, most_bytes):
                assert most_bytes < 1 << 20 or take(1 << 20) == str(1 << 20)
        assert take(50 << 20) == str(50 << 20), "without the limit"
        with group.holding(process.pid, 8 << 20):
            assert take(50 << 20) == ""
            assert process.wait() == -9


class Forgetful:
    """A client of a gateway whose store forgets the batch at the first look, and its output at the first read."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, method: str, path: str, told: object = None, **_: object) -> Seen:
        self.asked.append(f"{method} {path}")
        is_read = method == "GET"
        ended: dict[str, object] = {"thing": "id", "state": "completed" if is_read else "validating", "output": "out"}
        is_gone = self.asked.count(f"{method} {path}") == 1 and is_read
        return Seen(404, end={"code": "404"}) if is_gone else Seen(200, end=ended)


def test_a_batch_that_a_store_has_forgotten_is_submitted_again() -> None:
    client: Any = Forgetful()
    asyncio.run(
        asyncio.wait_for(run_batch(client, [Question("/v1/completions", {"prompt": "Hi", "max_tokens": 1})]), PATIENT_S)
    )
    made, look, read = ["POST /v1/files", "POST /v1/batches"], "GET /v1/batches/id", "GET /v1/files/out/content"
    assert client.asked == [*made, look, *made, look, read, *made, look, read]
