"""Kill the router repeatedly under load, and measure what streams notice of it, on real processes.

    python -m lab.benchmarks.router_restart [--kills 8] [--streams 12] [--topology 1+1] [--launcher local]

It serves the demo model, keeps `--streams` streams open over HTTP, and kills the router with SIGKILL every few seconds.
Each stream must end with all of its tokens, the same tokens as for the same prompt before the first kill. The figures
are the longest pause within a stream, the longest wait for a first token, and both without kills; and the time of each
router, from its start and from the kill, until it knew the open requests again (/metrics).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import httpx

from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import Deployment, ask, name_of, processes_under, serve

_TOKENS, _EVERY_S, _CALM_S = 120, 7.0, 6.0  # a part that dies within 5 s of its start, three times, stays away
_METRIC = "alignedserve:router_rebuilt_seconds{"
_GOAL_S = 2.0


@dataclass
class Seen:
    """The pauses, first tokens and errors of all streams together."""

    pauses: list[float] = field(default_factory=list)  # longest pause of each stream
    firsts: list[float] = field(default_factory=list)
    num_wrong: int = 0
    wanted: dict[int, list[int]] = field(default_factory=dict)  # prompt -> answer


@dataclass(frozen=True)
class Rebuilt:
    """The seconds until a new router knew the open requests again."""

    from_start_s: float
    from_kill_s: float


def router_of(launcher: int) -> int | None:
    found = (pid for pid, line in processes_under(launcher).items() if name_of(line) == "router")
    return next(found, None)


async def kill_repeatedly(http: httpx.AsyncClient, launcher: int, kills: int) -> list[Rebuilt]:
    found = []
    for _ in range(kills):
        while (router := router_of(launcher)) is None:
            await asyncio.sleep(0.1)
        before = await rebuilt_s(http)
        os.kill(router, signal.SIGKILL)
        killed_at = perf_counter()
        while (now := await rebuilt_s(http)) == before:  # in microseconds, no two values are equal
            await asyncio.sleep(0.02)
        found.append(Rebuilt(now, perf_counter() - killed_at))
        await asyncio.sleep(max(0.0, killed_at + _EVERY_S - perf_counter()))
    return found


async def rebuilt_s(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_METRIC))


async def stream(url: str, number: int, seen: Seen) -> None:
    answer = await ask(url, f"Tell me about the number {number}.", _TOKENS)
    seen.firsts.append(answer.ttft_s)
    seen.pauses.append(max(answer.gaps))
    is_whole = len(answer.tokens) == _TOKENS
    seen.num_wrong += not is_whole or answer.tokens != seen.wanted.setdefault(number, answer.tokens)


async def load(url: str, streams: int, seen: Seen, ended: asyncio.Event) -> None:
    async def client(number: int) -> None:
        while not ended.is_set():
            await stream(url, number, seen)

    await asyncio.gather(*(client(number) for number in range(streams)))


@asynccontextmanager
async def under_load(url: str, streams: int, seen: Seen) -> AsyncIterator[None]:
    """Keep streams open while the context is open, then wait until every stream has ended."""
    ended = asyncio.Event()
    running = asyncio.create_task(load(url, streams, seen, ended))
    yield
    ended.set()
    await running


async def measure(deployment: Deployment, kills: int, streams: int) -> None:
    wanted: dict[int, list[int]] = {}
    calm, killed = Seen(wanted=wanted), Seen(wanted=wanted)
    async with under_load(deployment.url, streams, calm):
        await asyncio.sleep(_CALM_S)
    async with (
        httpx.AsyncClient(base_url=deployment.url, timeout=120) as http,
        under_load(deployment.url, streams, killed),
    ):
        rebuilt = await kill_repeatedly(http, deployment.pid, kills)
    for name, seen in (("nothing is killed", calm), (f"{kills} kills", killed)):
        report(f"router restart, {name}: streams", len(seen.pauses), "1")
        report(f"router restart, {name}: longest pause", max(seen.pauses), "s")
        report(f"router restart, {name}: longest wait for a first token", max(seen.firsts), "s")
    slowest = max(router.from_start_s for router in rebuilt)
    report("router restart: rebuilt, the slowest, from its start", slowest, "s", goal=_GOAL_S)
    report("router restart: rebuilt, the slowest, from the kill", max(router.from_kill_s for router in rebuilt), "s")
    wrong = calm.num_wrong + killed.num_wrong
    report("router restart: streams that got other tokens", wrong, "1", goal=0)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--kills", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--topology", default="1+1", help="default: %(default)s")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local", help="default: %(default)s")
    args = parser.parse_args()
    with serve("demo", "--topology", args.topology, "--launcher", args.launcher) as deployment:
        asyncio.run(measure(deployment, args.kills, args.streams))
    sys.exit(status())


if __name__ == "__main__":
    main()
