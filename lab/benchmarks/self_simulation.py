"""This machine's own engine on a workload, and the simulation of it from a recorded profile, side by side.

    python -m lab.benchmarks.self_simulation [--minutes 3] [--load 0.7] [--model llama160m]

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

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter

from alignedserve.cost import profile as cost_profile
from alignedserve.cost.model import Shape
from alignedserve.lab.benchmarks.common.models import MAKERS
from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.serving import ask, serve
from alignedserve.lab.benchmarks.common.simulating import record_of
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.machine.resources import usable_cores

_PROMPT, _OUTPUT = (20, 300), (20, 120)
_DECODING = 8  # at once, where load is reckoned
_DEMO = "demo"
_NUM_IDLE, _IDLE_OUTPUT = 20, 16  # requests that an idle server gets, one at a time, and tokens of their answers
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
    """Return how long the worker is busy with a chat of mean lengths: its prompt, and its share of decode steps."""
    prompt, output = sum(_PROMPT) // 2, sum(_OUTPUT) // 2
    model = cost_profile.load(path).model
    step_s = model.seconds(Shape.build((), [prompt + output // 2] * _DECODING))
    return model.seconds(Shape.build([(prompt, 0)])) + (output - 1) * step_s / _DECODING


# --- For real


def profile(model: str, path: Path) -> None:
    line = [sys.executable, "-m", "alignedserve", "profile", model, "--out", str(path), *_threads()]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)


def _threads() -> list[str]:
    """Leave a core to the gateway and the client, which the simulator knows nothing of."""
    return ["--threads", str(max(1, int(usable_cores()) - 1))]


async def visited(url: str, visits: Sequence[Visit], *, together: bool) -> list[Times]:
    """Send requests at their times, or each as soon as the one before is through."""
    await _visit(url, Visit(0.0, 20, 4), perf_counter())  # warms up the deployment
    if not together:
        return [await _visit(url, visit, 0.0) for visit in visits]
    began = perf_counter()
    return list(await asyncio.gather(*(_visit(url, visit, began) for visit in visits)))


async def _visit(url: str, visit: Visit, began: float) -> Times:
    await asyncio.sleep(began + visit.at - perf_counter())
    draw = Random(visit.at)
    answer = await ask(url, [draw.randrange(10, _SMALL_VOCABULARY) for _ in range(visit.prompt)], visit.output)
    assert len(answer.token_at) == visit.output, f"{len(answer.token_at)} tokens of {visit.output}"
    return _times(answer.asked_at, answer.token_at)


def _times(asked: float, token_at: Sequence[float]) -> Times:
    first, last = token_at[0], token_at[-1]
    return Times(first - asked, (last - first) / max(1, len(token_at) - 1), last - asked)


# --- In virtual time


def simulated(visits: Sequence[Visit], path: Path, folder: Path, gateway_ms: float = 0.0) -> list[Times]:
    trace = folder / "trace.csv"
    rows = [f"{visit.at:.6f},{visit.prompt},{visit.output}" for visit in visits]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n", encoding="utf-8")
    trial = SimulationTrial(
        "aligned", f"trace:{trace},max_tokens={_OUTPUT[1]}", profile=str(path), gateway_ms=gateway_ms
    )
    record = record_of(trial)
    return [_times(request.arrival_at, request.token_at) for request in record.requests]


def gateway_ms(real: Sequence[Times], virtual: Sequence[Times]) -> float:
    """Return how much later the first tokens of an idle server came than its steps and frames explain."""
    later = [served.ttft_s - simulated.ttft_s for served, simulated in zip(real, virtual, strict=True)]
    return 1e3 * max(0.0, median(later))


def one_at_a_time(busy_s: float) -> list[Visit]:
    """Return visits for an idle server: in virtual time so far apart that no two meet."""
    draw = Random(1)
    return [Visit(10 * busy_s * number, draw.randint(*_PROMPT), _IDLE_OUTPUT) for number in range(_NUM_IDLE)]


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of arrivals")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time")
    parser.add_argument("--model", choices=(*MAKERS, _DEMO), default="llama160m", help="default: %(default)s")
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "profile.json"
        made = given.model != _DEMO
        model = str(MAKERS[given.model](folder / "model")) if made else _DEMO
        profile(model, path)
        busy_s = request_s(path)
        visits = drawn(given.minutes, given.load / busy_s)
        idle = one_at_a_time(busy_s)
        with serve(model, *_threads()) as deployment:
            real_idle = asyncio.run(visited(deployment.url, idle, together=False))
            real = asyncio.run(visited(deployment.url, visits, together=True))
        profile(model, again := folder / "again.json")
        virtual_idle = simulated(idle, path, folder)
        gateway = gateway_ms(real_idle, virtual_idle)
        virtual = simulated(visits, path, folder, gateway)
        later_s = request_s(again)
    report("a chat's time by a second profile, after it all", 1e3 * later_s, "ms", baseline=1e3 * busy_s)
    report("chats a second", given.load / busy_s, "1/s")
    report("chats", len(visits), "1")
    report("a request's time in HTTP and the gateway, idle", gateway, "ms")
    alone = [1e3 * median(times.tpot_s for times in idle) for idle in (virtual_idle, real_idle)]
    report("median TPOT, simulated, idle", alone[0], "ms", baseline=alone[1])
    for label, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "whole_s")):
        measured, modelled = (mean(getattr(times, field) for times in loaded) for loaded in (real, virtual))
        report(f"mean {label}, simulated", 1e3 * modelled, "ms", baseline=1e3 * measured)
        report(f"mean {label}, simulated against served", 100 * abs(modelled / measured - 1), "% off", goal=15)


if __name__ == "__main__":
    main()
