"""Measure whether requests are charged with what workers used, and what charging costs.

    python -m lab.benchmarks.charged                # 90 s: all kinds of clients on a deployment `1+1`
    python -m lab.benchmarks.charged --seconds 0    # only what charging costs, of steps of 1.3 ms with 3 decodes

All kinds of clients, also those that leave, use a deployment (common/mixed_load.py). What requests were charged with,
as the metrics say by class and key, is held against the time of all steps; with the energy at rest also against the
devices' meters, and its price against the price of both. Then decodes run on the cores of a worker and of their owner,
with the frames between them and the gateway's meters, with charging and without, in turns: how much processor time
charging takes in a step, as a share of the deployment's mean step. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from statistics import fmean, median
from time import thread_time
from typing import Any

from alignedserve.config.prices import Prices
from alignedserve.core import NO_OPENING, Request, Sampling, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.http_client import RemoteServer
from alignedserve.lab.benchmarks.common.mixed_load import MixedLoad
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import serve
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Command, Deliver, RunStep, Send
from alignedserve.protocol.events import Opened, Received, StepDone
from alignedserve.protocol.messages import ROUTER, Prefill
from alignedserve.protocol.wire import MOST_FRAME_BYTES, Envelope, decode, encode
from alignedserve.worker.setup import WorkerSetup

QUIET_S = 8.0  # after the clients have gone: workers tell of their last steps when they are idle
STEPS, ROUNDS, OUTPUT = 500, 9, 100
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
    with RemoteServer(url, None) as server:
        return server.whole("GET", "/metrics").text


class Steps:
    """Chats on the core of a worker, with their owner and the gateway's meters; each is followed by another."""

    def __init__(self, is_metered: bool, num_chats: int, step_s: float) -> None:
        self._is_metered, self._step_s, self._now, self._num_frames = is_metered, step_s, 0.0, 0
        cost = OnlineCost([Point(Shape.build(prefixes=[32] * size), 1e-3 + 1e-4 * size) for size in (1, 16, 64)])
        self._worker = decode_core(WorkerSetup(WorkerLimits(65_536, 16, 256, 4096, max_batch=num_chats), cost=cost))
        self._owner, self._metrics = OwnerCore(frozenset()), RequestMetrics(prices=Prices(1.0, 1.0))
        self._meters, self._ordered = dict[str, RequestMeter](), list[Command]()
        for number in range(num_chats):
            self._ordered += self._begin((number + 1) * OUTPUT // num_chats)

    def _begin(self, max_tokens: int) -> list[Command]:
        of: dict[str, Any] = {"owner": "gateway-0", "attempt": 0, "prompt": (1,) * 32, "emitted": (), "stop_tokens": ()}
        of |= {"sampling": Sampling(), "service": ServiceClass.RT, "slo": Slo(1e6, 1e6), "is_metered": self._is_metered}
        chat = Request(**of, id=f"r{len(self._meters)}", max_tokens=max_tokens, arrival_at=self._now)
        self._meters[chat.id] = RequestMeter(self._metrics, chat, "default", lambda: self._now, "acme")
        self._owner.handle(Opened(chat), self._now)
        return self._worker.handle(Received(ROUTER, Prefill(chat)), self._now)

    def run(self) -> tuple[float, float]:
        """Run a step; return the processor time of the worker's core, and that of frames, owner and meters."""
        (plan,) = (order.plan for order in self._ordered if isinstance(order, RunStep))
        self._now += self._step_s
        tokens = tuple((part.request, 7) for part in (*plan.parts, *plan.draws) if part.sampling)
        done = StepDone(StepResult(plan.number, tokens), self._step_s, joules=self._step_s)
        began = thread_time()
        self._ordered = self._worker.handle(done, self._now)
        after_core = thread_time()
        delivered = list[Deliver]()
        for sent in (order for order in self._ordered if isinstance(order, Send) and order.to == "gateway-0"):
            self._num_frames += 1
            frame = decode(encode(Envelope("decode-0", 1, self._num_frames, sent.message)), MOST_FRAME_BYTES)
            orders = self._owner.handle(Received("decode-0", frame.message, 1), self._now)
            delivered += (order for order in orders if isinstance(order, Deliver))
        for order in delivered:
            self._meters[order.request].deliver(len(order.tokens), order.opening or NO_OPENING, order.spent)
        after_all = thread_time()
        for _ in (order for order in delivered if order.finish):
            self._ordered += self._begin(OUTPUT)
        return after_core - began, after_all - after_core


def charging_s(num_chats: int, step_s: float) -> list[float]:
    """Return the processor time that charging takes in a step, on average: of the worker's core, and of the rest."""
    rounds = list[list[float]]()
    for _ in range(ROUNDS):
        both = [Steps(is_metered, num_chats, step_s) for is_metered in (True, False)]
        took: dict[Steps, list[tuple[float, float]]] = {steps: [] for steps in both}
        gc.collect()
        gc.disable()
        for _ in range(STEPS):
            for steps in both:
                took[steps].append(steps.run())
            both.reverse()  # who runs first finds its memory cold
        gc.enable()
        metered, plain = ([fmean(times) for times in zip(*of_steps, strict=True)] for of_steps in took.values())
        rounds.append([more - less for more, less in zip(metered, plain, strict=True)])
    return [median(of_part) for of_part in zip(*rounds, strict=True)]


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="that clients use the deployment")
    parser.add_argument("--topology", default="1+1")
    args = parser.parse_args()
    step_s, num_chats = (1.3e-3, 3) if not args.seconds else serve_and_charge(args.topology, args.seconds)
    of_core, of_rest = charging_s(num_chats, step_s)
    report(f"charging: a core's step of {num_chats} chats", 1e6 * of_core, "us")
    report("charging: frames, owner and meters of the step", 1e6 * of_rest, "us")
    report("charging: share of the mean step", (of_core + of_rest) / step_s, "of the step", goal=COSTS)
    sys.exit(status())


def serve_and_charge(topology: str, seconds: float) -> tuple[float, int]:
    """Hold charges against meters; return the mean time of a step, and its mean number of output tokens."""
    with serve("demo", "--topology", topology, "--price-device-hour", "3.6", "--price-kwh", "0.36") as deployment:
        metrics = asyncio.run(used(deployment.url, seconds))
    steps_s, num_steps = (total(metrics, f"iteration_time_seconds_{end}") for end in ("sum", "count"))
    charged_s = total(metrics, "request_device_seconds_total")
    report("charged: seconds", charged_s, "s", baseline=steps_s)
    report("charged: seconds, off by", abs(charged_s / steps_s - 1), "of the steps", goal=OFF)
    joules, rest, meter = (total(metrics, name, label) for name, label in ENERGY)
    report("charged: joules, and those at rest", joules + rest, "J", baseline=meter)
    report("charged: joules, off by", abs((joules + rest) / meter - 1), "of the meter", goal=OFF)
    price, of_meters = total(metrics, "request_price_total"), 1e-3 * steps_s + 1e-7 * (meter - rest)
    report("charged: price, off by", abs(price / of_meters - 1), "of the meters' price", goal=OFF)
    return steps_s / num_steps, max(1, round(total(metrics, "generation_tokens_total") / num_steps))


if __name__ == "__main__":
    main()
