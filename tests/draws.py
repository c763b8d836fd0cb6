"""New draws, by a budget of time: seeds of the fuzzer, requests to the gateway, and examples of hypothesis that no run
has tried before.

    python -m tests.draws [--seconds 60] [--seed N]

`make test` tries the same cases each time, so that a difference comes from a change. Here two fifths of the time go to
fuzz seeds, a fifth to requests, and the rest to property tests in an order drawn again. All follows from the seed in
the first line, which CI takes from the commit below the change. What fails is printed with the command that runs it
again. A seed that failed becomes a named test: tests/lab/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.lab.fuzzing.fuzz import attempt
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.text.text_model import TextModel
from tests.gateway.mutated import run
from tests.near import Deadline
from tests.times import ROOT

# Folders whose property tests start soon: none needs torch, a server or a compiler.
FOLDERS = (
    *("config", "cost", "decode_worker", "jobs", "kvpool", "launch", "machine", "metrics", "prefill_worker"),
    *("protocol", "router", "scheduling", "simulator", "transport", "worker"),
)
SEEDS = 10**12  # far more than were ever tried
MOST_SEEDS = 60  # a fast machine tries no more than a slow one, so that the same seed says the same on both
MOST_REQUESTS = 20_000  # likewise
AT_A_TIME = 5


def new_fuzz_seeds(start: int, until: float) -> list[int]:
    """Try seeds from this one on until the time is over; return those that fail."""
    failed, num_tried = [], 0
    for seed in range(start, start + MOST_SEEDS):
        if time.monotonic() >= until:
            break
        num_tried += 1
        if (failure := attempt(draw_scenario(seed)).failure) is not None:
            failed.append(seed)
            print(f"seed {seed} fails: {failure}\n    again: alignedserve fuzz --seed {seed}", flush=True)
    print(f"fuzz: {num_tried} new seeds from {start}, {len(failed)} failed", flush=True)
    return failed


def new_requests(seed: int, until: float) -> bool:
    """Send requests that a grammar draws until the time is over; return whether the gateway has answered all well."""
    with tempfile.TemporaryDirectory() as folder:
        told = run(TextModel.load(DEMO_FOLDER), Path(folder), seed, MOST_REQUESTS, until)
    print(f"requests: {told}" + (f"\n    again: python -m tests.gateway.mutated --seed {seed}" if told.faults else ""))
    return not told.faults


def property_tests(seed: int) -> list[str]:
    """Return the files with property tests, in an order that the seed draws."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")))
    found = [str(path.relative_to(ROOT)) for path in paths if "hypothesis" in path.read_text(encoding="utf-8")]
    Random(seed).shuffle(found)
    return found


def new_examples(seed: int, until: float) -> bool:
    """Run property tests on new examples until the time is over; return whether all hold."""
    deadline, tests = Deadline(until), property_tests(seed)
    given = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-m", "hypothesis"]
    given.append(f"--hypothesis-seed={seed}")
    os.environ["NEW_DRAWS"] = "1"  # tests/conftest.py
    while tests and time.monotonic() < until:  # some files at a time: to collect all takes longer than to run many
        pytest.main([*given, *tests[:AT_A_TIME]], plugins=[deadline])
        tests = tests[AT_A_TIME:]
    print(f"hypothesis: {deadline.num_run} tests with new examples, seed {seed}, {len(deadline.failed)} failed")
    for test in deadline.failed:
        print(f"    again: NEW_DRAWS=1 .venv/bin/pytest --hypothesis-seed={seed} '{test}'")
    return not deadline.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of a run before; default: a new one")
    given = parser.parse_args()
    seed = secrets.randbelow(SEEDS) if given.seed is None else given.seed
    print(f"python -m tests.draws --seed {seed}", flush=True)
    began = time.monotonic()
    failed = new_fuzz_seeds(seed, began + given.seconds * 0.4)
    is_well = new_requests(seed, began + given.seconds * 0.6)
    return int(not new_examples(seed, began + given.seconds) or bool(failed) or not is_well)


if __name__ == "__main__":
    sys.exit(main())
