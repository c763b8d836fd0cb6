"""Find the first seed that fails: `python -m tests.mutants.first_failure FIRST COUNT`.

It prints the seed and the broken rule, or nothing. A seed that takes longer than SEED_S has failed, too.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from alignedserve.simulator.fuzzing.fuzz import attempt
from alignedserve.simulator.fuzzing.scenario_drawing import draw_scenario

SEED_S = 120  # many hundred times as long as usual


class _TakesTooLong(BaseException):
    """Not an Exception, which the fuzzer takes for a failure of a core."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TakesTooLong


def first_failure(seeds: range) -> str:
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
