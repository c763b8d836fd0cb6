"""This machine's own engine on a workload, and the simulation of it from a recorded profile, side by side.

`python -m benchmarks.self_simulation [--minutes 1]`: profiles the demo model, serves it, sends chats of forced lengths
over HTTP, and simulates the same arrivals on that profile. Means of TTFT, TPOT and end to end are to be within 15 %.

What HTTP and the gateway take is measured before that, on the idle server: of requests that come one at a time, how
much later their first tokens are than in a simulation of them, in the median. Nothing of the loaded run is fitted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx

from alignedserve.simulate_once import run_once
from alignedserve.simulator.records import RunRecord
from alignedserve.simulator.trial import Trial
from benchmarks.report import report

_RATE, _PROMPT, _OUTPUT = 6.0, (20, 300), (20, 120)
_MODEL, _READY_S = "demo", 120.0
_NUM_IDLE, _APART_S = 40, 0.5  # requests that an idle server gets, one at a time


@dataclass(frozen=True)
class Visit:
    at: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Times:
    ttft_s: float
    tpot_s: float
    whole_s: float


def drawn(minutes: float) -> list[Visit]:
    draw, at, visits = Random(0), 0.0, []
    while (at := at + draw.expovariate(_RATE)) < 60 * minutes:
        visits.append(Visit(at, draw.randint(*_PROMPT), draw.randint(*_OUTPUT)))
    return visits


# --- For real


def profile(path: Path) -> None:
    command = [sys.executable, "-m", "alignedserve", "profile", _MODEL, "--out", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def served(idle: Sequence[Visit], visits: Sequence[Visit]) -> tuple[list[Times], list[Times]]:
    """The ones first, and when they are through the others."""
    command = [sys.executable, "-m", "alignedserve", "serve", _MODEL, "--port", "0", "--served-model-name", _MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(found[0] for line in server.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
            return asyncio.run(_visited(url, idle)), asyncio.run(_visited(url, visits))
        finally:
            server.send_signal(signal.SIGINT)


async def _visited(url: str, visits: Sequence[Visit]) -> list[Times]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_READY_S, limits=limits) as client:
        await _visit(client, Visit(0.0, 20, 4), perf_counter())  # what a first request warms up
        begun = perf_counter()
        return list(await asyncio.gather(*(_visit(client, one, begun) for one in visits)))


async def _visit(client: httpx.AsyncClient, visit: Visit, begun: float) -> Times:
    await asyncio.sleep(begun + visit.at - perf_counter())
    draw = Random(visit.at)
    body = {
        "model": _MODEL,
        "prompt": [draw.randrange(10, 2000) for _ in range(visit.prompt)],
        "max_tokens": visit.output,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
        "stream": True,
    }
    asked, token_at = perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"] or [{}]
                token_at += [perf_counter()] * len(choice.get("token_ids") or ())
    assert len(token_at) == visit.output, f"{len(token_at)} tokens of {visit.output}"
    return _times(asked, token_at)


def _times(asked: float, token_at: Sequence[float]) -> Times:
    first, last = token_at[0], token_at[-1]
    return Times(first - asked, (last - first) / max(1, len(token_at) - 1), last - asked)


# --- In virtual time


def simulated(visits: Sequence[Visit], path: Path, folder: Path, gateway_ms: float = 0.0) -> list[Times]:
    trace = folder / "trace.csv"
    rows = [f"{one.at:.6f},{one.prompt},{one.output}" for one in visits]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n", encoding="utf-8")
    trial = Trial("slack", f"trace:{trace}", profile=str(path), gateway_ms=gateway_ms)
    record: RunRecord = run_once(trial, lambda _ended, _of: None)
    return [_times(one.arrival_at, one.token_at) for one in record.requests]


def gateway_ms(real: Sequence[Times], virtual: Sequence[Times]) -> float:
    """How much later the first tokens of an idle server came than its steps and frames explain."""
    later = [one.ttft_s - other.ttft_s for one, other in zip(real, virtual, strict=True)]
    return 1e3 * max(0.0, median(later))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="of arrivals (default: %(default)s)")
    visits = drawn(parser.parse_args().minutes)
    idle = [Visit(_APART_S * number, one.prompt, 4) for number, one in enumerate(visits[:_NUM_IDLE])]
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "profile.json"
        profile(path)
        real_idle, real = served(idle, visits)
        gateway = gateway_ms(real_idle, simulated(idle, path, folder))
        virtual = simulated(visits, path, folder, gateway)
    report("a request's time in HTTP and the gateway, idle", gateway, "ms")
    for what, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "whole_s")):
        measured, modelled = (mean(getattr(one, field) for one in some) for some in (real, virtual))
        report(f"mean {what}, simulated", 1e3 * modelled, "ms", baseline=1e3 * measured)
        report(f"mean {what}, simulated against served", 100 * abs(modelled / measured - 1), "% off", goal=15)


if __name__ == "__main__":
    main()
