"""Digests of some seeds' runs: `python -m tests.simulator.digests` writes them again, when a core decides otherwise.

With --check they are compared instead: `make digests-everywhere` does that under other versions of Python. The runs are
without batch jobs: their runner needs packages that are not installed there, and asyncio differs between versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alignedserve.lab.fuzzing.fuzz import attempt
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario

SEEDS = (1, 2, 3, 5, 8, 527, 558, 848)  # in the last three, timers of a process with a skewed clock fall together
KEPT = Path(__file__).with_name("digests.json")


def now(seeds: Sequence[int] = SEEDS) -> Mapping[str, str]:
    return {str(seed): attempt(replace(draw_scenario(seed), jobs=())).digest for seed in seeds}


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        same = now() == json.loads(KEPT.read_text(encoding="utf-8"))
        print(f"Python {sys.version.split()[0]}: {'the same digests' if same else 'other digests'}")
        sys.exit(not same)
    KEPT.write_text(json.dumps(now(), indent=2) + "\n", encoding="utf-8")
