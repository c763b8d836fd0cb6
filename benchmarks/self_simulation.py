"""This machine's own engine on a workload, and the simulation of it from a recorded profile, side by side.

    python -m benchmarks.self_simulation [--minutes 3] [--load 0.7] [--model llama160m]

Profiles a model, serves it, sends chats of forced lengths over HTTP, and simulates the same arrivals on that profile.
Means of TTFT, TPOT and end to end are to be within 15 %.

The model is a random Llama of 160 million parameters, whose steps are what takes the time. Those of the demo model
(--model demo) take less than a millisecond: there the gateway and the client, which share the engine's cores and which
the simulator knows nothing of, are as much of a token as its step is.

How fast chats come follows from the profile: as many as keep the worker busy for that share of the time, if eight
decode at once. Poisson arrivals at 0.7 of what a worker can do wait for one another.

What HTTP and the gateway take is measured before that, on the idle server: of requests that come one at a time, how
much later their first tokens are than in a simulation of them, in the median. Nothing of the loaded run is fitted. The
same requests say what a further token takes when nobody competes for the cores, served and simulated: where these two
differ, it is the profile that is off, and not what the simulator makes of it. After it all the model is profiled once
more: where that says other times than before, the machine had other work in between, and the run says nothing.
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
from shutil import copyfile
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx

import alignedserve
from alignedserve.cli.simulate_once import run_once
from alignedserve.cost import profile as cost_profile
from alignedserve.cost.model import Shape
from alignedserve.machine.resources import usable_cores
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.trial import Trial
from benchmarks.models import MAKERS
from benchmarks.report import report

_PROMPT, _OUTPUT = (20, 300), (20, 120)
_DECODING = 8  # at once, where load is reckoned
_NAME, _DEMO, _READY_S = "served", "demo", 600.0
_NUM_IDLE, _IDLE_OUTPUT = 20, 16  # requests that an idle server gets, one at a time, and tokens of their answers
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SMALL_VOCABULARY = 2_000  # every model has more


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


def drawn(minutes: float, rate: float) -> list[Visit]:
    draw, at, visits = Random(0), 0.0, []
    while (at := at + draw.expovariate(rate)) < 60 * minutes:
        visits.append(Visit(at, draw.randint(*_PROMPT), draw.randint(*_OUTPUT)))
    return visits


def request_s(path: Path) -> float:
    """What the worker is busy with a chat of mean lengths: its prompt, and its share of the steps that decode it."""
    prompt, output = sum(_PROMPT) // 2, sum(_OUTPUT) // 2
    model = cost_profile.load(path).model
    step_s = model.seconds(Shape.of((), [prompt + output // 2] * _DECODING))
    return model.seconds(Shape.of([(prompt, 0)])) + (output - 1) * step_s / _DECODING


def prepared(model: str, folder: Path) -> str:
    """What to serve: the demo model, or one of random weights with its tokenizer."""
    if model == _DEMO:
        return model
    MAKERS[model](folder)
    for name in _TOKENIZER:
        copyfile(Path(alignedserve.__file__).parent / "demo_model" / name, folder / name)
    return str(folder)


# --- For real


def profile(model: str, path: Path) -> None:
    command = [sys.executable, "-m", "alignedserve", "profile", model, "--out", str(path), *_threads()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _threads() -> list[str]:
    """A core is left to the gateway and the client, which the simulator knows nothing of."""
    return ["--threads", str(max(1, int(usable_cores()) - 1))]


def served(model: str, idle: Sequence[Visit], visits: Sequence[Visit]) -> tuple[list[Times], list[Times]]:
    """The ones first, and when they are through the others."""
    command = [sys.executable, "-m", "alignedserve", "serve", model, "--port", "0", "--served-model-name", _NAME]
    command += ["--log-level", "warning", *_threads()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(found[0] for line in server.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
            return asyncio.run(_visited(url, idle, together=False)), asyncio.run(_visited(url, visits))
        finally:
            server.send_signal(signal.SIGINT)


async def _visited(url: str, visits: Sequence[Visit], *, together: bool = True) -> list[Times]:
    """As they come, or one as soon as the one before is through."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_READY_S, limits=limits) as client:
        await _visit(client, Visit(0.0, 20, 4), perf_counter())  # what a first request warms up
        if not together:
            return [await _visit(client, one, 0.0) for one in visits]
        begun = perf_counter()
        return list(await asyncio.gather(*(_visit(client, one, begun) for one in visits)))


async def _visit(client: httpx.AsyncClient, visit: Visit, begun: float) -> Times:
    await asyncio.sleep(begun + visit.at - perf_counter())
    draw = Random(visit.at)
    body = {
        "model": _NAME,
        "prompt": [draw.randrange(10, _SMALL_VOCABULARY) for _ in range(visit.prompt)],
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
    trial = Trial("aligned", f"trace:{trace},max_tokens={_OUTPUT[1]}", profile=str(path), gateway_ms=gateway_ms)
    record: RunRecord = run_once(trial, lambda _ended, _of: None)
    return [_times(one.arrival_at, one.token_at) for one in record.requests]


def gateway_ms(real: Sequence[Times], virtual: Sequence[Times]) -> float:
    """How much later the first tokens of an idle server came than its steps and frames explain."""
    later = [one.ttft_s - other.ttft_s for one, other in zip(real, virtual, strict=True)]
    return 1e3 * max(0.0, median(later))


def one_at_a_time(busy_s: float) -> list[Visit]:
    """For an idle server: in virtual time so far apart that none meets another."""
    draw = Random(1)
    return [Visit(10 * busy_s * number, draw.randint(*_PROMPT), _IDLE_OUTPUT) for number in range(_NUM_IDLE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="of arrivals (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time (default: %(default)s)")
    parser.add_argument("--model", choices=(*MAKERS, _DEMO), default="llama160m", help="default: %(default)s")
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "profile.json"
        model = prepared(given.model, folder / "model")
        profile(model, path)
        busy_s = request_s(path)
        visits = drawn(given.minutes, given.load / busy_s)
        idle = one_at_a_time(busy_s)
        real_idle, real = served(model, idle, visits)
        profile(model, again := folder / "again.json")
        virtual_idle = simulated(idle, path, folder)
        gateway = gateway_ms(real_idle, virtual_idle)
        virtual = simulated(visits, path, folder, gateway)
        later_s = request_s(again)
    report("a chat's time by a second profile, after it all", 1e3 * later_s, "ms", baseline=1e3 * busy_s)
    report("chats a second", given.load / busy_s, "1/s")
    report("chats", len(visits), "1")
    report("a request's time in HTTP and the gateway, idle", gateway, "ms")
    alone = [1e3 * median(one.tpot_s for one in some) for some in (virtual_idle, real_idle)]
    report("median TPOT, simulated, idle", alone[0], "ms", baseline=alone[1])
    for what, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "whole_s")):
        measured, modelled = (mean(getattr(one, field) for one in some) for some in (real, virtual))
        report(f"mean {what}, simulated", 1e3 * modelled, "ms", baseline=1e3 * measured)
        report(f"mean {what}, simulated against served", 100 * abs(modelled / measured - 1), "% off", goal=15)


if __name__ == "__main__":
    main()
