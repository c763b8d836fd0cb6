"""Measure the time that the gateway adds to a request and to a token, with a fake engine, and the streams it holds.

    python -m lab.benchmarks.gateway                        # about a minute

The application, its server and its event loop are the gateway's own, in a separate process bound to one core;
tokens come from a thread beside the event loop, as the owner's do, on a fixed beat. A token and a request cost the
processor time of the process: other work on the machine changes it little. The latency of a token is the time
from the thread to its client, another process, which has read it; it needs quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI

from alignedserve.core import FinishReason, Request
from alignedserve.errors import AlignedServeError
from alignedserve.explain.story import Story, tell
from alignedserve.lab.bench.connections import Address, Connections
from alignedserve.lab.bench.player import CONNECT_S
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.owner.arrivals import ArrivalQueues
from alignedserve.owner.client import Delivered, Settle, ignore
from alignedserve.protocol.messages import Member

MODEL, MAX_MODEL_LEN = "demo", 2048
VOCABULARY = 151_936  # of Qwen 3, which the fake engine has, whatever the tokenizer knows
PROMPT_IDS, TOKEN_IDS = [5, 6, 7], tuple(range(300, 400))
CLOCK = struct.Struct("=d")
MOST_TOKENS = 1024  # tokens of a stream
WARM_REQUESTS = 200
ENDED_EARLY = "the answer ended early"  # so the client says of what is no stream
PHASES = 50


class Beating:
    """An owner of requests that gives each open request a token on every beat, and notes the time in shared memory.

    A request's seed is the number of the stream. In a long beat, streams get their tokens at `PHASES` different times:
    the workers of a real server do not end their steps all at once.
    """

    name, ready, lacks_s = "gateway-0", True, 0.0
    members: tuple[Member, ...] = ()

    def __init__(self, beat_s: float, noted: mmap.mmap) -> None:
        self._beat_s, self._noted = beat_s, noted
        self.late: dict[str, float] = {}
        self._arrivals: ArrivalQueues[Delivered] = ArrivalQueues()
        self._open: dict[str, tuple[Request, int]] = {}  # request and number of tokens so far
        threading.Thread(target=self._beat, daemon=True).start()

    def now(self) -> float:
        return time.monotonic()

    async def story(self, request: str) -> Story:
        return tell(request, (), (), self.now())

    def pause(self, request: str) -> None: ...

    def resume(self, request: str) -> None: ...

    def end(self, request: str, error: AlignedServeError) -> None: ...

    def has_unread(self, request: str) -> bool:
        return self._arrivals.has(request)

    async def open(self, request: Request, settle: Settle = ignore) -> AsyncGenerator[Delivered, None]:
        with self._arrivals.waiting_for(request.id) as arrived:
            self._open[request.id] = request, 0
            try:
                while True:
                    delivered = await arrived.get()
                    yield delivered
                    if delivered.finish:
                        return
            finally:
                self._open.pop(request.id, None)

    def _beat(self) -> None:
        phases = PHASES if self._beat_s > 0.05 else 1
        at = time.monotonic()
        for phase in itertools.cycle(range(phases)):
            at = max(at, time.monotonic() - self._beat_s) + self._beat_s / phases
            time.sleep(max(0.0, at - time.monotonic()))
            for name, (request, index) in list(self._open.items()):
                if request.sampling.seed % phases == phase:
                    self._deliver(name, request, index)

    def _deliver(self, name: str, request: Request, index: int) -> None:
        if index >= request.max_tokens:
            return
        finish = FinishReason.LENGTH if index + 1 == request.max_tokens else None
        offset = (request.sampling.seed * MOST_TOKENS + index) * CLOCK.size
        if offset + CLOCK.size <= len(self._noted):
            CLOCK.pack_into(self._noted, offset, time.monotonic())
        if name in self._open:
            self._open[name] = request, index + 1
        self._arrivals.put(name, Delivered((TOKEN_IDS[index % len(TOKEN_IDS)],), finish))


def serve(beat_s: float, noted: Path, core: int) -> None:
    """Serve as `alignedserve.gateway.actor` does, with another owner."""
    from alignedserve.architectures.model_source import DEMO_FOLDER
    from alignedserve.gateway.app import make_app
    from alignedserve.gateway.settings import GatewaySettings
    from alignedserve.text.text_model import TextModel

    os.sched_setaffinity(0, {core})
    owner = Beating(beat_s, noted_in(noted))
    text = replace(TextModel.load(DEMO_FOLDER), vocab_size=VOCABULARY)
    serve_app(make_app(owner, text, GatewaySettings((MODEL,), MAX_MODEL_LEN)))


def noted_in(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 0)


def serve_app(app: FastAPI) -> None:
    """Print a free port, and serve the application at it."""
    from alignedserve.gateway.actor import HttpServer, http_settings
    from alignedserve.shell.listener import bind

    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    uvloop.run(HttpServer(http_settings(app, None)).serve(sockets=[listener]))


class GatewayAlone:
    """The process of a server that is measured."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid

    @property
    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    @property
    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def ours(beat_s: float, noted: Path) -> Iterator[GatewayAlone]:
    """Yield our server, in a process of its own."""
    command = [sys.executable, "-m", "lab.benchmarks.gateway", "--serve", str(noted), "--beat", str(beat_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        while process.poll() is None:  # it listens in a moment
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield GatewayAlone(port, process.pid)
    finally:
        process.kill()
        process.wait()


def connections_to(server: GatewayAlone) -> Connections:
    return Connections(Address.parse(f"http://127.0.0.1:{server.port}/v1", None), time.monotonic, CONNECT_S)


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT_IDS, "ignore_eos": True, **fields}).encode()


async def read_streams(server: GatewayAlone, streams: int, tokens: int) -> list[Sequence[float]]:
    """Read streams at once, and return when each token of each was read."""

    async def read(number: int) -> Sequence[float]:
        body = completion(max_tokens=tokens, stream=True, seed=number)
        answer = await to_server.ask(str(number), "/completions", body)
        assert answer.failure is None, answer.failure
        return answer.token_at

    with contextlib.closing(connections_to(server)) as to_server:
        return await asyncio.gather(*map(read, range(streams)))


async def ask_whole(server: GatewayAlone, count: int, at_once: int) -> None:
    """Send unstreamed requests for one token each, over connections that stay open."""

    async def ask_some(number: int) -> None:
        for _ in range(count // at_once):
            answer = await to_server.ask(str(number), "/completions", completion(max_tokens=1))
            assert answer.failure is None or answer.failure.kind == ENDED_EARLY, answer.failure  # it is no stream

    with contextlib.closing(connections_to(server)) as to_server:
        await asyncio.gather(*map(ask_some, range(at_once)))


async def per_request_us(server: GatewayAlone, count: int = 2000) -> float:
    await ask_whole(server, WARM_REQUESTS, 8)
    before = server.cpu_s
    await ask_whole(server, count, 8)
    return (server.cpu_s - before) / count * 1e6


async def per_token_us(server: GatewayAlone, streams: int, tokens: int) -> float:
    """Return the cost of a token alone: the cost of requests with two tokens is subtracted."""
    await read_streams(server, streams, 2)
    costs = []
    for length in (2, tokens):
        before = server.cpu_s
        await read_streams(server, streams, length)
        costs.append(server.cpu_s - before)
    return (costs[1] - costs[0]) / (streams * (tokens - 2)) * 1e6


async def hold_streams(server: GatewayAlone, streams: int, tokens: int, noted: mmap.mmap) -> list[float]:
    """Hold streams open at once, and return the delay of each token after all streams began, in ascending order."""
    read_at = await read_streams(server, streams, tokens)
    late, all_began = [], max(times[0] for times in read_at)
    for number, times in enumerate(read_at):
        assert len(times) == tokens, f"stream {number} had {len(times)} of {tokens} tokens"
        for index, at in enumerate(times):
            had_at = CLOCK.unpack_from(noted, (number * MOST_TOKENS + index) * CLOCK.size)[0]
            if had_at > all_began:
                late.append(at - had_at)
    assert late, "the first streams ended before the last began"
    return sorted(late)


def run(path: Path, streams: int) -> None:
    noted = noted_in(path)
    with ours(0.001, path) as server:
        cost_us = uvloop.run(per_request_us(server))
        report("gateway, a request of one token", cost_us, "us of a core")
    for held, tokens, beat_s in ((16, 400, 0.002), (512, 120, 0.05)):
        with ours(beat_s, path) as server:
            token_us = uvloop.run(per_token_us(server, held, tokens))
        report(f"gateway, a streamed token, {held} streams", token_us, "us of a core")
        report(f"gateway, streamed tokens on one core, {held} streams", 1e6 / token_us, "tokens/s")
    for held, tokens, beat_s in ((streams, 40, 0.5), (16, 200, 0.02)):
        with ours(beat_s, path) as server:
            before_mb = server.memory_mb
            late = uvloop.run(hold_streams(server, held, tokens, noted))
            more_mb = server.memory_mb - before_mb
        if held == streams:
            report("gateway, streams held open at once on one core", held, "streams", goal=2000, at_least=True)
            report(f"gateway, memory of a stream, {held} open", more_mb / held * 1e3, "kB")
        for share in (0.5, 0.99):
            at = late[int(share * (len(late) - 1))]
            report(f"gateway, latency added to a token, p{share * 100:g}, {held} streams", at * 1e3, "ms")


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--streams", type=int, default=2000, help="streams open at once")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--beat", type=float, default=0.001, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.beat, args.serve, min(os.sched_getaffinity(0)))
        return 0
    with tempfile.NamedTemporaryFile() as file:
        os.ftruncate(file.fileno(), args.streams * MOST_TOKENS * CLOCK.size)
        run(Path(file.name), args.streams)
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
