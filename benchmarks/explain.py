"""The cost of remembering decisions: of a note, of a step, of an answer, and their share of a simulated run.

python -m benchmarks.explain
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from collections.abc import Callable
from unittest.mock import patch

from alignedserve.config.topology import Topology
from alignedserve.core import Decode, Request, Sampling, ServiceClass, Slo, StepPlan
from alignedserve.explain.decisions import MOST_DECISIONS, MOST_STEPS, DecisionRing, Kind
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings
from alignedserve.simulator.workload import Workload

REQUEST = Request("a", "gateway-0", 0, (1, 2), (), Sampling(), 9, (), ServiceClass.RT, Slo(), 0.0)
PLAN = StepPlan(1, (), tuple(Decode("a", 1, 3, (0,), Sampling(), 1) for _ in range(16)), 0.1)
REPEATS, NUMBER = 15, 10_000


class Counted:
    """Counts what all rings of a run are told."""

    notes = steps = 0

    def note(self, *args: object, **fields: object) -> None:
        Counted.notes += 1

    def note_step(self, *args: object) -> None:
        Counted.steps += 1


def best_us(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=NUMBER, repeat=REPEATS)) / NUMBER * 1e6


def run_s() -> float:
    """Return the processor time of a simulated run."""
    workload = Workload(num_requests=600, rate=100.0)
    simulation = Simulation(Settings(seed=1, topology=Topology(1, 2), workload=workload, checked=False))
    began = time.process_time()
    simulation.run()
    return time.process_time() - began


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ring = DecisionRing()
    note_us = best_us(lambda: ring.note(Kind.CHUNK, REQUEST, tokens=5, number=7, seconds=0.1, expected_s=0.1))
    step_us = best_us(lambda: ring.note_step(PLAN, 0.1))
    assert (MOST_DECISIONS, MOST_STEPS) < (NUMBER, NUMBER), "the ring is full by now"
    answer_ms = min(timeit.repeat(lambda: ring.about("b"), number=1, repeat=REPEATS)) * 1e3
    print(json.dumps({"note_us": round(note_us, 2), "step_us": round(step_us, 2), "answer_ms": round(answer_ms, 2)}))
    seconds = min(run_s() for _ in range(3))
    with patch.multiple(DecisionRing, note=Counted.note, note_step=Counted.note_step):
        run_s()
    share = (Counted.notes * note_us + Counted.steps * step_us) / 1e6 / seconds
    counted = {"notes": Counted.notes, "steps": Counted.steps, "of_run_percent": round(100 * share, 2)}
    print(json.dumps({"requests": 600, **counted}))


if __name__ == "__main__":
    main()
