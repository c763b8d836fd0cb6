"""Measure the time that a decode worker takes to plan a step, among many candidates and while nothing changes.

    python -m lab.benchmarks.decode_plan [--candidates 1600] [--steps 100] [--alignment [--seeds 0,1,2]]

128 requests run, half of them best-effort. The candidates beside them are prompts that wait for memory, or residents
that are paused because a step takes 128. Between two steps, each request that ran gets its token. The figure is the
processor time of the choice alone, so other work on the machine matters little; simulator.py has the time for a
step's tokens. Looking a step ahead could hide at most the work of the core between two steps. Apt-Serve's paper plans
among the same number of candidates in 10.8 ms. "Near linear" means: with ten times as many candidates, at most twice
the time for each.

--alignment adds a simulated run for each seed, on 4+1, in which best-effort requests wait in the pool for 250 s. It
reports the share of steps until then that mix two batches, and the tokens per second. A run takes about two minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from statistics import mean, median
from time import thread_time

from alignedserve.core import Request, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.decode_worker.memory.packed_seating import PackedSeating
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.requests import LENGTHS
from alignedserve.lab.benchmarks.selection import BLOCK, COST, PAIRS, STEP_TOKENS, TIMES, drawn, running
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import settings_of
from alignedserve.protocol.commands import Command, RunStep
from alignedserve.protocol.events import Received, StepDone
from alignedserve.protocol.messages import ROUTER, Prefill
from alignedserve.schedulers.scheduler import SchedulerSetup
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Layout, Policy
from alignedserve.simulator.machines.clock import Priority
from alignedserve.simulator.run import Simulation
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.decode_order import DecodeOrder
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.running import Blocks, Running
from alignedserve.worker.step.view import StepContext, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

RUNNING, OUTPUT, PAGE = 128, 20, 256
GOAL_MS, STILL_MS = 1.0, 0.3
PREPARED_MS = 5.0  # AlignedServe's paper prepares 95 % of steps within this time
_GROWTH = 2.0  # of the time for a candidate, when there are ten times as many
_MIXED = 12.4  # % of steps, in AlignedServe's paper
LOADED_S = 250.0  # the backlog lasts so long; then the pool empties, and there are no batches to keep apart
BACKLOG = (
    f"coserve,rate=1,first_s={LOADED_S:g},documents.in_flight=1500,documents.replace=true,"
    "documents.prompt=64-1024,documents.output=128-512"
)


class Worker:
    """The part of a worker that the choice of a step uses."""

    def __init__(self, waiting: int, paused: int) -> None:
        self._policy, self._pivot = Policy(), COST.pivot(STEP_TOKENS)
        self._scheduler = scheduler_of(SchedulerSetup(self._policy, RUNNING))
        requests, self._now = drawn(LENGTHS, seed=1), 0.0
        self._decodes = [self._resident(next(requests)) for _ in range(RUNNING + paused)]
        self._waiting, self._seated, self._blocks = WaitingPrompts(self._policy), DecodeOrder(self._policy), Blocks(0)
        for request in islice(requests, waiting):
            self._waiting.add(running(request, self._policy, self._now))

    def _resident(self, request: Request) -> Running:
        slo = Slo(ttft_s=1.0, tbt_s=0.1875) if request.service is ServiceClass.RT else Slo(jct_s=86_400.0)
        found = running(replace(request, slo=slo), self._policy, self._now, OUTPUT)
        found.pairs = tuple(range(-(-found.num_tokens // BLOCK)))
        return found

    def choose(self) -> tuple[float, int]:
        """Return the seconds of a choice, and the number of decodes that run."""
        began = thread_time()
        at = StepContext(self._now, COST, TIMES, STEP_TOKENS, BLOCK, 256, self._policy, self._pivot)
        at.batch, at.seated = RUNNING, self._seated
        best_effort = [decode for decode in self._decodes if not decode.promise.is_rt] if self._waiting else []
        seating = PackedSeating(
            self._blocks,
            PAIRS,
            BLOCK,
            RUNNING,
            False,
            lambda _: PAIRS * BLOCK,  # no candidate finds memory
            set,
            best_effort=best_effort,
            in_order=lambda residents: in_order(residents, at),
        )
        found = self._scheduler.plan(StepView(self._decodes, (), self._waiting, at, seating))
        took = thread_time() - began
        assert found.decodes, "a step is never empty while anything can run"
        self._now += 0.03
        for decode in found.decodes:
            decode.output.append(7)
            decode.prefix += 1
            decode.promise.emitted(self._now, len(decode.output))
        return took, len(found.decodes)


class Planning(DecodeCore):
    """A core that measures the time of planning at each event."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.took_s, self._acts = 0.0, self._turn
        self._turn = (self._timed,)

    def _timed(self, now: float) -> list[Command]:
        began = thread_time()
        commands = [command for act in self._acts for command in act(now)]
        self.took_s = thread_time() - began
        return commands


def planned_by_core(policy: Policy, steps: int, num_running: int = RUNNING) -> tuple[list[float], list[float]]:
    """Return for each step the milliseconds of planning, and of all work between its result and the next step.

    Planning lets decodes grow block by block and writes their parts of the step; the rest is the work on the tokens.
    """
    limits = WorkerLimits(PAIRS, BLOCK, PAGE, STEP_TOKENS, max_batch=RUNNING)
    core, requests, now = Planning(WorkerSetup(limits, policy)), drawn(LENGTHS, seed=1), 0.0
    ordered = list[Command]()
    for request in islice(requests, num_running):
        slo = Slo(ttft_s=60.0, tbt_s=60.0) if request.service is ServiceClass.RT else request.slo
        prompt = request.prompt[:1_000]
        ordered += core.handle(Received(ROUTER, Prefill(replace(request, slo=slo, prompt=prompt))), now)
    took, whole = list[float](), list[float]()
    while len(took) < steps:
        (plan,) = (order.plan for order in ordered if isinstance(order, RunStep))
        now += 0.03
        sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
        began = thread_time()
        ordered = core.handle(StepDone(StepResult(plan.number, sampled), 0.0), now)
        if len(plan.decodes) == num_running:
            took.append(1e3 * core.took_s)
            whole.append(1e3 * (thread_time() - began))
    return took, whole


def planned(waiting: int, paused: int, steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a choice, and the mean number of requests that run."""
    worker = Worker(waiting, paused)
    took = [worker.choose() for _ in range(steps)]
    return 1e3 * median(seconds for seconds, _ in took), sum(chosen for _, chosen in took) / steps


def aligned(seed: int) -> tuple[float, float]:
    """Return the percentage of steps that mix two batches, and the tokens per second."""
    simulation = Simulation(settings_of(SimulationTrial("aligned", BACKLOG, "4+1", seed=seed)))
    world, shares = simulation.world, list[float]()

    def look() -> None:
        workers = (process.core for process in world.processes)
        shares.append(mixed_share(core for core in workers if isinstance(core, DecodeCore)))

    world.agenda.at(LOADED_S, Priority.CLIENT, look)
    summary = simulation.run()
    return shares[0], summary.tokens_per_s


def mixed_share(workers: Iterable[DecodeCore]) -> float:
    mixed, steps = 0, 0
    for core in workers:
        mixed, steps = mixed + core.counts.mixed_steps, steps + core.counts.decode_steps
    return 100 * mixed / max(1, steps)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--candidates", type=int, default=1_600)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--alignment", action="store_true", help="simulate runs for the share of mixed steps")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="seeds of these runs")
    args = parser.parse_args()
    few, many = args.candidates, 10 * args.candidates
    still, _ = planned(0, 0, args.steps)
    label = f"a step of {RUNNING} decodes"
    report(f"{label} in which nobody joins, leaves or comes due", still, "ms", goal=STILL_MS)
    for blocks in Layout:
        took, _ = planned_by_core(Policy(blocks=blocks), args.steps)
        name = f"{label} by the core, blocks {blocks.value}: nobody joins or leaves"
        report(name, median(took), "ms", goal=STILL_MS)
    for num_running in (8, 32, RUNNING):
        _, between = planned_by_core(Policy(), args.steps, num_running)
        name = f"between two steps of {num_running} decodes, all that the core does"
        report(name, median(between), "ms")
        report(f"{name}, p95", sorted(between)[int(0.95 * len(between))], "ms", goal=PREPARED_MS)
    for kind in ("prompts that wait", "residents that are paused"):
        waits = kind.startswith("prompts")
        small, runs = planned(few * waits, few * (not waits), args.steps)
        large, _ = planned(many * waits, many * (not waits), max(20, args.steps // 5))
        report(f"{label} among {few:,} {kind}", small, "ms", goal=GOAL_MS)
        report(f"{label} among {few:,} {kind}: that run", runs, "1")
        report(f"{label} among {many:,} {kind}", large, "ms")
        growth = large / many / (small / few)
        report(f"time for a candidate, of ten times as many {kind}", growth, "x", goal=_GROWTH)
    if args.alignment:
        label, shares = "steps that mix two batches, simulated 4+1", list[float]()
        for seed in args.seeds:
            mixed, tokens_per_s = aligned(seed)
            shares.append(mixed)
            report(f"{label}, seed {seed}", mixed, "%")
            report("tokens of that run", tokens_per_s, "1/s")
        report(f"{label}, mean", mean(shares), "%", goal=_MIXED)
    sys.exit(status())


if __name__ == "__main__":
    main()
