"""`alignedserve fuzz`: injects faults into simulated deployments and checks their invariants after every event."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.lab.fuzzing.fuzz import FuzzVerdict, attempt, record
from alignedserve.lab.fuzzing.recording import Difference, difference_text, first_difference, read_scenario
from alignedserve.lab.fuzzing.scenario import Scenario, lines
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.fuzzing.shrink import shrink
from alignedserve.machine.processes import processes
from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.source import PolicySource

_TELL_EVERY_S = 5.0


@dataclass(frozen=True)
class FuzzOptions:
    seeds: int  # how many
    start: int  # the first seed
    jobs: int
    until_failure: bool
    seed: int | None
    save: Path | None
    replay: Path | None
    diff: tuple[Path, Path] | None
    policy: PolicySource | None = None

    def scenario(self, seed: int) -> Scenario:
        drawn = draw_scenario(seed)
        return drawn if self.policy is None else drawn.with_own(OwnPolicies(self.policy))


def run(options: FuzzOptions) -> int:
    """Return 0 where no seed fails and compared runs are the same, and 1 otherwise."""
    if options.save is not None:
        check_writable(options.save)
    if options.diff is not None:
        return _diff(*options.diff)
    if options.replay is not None:
        return _replay(options.replay)
    if options.seed is not None:
        return _run_seed(options, options.seed)
    return _many(options)


# --- Many seeds


@dataclass
class _Tally:
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


def _many(options: FuzzOptions) -> int:
    seeds = count(options.start) if options.until_failure else range(options.start, options.start + options.seeds)
    tally = _Tally()
    with _trying(options) as verdicts:
        for verdict in verdicts(seeds):
            tally.add(verdict)
            tally.tell_now_and_then()
            if verdict.failure is not None:
                print(f"seed {verdict.seed} breaks {verdict}", flush=True)
                if options.until_failure:
                    break
    print(tally.summary())
    if tally.failed:
        _explain(tally.failed[0], options)
    elif options.save is not None:
        print(f"nothing failed, so {options.save} was not written")
    return 1 if tally.failed else 0


@contextmanager
def _trying(options: FuzzOptions) -> Iterator[Callable[[Iterable[int]], Iterator[FuzzVerdict]]]:
    """Return a function that yields verdicts in the order of the seeds: the number of jobs changes no output."""
    verdict_of = partial(_try, options)
    if options.jobs == 1:
        yield lambda seeds: map(verdict_of, seeds)
        return
    with processes(options.jobs) as started:
        yield lambda seeds: started.in_order(verdict_of, seeds)


def _try(options: FuzzOptions, seed: int) -> FuzzVerdict:
    return attempt(options.scenario(seed))


# --- One seed


def _run_seed(options: FuzzOptions, seed: int) -> int:
    scenario = options.scenario(seed)
    verdict = attempt(scenario) if options.save is None else record(scenario, options.save)
    print("\n".join(lines(scenario)))
    print(f"seed {seed}: {verdict}, {verdict.num_events} events, digest {verdict.digest}")
    if options.save is not None:
        print(f"saved to {options.save}")
    elif verdict.failure is not None:
        _explain(verdict, options)
    return 0 if verdict.failure is None else 1


def _explain(verdict: FuzzVerdict, options: FuzzOptions) -> None:
    """Print the shrunk schedule, and the command that shows it again."""
    assert verdict.failure is not None
    print(f"\nseed {verdict.seed}, shrunk:")
    smallest = shrink(options.scenario(verdict.seed), verdict.failure.rule)
    print("\n".join(f"  {line}" for line in lines(smallest)))
    print(f"  it breaks {attempt(smallest)}")
    if options.save is not None:
        record(smallest, options.save)
        print(f"replay it, shrunk: alignedserve fuzz --replay {options.save}")
    own = "" if options.policy is None else f" --policy {options.policy.name}"
    print(f"replay: alignedserve fuzz --seed {verdict.seed}{own}")


# --- Saved runs


def _replay(saved: Path) -> int:
    scenario = read_scenario(saved)
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / f"again{saved.suffix}"
        verdict = record(scenario, again)
        found = first_difference(saved, again)
    print(f"this time: {verdict}, digest {verdict.digest}")
    return _tell(found, "saved", "this time")


def _diff(first: Path, second: Path) -> int:
    return _tell(first_difference(first, second), str(first), str(second))


def _tell(found: Difference | int, first: str, second: str) -> int:
    print(difference_text(found, first, second))
    return 0 if isinstance(found, int) else 1
