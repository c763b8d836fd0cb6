"""The router killed again and again under load: what streams notice of it, on real processes.

    python -m benchmarks.router_restart [--kills 8] [--streams 12] [--topology 1+1] [--launcher local]

Serves the demo model, keeps so many streams open over HTTP, and kills the router with SIGKILL every few seconds. Each
stream must end with all of its tokens, and with those that the same prompt brought before anything was killed. Said
are the longest pause within a stream, the longest wait for a first token, and both while nothing is killed; and how
long each router took, from its start and from the kill, until it knew again what was open (/metrics).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import httpx

from benchmarks.report import report

_TOKENS, _EVERY_S, _CALM_S = 120, 7.0, 6.0  # a part that dies within 5 s of its start, three times, stays away
_METRIC = "alignedserve:router_rebuilt_seconds "
_GOAL_S = 2.0
_TITLES = ("alignedserve.shell.part router", "ray::router")


@dataclass
class Seen:
    """By all streams together."""

    pauses: list[float] = field(default_factory=list)  # the longest of each
    firsts: list[float] = field(default_factory=list)
    num_wrong: int = 0
    wanted: dict[int, str] = field(default_factory=dict)  # prompt -> its answer


@contextmanager
def served(topology: str, launcher: str) -> Iterator[tuple[str, int]]:
    """Its address, and the launcher's process."""
    command = [sys.executable, "-m", "alignedserve", "serve", "--port", "0", "--log-level", "error"]
    command += ["--topology", topology, "--launcher", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if "http://" in line)
            yield line[line.index("http://") :].split()[0].removesuffix("/v1"), server.pid
        finally:
            server.send_signal(signal.SIGINT)


def router_of(launcher: int) -> int | None:
    """The router's process, among those that the launcher's started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ = [], [launcher]
    while open_:
        pid = open_.pop()
        open_ += children.get(pid, ())
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        found += [pid] if any(one in title for one in _TITLES) else []
    return found[0] if found else None


@dataclass(frozen=True)
class Rebuilt:
    """Of one router, in seconds."""

    from_start_s: float
    from_kill_s: float


async def kill_again_and_again(http: httpx.AsyncClient, launcher: int, kills: int) -> list[Rebuilt]:
    found = []
    for _ in range(kills):
        while (router := router_of(launcher)) is None:
            await asyncio.sleep(0.1)
        before = await rebuilt_s(http)
        os.kill(router, signal.SIGKILL)
        killed_at = perf_counter()
        while (now := await rebuilt_s(http)) == before:  # to the microsecond, no two are alike
            await asyncio.sleep(0.02)
        found.append(Rebuilt(now, perf_counter() - killed_at))
        await asyncio.sleep(max(0.0, killed_at + _EVERY_S - perf_counter()))
    return found


async def rebuilt_s(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(_METRIC))


async def stream(http: httpx.AsyncClient, number: int, seen: Seen) -> None:
    body = {"model": "demo", "prompt": f"Tell me about the number {number}.", "max_tokens": _TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    said, times = list[str](), [perf_counter()]
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                said.append(json.loads(line[6:])["choices"][0]["text"])
                times.append(perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    seen.firsts.append(gaps[0])
    seen.pauses.append(max(gaps[1:]))
    seen.num_wrong += "".join(said) != seen.wanted.setdefault(number, "".join(said))


async def load(http: httpx.AsyncClient, streams: int, seen: Seen, ended: asyncio.Event) -> None:
    async def client(number: int) -> None:
        while not ended.is_set():
            await stream(http, number, seen)

    await asyncio.gather(*(client(number) for number in range(streams)))


@asynccontextmanager
async def under_load(http: httpx.AsyncClient, streams: int, seen: Seen) -> AsyncIterator[None]:
    """Until what is done meanwhile has been done, and every stream has ended."""
    ended = asyncio.Event()
    running = asyncio.create_task(load(http, streams, seen, ended))
    yield
    ended.set()
    await running


async def measure(url: str, launcher: int, kills: int, streams: int) -> bool:
    wanted: dict[int, str] = {}
    calm, killed = Seen(wanted=wanted), Seen(wanted=wanted)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        async with under_load(http, streams, calm):
            await asyncio.sleep(_CALM_S)
        async with under_load(http, streams, killed):
            rebuilt = await kill_again_and_again(http, launcher, kills)
    for name, seen in (("nothing is killed", calm), (f"{kills} kills", killed)):
        report(f"router restart, {name}: streams", len(seen.pauses), "1")
        report(f"router restart, {name}: longest pause", max(seen.pauses), "s")
        report(f"router restart, {name}: longest wait for a first token", max(seen.firsts), "s")
    slowest = max(one.from_start_s for one in rebuilt)
    met = report("router restart: rebuilt, the slowest, from its start", slowest, "s", goal=_GOAL_S)
    report("router restart: rebuilt, the slowest, from the kill", max(one.from_kill_s for one in rebuilt), "s")
    wrong = calm.num_wrong + killed.num_wrong
    return report("router restart: streams that got other tokens", wrong, "1", goal=0) and met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--topology", default="1+1", help="default: %(default)s")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local", help="default: %(default)s")
    args = parser.parse_args()
    with served(args.topology, args.launcher) as (url, launcher):
        met = asyncio.run(measure(url, launcher, args.kills, args.streams))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
