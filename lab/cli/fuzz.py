"""`alignedserve fuzz`: injects faults into simulated deployments and checks their invariants after every event."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.lab.cli.flags import FuzzFlags
from alignedserve.lab.fuzzing.fuzz import FuzzVerdict, attempt, record
from alignedserve.lab.fuzzing.recording import first_difference, read_scenario, repeated, tell
from alignedserve.lab.fuzzing.scenario import lines
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.fuzzing.shrink import shrink
from alignedserve.lab.processes import processes

_TELL_EVERY_S = 5.0


def run(asked: FuzzFlags) -> int:
    """Return 0 where no seed fails and compared runs are the same, and 1 otherwise."""
    if asked.save is not None:
        check_writable(asked.save)
    if asked.diff is not None:
        left, right = asked.diff
        return tell(first_difference(left, right), str(left), str(right))
    if asked.replay is not None:
        return _replay(asked.replay)
    if asked.seed is not None:
        return _run_seed(asked, asked.seed)
    return _many(asked)


# --- Many seeds


@dataclass
class _FuzzTally:
    began_at: float = field(default_factory=time.monotonic)
    told_at: float = field(default_factory=time.monotonic)
    num_seeds: int = 0
    num_requests: int = 0
    num_events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[FuzzVerdict] = field(default_factory=list)

    def add(self, verdict: FuzzVerdict) -> None:
        self.num_seeds += 1
        self.num_requests += verdict.num_requests
        self.num_events += verdict.num_events
        self.faults.update(verdict.faults)
        if verdict.failure is not None:
            self.failed.append(verdict)

    def tell_now_and_then(self) -> None:
        if time.monotonic() - self.told_at < _TELL_EVERY_S:
            return
        self.told_at = time.monotonic()
        rate = self.num_seeds / (self.told_at - self.began_at)
        print(f"{self.num_seeds} seeds, {len(self.failed)} failed, {rate:.0f} seeds/s", file=sys.stderr, flush=True)

    def summary(self) -> str:
        took_s = max(time.monotonic() - self.began_at, 1e-9)
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.num_seeds} seeds, {len(self.failed)} failed, in {took_s:.1f} s\n"
            f"{self.num_requests} requests, {self.num_events} events, {self.num_events / took_s:.0f} of them a second\n"
            f"{self.faults.total()} faults: {faults}"
        )


def _many(asked: FuzzFlags) -> int:
    seeds = count(asked.start) if asked.until_failure else range(asked.start, asked.start + asked.seeds)
    tally = _FuzzTally()
    with processes(asked.jobs) as started:
        for verdict in started.in_order(_try, seeds):  # the number of jobs changes no output
            tally.add(verdict)
            tally.tell_now_and_then()
            if verdict.failure is not None:
                print(f"seed {verdict.seed} breaks {verdict}", flush=True)
                if asked.until_failure:
                    break
    print(tally.summary())
    if tally.failed:
        _explain(tally.failed[0], asked)
    elif asked.save is not None:
        print(f"nothing failed, so {asked.save} was not written")
    return 1 if tally.failed else 0


def _try(seed: int) -> FuzzVerdict:
    return attempt(draw_scenario(seed))


# --- One seed


def _run_seed(asked: FuzzFlags, seed: int) -> int:
    scenario = draw_scenario(seed)
    verdict = attempt(scenario) if asked.save is None else record(scenario, asked.save)
    print("\n".join(lines(scenario)))
    print(f"seed {seed}: {verdict}, {verdict.num_events} events, digest {verdict.digest}")
    if asked.save is not None:
        print(f"saved to {asked.save}")
    elif verdict.failure is not None:
        _explain(verdict, asked)
    return 0 if verdict.failure is None else 1


def _explain(verdict: FuzzVerdict, asked: FuzzFlags) -> None:
    """Print the shrunk schedule, and the command that shows it again."""
    assert verdict.failure is not None
    print(f"\nseed {verdict.seed}, shrunk:")
    smallest = shrink(draw_scenario(verdict.seed), verdict.failure.rule)
    print("\n".join(f"  {line}" for line in lines(smallest)))
    print(f"  it breaks {attempt(smallest)}")
    if asked.save is not None:
        record(smallest, asked.save)
        print(f"replay it, shrunk: alignedserve fuzz --replay {asked.save}")
    print(f"replay: alignedserve fuzz --seed {verdict.seed}")


def _replay(saved: Path) -> int:
    scenario = read_scenario(saved)

    def run(again: Path) -> None:
        verdict = record(scenario, again)
        print(f"this time: {verdict}, digest {verdict.digest}")

    return tell(repeated(saved, run))
