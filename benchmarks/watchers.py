"""Measure what watchers that hang cost tokens, and how much memory: scrapers, live pages and a collector of traces.

    python -m benchmarks.watchers       # about a minute

The server is that of benchmarks.gateway: a separate process on a core of its own with a fake engine, which gives each
of 16 streams a token every 20 ms, while four clients beside them ask for one token at a time. It knows the metrics of
16 workers. Watchers ask and then read nothing: 64 scrapers of /metrics, which come again every second; 32 open pages; a
collector that takes connections and never answers. The delay of a token is the time from the engine's thread to its
client, which has read it; it needs quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from alignedserve.gateway.app import make_app
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.tracing.traces import traces_to
from benchmarks.gateway import (
    CLOCK,
    MAX_MODEL_LEN,
    MODEL,
    MOST_TOKENS,
    Beating,
    Server,
    ask_whole,
    hold_streams,
    noted_in,
    serve_app,
    serving,
)
from benchmarks.report import command, report, status
from benchmarks.scrape import MEMBERS, count_requests, tell

STREAMS, TOKENS, BEAT_S = 16, 400, 0.02
ASKERS = 4  # of one token each, again and again: more spans than wait for a collector
SCRAPERS, PAGES = 64, 32
AGAIN_S = 1.0  # a scraper gives up, and asks anew
LATE_S = 0.1875  # the default promise of a chat for the time between two tokens
MOST_MB = 64.0
SMALL = 4096  # bytes that a watcher's socket takes without being read


class Watched(Beating):
    """The owner of requests of a deployment with all workers of benchmarks.scrape."""

    members = MEMBERS


def serve(noted: Path, core: int, collector: str | None) -> None:
    """Serve as `benchmarks.gateway` does, with the metrics of 16 workers, and traces if there is a collector."""
    from alignedserve.architectures.model_source import DEMO_FOLDER
    from alignedserve.text.text_model import TextModel

    os.sched_setaffinity(0, {core})
    settings = GatewaySettings((MODEL,), MAX_MODEL_LEN)
    owner = Watched(BEAT_S, noted_in(noted))
    app = make_app(owner, TextModel.load(DEMO_FOLDER), settings, traces=traces_to(collector, MODEL))
    tell(app.state.parts)
    count_requests(app.state.metrics)
    serve_app(app)


async def hang(server: Server, path: str, again_s: float | None = None) -> None:
    """Ask for this path and read nothing; with `again_s`, leave after so long and ask anew."""
    while True:
        with socket.socket() as watcher:
            watcher.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            watcher.setblocking(False)
            await asyncio.get_running_loop().sock_connect(watcher, ("127.0.0.1", server.port))
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(watcher, head)
            await asyncio.sleep(again_s or 3600.0)


async def ask_on(server: Server) -> None:
    while True:
        await ask_whole(server, 1, 1)


@contextlib.asynccontextmanager
async def beside(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Let the tasks go on during the block; none of them may fail."""
    try:
        yield
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def delays(
    server: Server, noted: mmap.mmap, watchers: int = 0, path: str = "", again_s: float | None = None
) -> list[float]:
    """Return the delays of all tokens of the streams while these watchers hang."""
    tasks = [asyncio.create_task(hang(server, path, again_s)) for _ in range(watchers)]
    tasks += [asyncio.create_task(ask_on(server)) for _ in range(ASKERS)]
    async with beside(*tasks):
        return await hold_streams(server, STREAMS, TOKENS, noted)


@contextlib.contextmanager
def deaf_collector() -> Iterator[str]:
    """Yield the address of a collector that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def warm(server: Server) -> None:
    """Wait until the server answers, and let it take the memory that requests need."""
    await ask_whole(server, 400, 8)


def report_delays(found: list[float], beside: str, alone: list[float] | None = None) -> None:
    for share in (0.5, 0.99):
        at = found[int(share * (len(found) - 1))]
        before = None if alone is None else 1e3 * alone[int(share * (len(alone) - 1))]
        report(f"a token's delay {beside}, p{100 * share:g}", 1e3 * at, "ms", baseline=before)
    late = sum(delay > LATE_S for delay in found)
    report(f"tokens later than {1e3 * LATE_S:g} ms {beside}, of {len(found)}", late, "tokens", goal=0.0)


def measure(noted: mmap.mmap, path: Path) -> None:
    flags = "--serve", str(path)
    with serving("benchmarks.watchers", *flags) as server:
        uvloop.run(warm(server))
        alone = uvloop.run(delays(server, noted))
        report_delays(alone, "alone")
        for watchers, watched, again_s, named in (
            (SCRAPERS, "/metrics", AGAIN_S, f"{SCRAPERS} scrapers"),
            (PAGES, "/dashboard/events", None, f"{PAGES} pages"),
        ):
            before_mb = server.memory_mb
            found = uvloop.run(delays(server, noted, watchers, watched, again_s))
            report_delays(found, f"beside {named} that hang", alone)
            report(f"memory for {named} that hang", server.memory_mb - before_mb, "MB", goal=MOST_MB)
    with deaf_collector() as url, serving("benchmarks.watchers", *flags, "--collector", url) as server:
        uvloop.run(warm(server))
        before_mb = server.memory_mb
        found = uvloop.run(delays(server, noted))
        report_delays(found, "beside a collector that hangs", alone)
        report("memory for a collector that hangs", server.memory_mb - before_mb, "MB", goal=MOST_MB)


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--collector", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, min(os.sched_getaffinity(0)), args.collector)
        return 0
    with tempfile.NamedTemporaryFile() as file:
        size = STREAMS * MOST_TOKENS * CLOCK.size
        os.ftruncate(file.fileno(), size)
        measure(mmap.mmap(file.fileno(), size), Path(file.name))
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
