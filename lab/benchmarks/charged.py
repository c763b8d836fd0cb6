"""Measure whether requests are charged with what workers used, and what charging costs.

    python -m lab.benchmarks.charged                # 90 s: all kinds of clients on a deployment `1+1`

All kinds of clients, also those that leave, use a deployment (common/mixed_load.py). What requests were charged with,
as the metrics say by class and key, is held against the time of all steps; with the energy at rest also against the
devices' meters. Then a worker's core handles steps of 64 decodes with charging and without, in turns; the difference is
told as a share of the deployment's mean step. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter

import httpx

from alignedserve.core import Request, Sampling, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.benchmarks.common.mixed_load import MixedLoad
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import serve
from alignedserve.protocol.commands import Command, RunStep
from alignedserve.protocol.events import Received, StepDone
from alignedserve.protocol.messages import ROUTER, Prefill
from alignedserve.worker.setup import WorkerSetup

QUIET_S = 8.0  # after the clients have gone: workers tell of their last steps when they are idle
DECODES, STEPS, ROUNDS = 64, 200, 9
OFF, COSTS = 0.05, 0.005  # goals
ENERGY = ("request_energy_joules_total", ""), ("energy_joules_total", 'use="rest"'), ("energy_joules_total", "")


def total(metrics: str, name: str, label: str = "") -> float:
    found = re.findall(rf"^alignedserve:{name}{{([^}}]*)}} (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


async def used(url: str, seconds: float) -> str:
    """Have clients use a deployment for this long, and return its metrics."""
    load = MixedLoad(url, 1.0, seed=1, may_refuse=True)
    playing = asyncio.create_task(load.play())
    await asyncio.sleep(seconds)
    load.stop()
    await playing
    await asyncio.sleep(QUIET_S)
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/metrics")).text


def chats(is_metered: bool) -> Iterator[Request]:
    usual = {"sampling": Sampling(), "stop_tokens": (), "service": ServiceClass.RT, "slo": Slo(1e6, 1e6)}
    for number in range(DECODES):
        of = {"id": f"r{number}", "owner": "gateway-0", "attempt": 0, "prompt": (1,) * 32, "emitted": ()}
        yield Request(**of, **usual, max_tokens=1_000_000, arrival_at=0.0, is_metered=is_metered)


def step_s(is_metered: bool) -> float:
    """Return the time that a core takes from the end of a step of decodes to the next step."""
    cost = OnlineCost([Point(Shape.build(prefixes=[32] * size), 1e-3 + 1e-4 * size) for size in (1, 16, 64)])
    core = decode_core(WorkerSetup(WorkerLimits(65_536, 16, 256, 4096, max_batch=DECODES), cost=cost))
    ordered, now, took = list[Command](), 0.0, list[float]()
    for chat in chats(is_metered):
        ordered += core.handle(Received(ROUTER, Prefill(chat)), now)
    while len(took) < STEPS:
        (plan,) = (order.plan for order in ordered if isinstance(order, RunStep))
        now += 0.01
        done = StepDone(StepResult(plan.number, tuple((part.request, 7) for part in plan.parts if part.sampling)), 0.01)
        began = perf_counter()
        ordered = core.handle(done, now)
        if len(plan.decodes) == DECODES:
            took.append(perf_counter() - began)
    return median(took)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="that clients use the deployment")
    parser.add_argument("--topology", default="1+1")
    args = parser.parse_args()
    with serve("demo", "--topology", args.topology) as deployment:
        metrics = asyncio.run(used(deployment.url, args.seconds))
    steps_s, num_steps = (total(metrics, f"iteration_time_seconds_{end}") for end in ("sum", "count"))
    charged_s = total(metrics, "request_device_seconds_total")
    report("charged: seconds", charged_s, "s", baseline=steps_s)
    report("charged: seconds, off by", abs(charged_s / steps_s - 1), "of the steps", goal=OFF)
    joules, rest, meter = (total(metrics, name, label) for name, label in ENERGY)
    report("charged: joules, and those at rest", joules + rest, "J", baseline=meter)
    report("charged: joules, off by", abs((joules + rest) / meter - 1), "of the meter", goal=OFF)
    plain, metered = zip(*((step_s(is_metered=False), step_s(is_metered=True)) for _ in range(ROUNDS)), strict=True)
    report("charged: a core's step of 64 decodes", 1e6 * median(metered), "us", baseline=1e6 * median(plain))
    more_s = median(after - before for before, after in zip(plain, metered, strict=True))
    report("charged: share of the deployment's mean step", more_s * num_steps / steps_s, "of the step", goal=COSTS)
    sys.exit(status())


if __name__ == "__main__":
    main()
