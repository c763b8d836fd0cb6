"""Measure what it costs to remember decisions: a note, a step, an answer, and their share of a simulated run.

    python -m benchmarks.explain        # half a minute

The costs of a note and of a step are those of a full ring, and the least of several repeats. An answer is about a
request that waited behind all others in the ring. The share is of the processor time of a run that notes nothing.
"""

from __future__ import annotations

import time
import timeit
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

from alignedserve.config.topology import Topology
from alignedserve.core import Decode, Request, Sampling, ServiceClass, Slo, StepPlan
from alignedserve.explain.decisions import MOST_DECISIONS, MOST_STEPS, DecisionRing, Kind
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings
from alignedserve.simulator.workload import Workload
from benchmarks.report import command, report, status

REQUEST = Request("a", "gateway-0", 0, (1, 2), (), Sampling(), 9, (), ServiceClass.RT, Slo(), 0.0)
PLAN = StepPlan(1, (), tuple(Decode("a", 1, 3, (0,), Sampling(), 1) for _ in range(16)), 0.1)
REPEATS, NUMBER = 15, 10_000
RUNS = 3
MOST_SHARE = 1.0  # percent of a run
MOST_ANSWER_MS, MOST_MB = 20.0, 4.0


class Counted:
    """Counts what all rings of a run are told."""

    notes = steps = 0

    def note(self, *args: object, **fields: object) -> None:
        Counted.notes += 1

    def note_step(self, *args: object) -> None:
        Counted.steps += 1


def best_us(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=NUMBER, repeat=REPEATS)) / NUMBER * 1e6


def full_ring() -> DecisionRing:
    """Return a full ring of requests that each ran a chunk and decode, behind all of which one waits."""
    ring = DecisionRing()
    ring.note(Kind.QUEUED, replace(REQUEST, id="waits"))
    for number in range((MOST_DECISIONS - 1) // 2):
        ring.now = float(number)
        other = replace(REQUEST, id=f"req-{number:032x}")
        ring.note(Kind.CHUNK, other, tokens=5, number=number, seconds=0.1, expected_s=0.1)
        ring.note(Kind.JOINED, other, tokens=1, number=3)
    for _ in range(MOST_STEPS):
        ring.note_step(PLAN, 0.1)
    return ring


def ring_mb() -> float:
    tracemalloc.start()
    ring = full_ring()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert ring.about("waits").decisions, "the ring was there"
    return held / 1e6


def run_s() -> float:
    """Return the processor time of a simulated run."""
    workload = Workload(num_requests=600, rate=100.0)
    simulation = Simulation(Settings(seed=1, topology=Topology(1, 2), workload=workload, checked=False))
    began = time.process_time()
    simulation.run()
    return time.process_time() - began


def measure() -> None:
    ring = full_ring()
    answer_ms = min(timeit.repeat(lambda: ring.about("waits"), number=1, repeat=REPEATS)) * 1e3
    note_us = best_us(lambda: ring.note(Kind.CHUNK, REQUEST, tokens=5, number=7, seconds=0.1, expected_s=0.1))
    step_us = best_us(lambda: ring.note_step(PLAN, 0.1))
    report("explain, a note", note_us, "us")
    report("explain, a step", step_us, "us")
    report("explain, an answer of a part", answer_ms, "ms", goal=MOST_ANSWER_MS)
    report("explain, memory of a full ring", ring_mb(), "MB", goal=MOST_MB)
    with patch.multiple(DecisionRing, note=Counted.note, note_step=Counted.note_step):
        seconds = min(run_s() for _ in range(RUNS))
    notes, steps = Counted.notes / RUNS, Counted.steps / RUNS
    share = (notes * note_us + steps * step_us) / 1e6 / seconds
    report("explain, notes of a request in a simulated run", notes / 600, "notes")
    report("explain, share of a simulated run", 100 * share, "%", goal=MOST_SHARE)


def main() -> int:
    command(__doc__).parse_args()
    measure()
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
