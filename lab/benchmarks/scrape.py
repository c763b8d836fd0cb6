"""Measure one scrape of the metrics of a deployment of 16 workers, and what a scraper that asks in a loop costs a
stream.

    python -m lab.benchmarks.scrape

The application is the gateway's own, called without a network. A second gateway and the job runner answer at their real
sockets, but in the same process, so that they do not work at the same time. Workers have counted steps of every size
and preemptions of every cause, and owners requests of both classes: there are as many series as there can be. The
stream gets a token every 10 ms, and how much later than the one before it each is written counts. The latest needs
quiet cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, ClassVar

from fastapi import FastAPI

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import FinishReason, PreemptionCause, Request, Role, ServiceClass, Usage
from alignedserve.explain.story import Story
from alignedserve.gateway.app import make_app
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.requests import request
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Delivered
from alignedserve.owner.siblings import Siblings
from alignedserve.protocol.figures import (
    RATIOS,
    SPREADS,
    STEP_S,
    STEP_TOKENS,
    ByClass,
    DecodeSteps,
    Garbage,
    Preempted,
    ProcessFigures,
    Stages,
    Tally,
    WorkerLoad,
)
from alignedserve.protocol.messages import ROUTER, Figures, Member
from alignedserve.text.text_model import TextModel

GOAL_MS = 50.0
SCRAPES = 20
APART_S = 1.1  # a scrape that follows another sooner may wait
TOKENS, TOKEN, TOKEN_S = 300, 300, 0.01
WORKERS = [(f"{role.value}-{number}", role) for role in (Role.PREFILL, Role.DECODE) for number in range(8)]
MEMBERS = tuple(Member(name, role, "local", 1, "") for name, role in (*WORKERS, (ROUTER, Role.ROUTER)))
OWNERS = ("gateway-0", "gateway-1", "jobs-0")
PROCESS = ProcessFigures(123.45, 2 << 30, 64, 1.7e9, python="3.12.3", garbage=(Garbage(7, 8, 9),) * 3)


class Pacing:
    """An owner that delivers a token every TOKEN_S, in a deployment with all workers."""

    name, ready, lacks_s = OWNERS[0], True, 0.0
    late: ClassVar[dict[str, float]] = {}
    members = MEMBERS

    def now(self) -> float:
        return time.monotonic()

    def pause(self, request: str) -> None: ...

    def resume(self, request: str) -> None: ...

    def has_unread(self, request: str) -> bool:
        return False

    async def open(self, request: Request) -> AsyncGenerator[Delivered, None]:
        began_at = time.monotonic()
        for number in range(1, TOKENS + 1):
            await asyncio.sleep(began_at + number * TOKEN_S - time.monotonic())
            yield Delivered((TOKEN,), FinishReason.LENGTH if number == TOKENS else None)

    async def story(self, request: str) -> Story:
        raise AssertionError("nobody asks about a request")


def tally(bounds: Sequence[float]) -> Tally:
    return Tally(tuple(range(1, len(bounds) + 2)), 12_345.678)


def load() -> WorkerLoad:
    kinds = itertools.product(PreemptionCause, ServiceClass, (False, True))
    tallies = (tally(STEP_TOKENS), tally(STEP_S), tally(RATIOS), tally(RATIOS))
    preempted = tuple(Preempted(*kind, 7) for kind in kinds)
    return WorkerLoad(ByClass(100, 28), ByClass(3, 900), 0.875, 0.25, *tallies, preempted)


def tell(parts: PartMetrics) -> None:
    """Tell what all workers, the pool and the router would."""
    steps = DecodeSteps((1, 2, 3), tally(SPREADS), 4, 5, 6, 7)
    for name, role in WORKERS:
        of_kind = steps if role is Role.DECODE else None
        parts.update(
            Figures(
                num_refused=1,
                num_failed_transfers=1,
                steps=of_kind,
                slowdown=1.1,
                worker=load(),
                process=PROCESS,
                member=name,
            )
        )
    usage = Usage(1, 2, 3, 4, 5, 6)
    parts.update(Figures(usage, num_compressed=1, num_incompressible=1, process=PROCESS, member="pool-0"))
    parts.update(Figures(rebuilt_s=0.5, rt=Stages(1, 2, 3, 4), be=Stages(), process=PROCESS, member=ROUTER))


def count_requests(metrics: RequestMetrics) -> None:
    """Count requests of both classes, with every end that there is."""
    for service, finish in itertools.product(ServiceClass, ("stop", "length", "abort")):
        of_class = request("r", (1, 2, 3), 8, service=service)
        with RequestMeter(metrics, of_class, "default", time.monotonic) as meter:
            for _ in range(3):
                meter.deliver(1)
                meter.write()
            meter.finish = finish
        for reason in ("too_many_open", "queue_full", "too_late", "infeasible", "policy", "given_up"):
            metrics.count_rejected(service, reason)
    for error in (400, 401, 404, 413, 429, 500, 503):
        metrics.count_http_error(error)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[FastAPI]:
    """Yield the application of a gateway, beside another gateway and a job runner."""
    app = make_app(Pacing(), TextModel.load(DEMO_FOLDER), GatewaySettings(("demo",), 2048))
    tell(app.state.parts)
    owners = [app.state.metrics, *(RequestMetrics("demo", part=name) for name in OWNERS[1:])]
    sockets = {name: folder / name for name in OWNERS}
    async with AsyncExitStack() as listening:
        for name, metrics in zip(OWNERS, owners, strict=True):
            count_requests(metrics)
            sibling = Siblings(name, sockets, metrics.text)
            await listening.enter_async_context(sibling.listening())
            if name == OWNERS[0]:
                app.state.scrapes.owners = sibling.ask_all
        yield app


async def ask(app: FastAPI, method: str, path: str, body: bytes = b"") -> list[tuple[float, bytes]]:
    """Return the pieces of an answer, and when each was written."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    named = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    asked, pieces = [{"type": "http.request", "body": body, "more_body": False}], list[tuple[float, bytes]]()

    async def receive() -> Any:
        if not asked:
            await asyncio.Event().wait()  # the client stays
        return asked.pop()

    async def send(message: Any) -> None:
        if message.get("body"):
            pieces.append((time.monotonic(), message["body"]))

    await app({**named, "headers": headers, "scheme": "http", "server": ("localhost", 80)}, receive, send)
    return pieces


async def scrapes(app: FastAPI) -> tuple[list[float], bytes]:
    """Return the times of scrapes in seconds, and the last answer."""
    found, answer = list[float](), b""
    for _ in range(SCRAPES):
        await asyncio.sleep(APART_S)
        began_at = time.monotonic()
        ((_, answer),) = await ask(app, "GET", "/metrics")
        found.append(time.monotonic() - began_at)
    return found, answer


async def delays(app: FastAPI) -> list[float]:
    """Return by how much later than its due each token of a stream was written."""
    body = {"model": "demo", "prompt": "a", "max_tokens": TOKENS, "stream": True}
    pieces = await ask(app, "POST", "/v1/completions", json.dumps(body).encode())
    written = [at for at, piece in pieces if b'"text"' in piece]
    return [max(0.0, at - before - TOKEN_S) for before, at in itertools.pairwise(written)]


async def delays_beside_a_scraper(app: FastAPI) -> tuple[list[float], int]:
    """Return the same while a scraper asks in a loop, and how often it was answered."""
    num_answers = 0

    async def scrape() -> None:
        nonlocal num_answers
        while True:
            await ask(app, "GET", "/metrics")
            num_answers += 1

    scraping = asyncio.create_task(scrape())
    found = await delays(app)
    scraping.cancel()
    return found, num_answers


def report_delays(found: Sequence[float], beside: str) -> None:
    report(f"a token's delay {beside}, mean", 1e3 * sum(found) / len(found), "ms")
    report(f"a token's delay {beside}, p99", 1e3 * quantiles(found, n=100)[-1], "ms")
    report(f"a token's delay {beside}, latest", 1e3 * max(found), "ms")


async def measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(Path(folder)) as app:
            found, answer = await scrapes(app)
            alone = await delays(app)
            beside, num_answers = await delays_beside_a_scraper(app)
    report("a scrape of 16 workers, median", 1e3 * median(found), "ms", goal=GOAL_MS)
    report(f"a scrape of 16 workers, longest of {SCRAPES}", 1e3 * max(found), "ms")
    report("series of 16 workers", sum(not line.startswith(b"#") for line in answer.splitlines()), "series")
    report("size of the answer", len(answer) / 1e3, "kB")
    report_delays(alone, "alone")
    report_delays(beside, "beside a scraper in a loop")
    report("answers to that scraper", num_answers / (TOKENS * TOKEN_S), "a second")


def main() -> int:
    command(__doc__).parse_args()
    asyncio.run(measure())
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
