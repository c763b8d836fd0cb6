"""`alignedserve fuzz`: injects faults into simulated deployments and checks their invariants after every event."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.pool import Pool
from pathlib import Path

from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.simulator.fuzzing.fuzz import FuzzVerdict, attempt, record
from alignedserve.simulator.fuzzing.recording import Difference, difference_text, first_difference, read_scenario
from alignedserve.simulator.fuzzing.scenario import lines
from alignedserve.simulator.fuzzing.scenario_drawing import draw_scenario
from alignedserve.simulator.fuzzing.shrink import BUDGET, shrink

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
    shrink_runs: int = BUDGET


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
    with _trying(options.jobs) as verdicts:
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
def _trying(jobs: int) -> Iterator[Callable[[Iterable[int]], Iterator[FuzzVerdict]]]:
    """Return a function that yields verdicts in the order of the seeds: the number of jobs changes no output."""
    if jobs == 1:
        yield lambda seeds: map(_try, seeds)
        return
    with _pool(jobs) as pool:
        yield lambda seeds: _in_parts(pool, seeds, 64 * jobs)


def _pool(jobs: int) -> Pool:
    """Start processes that ignore Ctrl-C: a terminal sends it to all of them, and this process ends the others."""
    resource_tracker.ensure_running()  # it would undo the next line
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return get_context("spawn").Pool(jobs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _in_parts(pool: Pool, seeds: Iterable[int], size: int) -> Iterator[FuzzVerdict]:
    """Yield verdicts of parts of the seeds: a pool takes all seeds at once, and they may have no end."""
    left = iter(seeds)
    while part := list(islice(left, size)):
        yield from pool.imap(_try, part)


def _try(seed: int) -> FuzzVerdict:
    return attempt(draw_scenario(seed))


# --- One seed


def _run_seed(options: FuzzOptions, seed: int) -> int:
    scenario = draw_scenario(seed)
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
    smallest = shrink(draw_scenario(verdict.seed), verdict.failure.rule, options.shrink_runs)
    print("\n".join(f"  {line}" for line in lines(smallest)))
    print(f"  it breaks {attempt(smallest)}")
    if options.save is not None:
        record(smallest, options.save)
        print(f"replay it, shrunk: alignedserve fuzz --replay {options.save}")
    print(f"replay: alignedserve fuzz --seed {verdict.seed}")


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
