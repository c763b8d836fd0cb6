"""Find the first seed that fails: `python -m tests.mutants.first_failure FIRST COUNT`.

It prints the seed and the broken rule, or nothing. A seed that takes longer than SEED_S has failed, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from tests.mutants.planted import SOURCE, Planted
from tests.mutants.trying import environment

SEED_S = 120  # many hundred times as long as usual


def failing_seed(mutant: Planted, seeds: range) -> str:
    """Return the first seed that fails with the mutant and not without, and the rule that it breaks."""
    with TemporaryDirectory(prefix="mutants-") as scratch:
        planted = environment(mutant, Path(scratch))
        while seeds and (failure := _fuzz(seeds, planted)):
            seed = int(failure.partition(":")[0])
            if not _fuzz(range(seed, seed + 1), {}):
                return failure
            seeds = range(seed + 1, seeds.stop)
    return ""


def _fuzz(seeds: range, environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "tests.mutants.first_failure", str(seeds.start), str(len(seeds))]
    return subprocess.run(
        command, cwd=SOURCE, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False
    ).stdout.strip()


class _TakesTooLong(BaseException):
    """Not an Exception, which the fuzzer takes for a failure of a core."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TakesTooLong


def first_failure(seeds: range) -> str:
    from alignedserve.lab.fuzzing.fuzz import attempt  # forks that try mutants have imported none of ours
    from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario

    signal.signal(signal.SIGALRM, _alarm)
    for seed in seeds:
        signal.alarm(SEED_S)
        try:
            failure = attempt(draw_scenario(seed)).failure
        except _TakesTooLong:
            return f"{seed}: takes too long"
        finally:
            signal.alarm(0)
        if failure is not None:
            return f"{seed}: {failure.rule.value}"
    return ""


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    print(first_failure(range(first, first + count)))
