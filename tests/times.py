"""What the tests cost, by folder: `python -m tests.times` shows it for the last run, and warns beyond a budget.

    python -m tests.times              the last whole run's folders and slowest tests; exit code 1 at twice a budget
    python -m tests.times --write      tests/times.md and tests/times.json of that run
    python -m tests.times --budgets    and new budgets: a quarter more than that run took
    python -m tests.times --some       the last run of some tests, instead

A run of all tests keeps its durations in build/tests, and a run of some beside them (tests/conftest.py). A test's
processor time is its own and that of processes that it started and that have ended: it stays about the same on a busy
machine, so budgets are of it. On a slower one all folders take longer: each is measured by what the median folder
takes of its own. Rare tests cost no budget: which of them run is drawn anew for each change (tests/rare.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "tests"  # a file for each process of the last run of all tests
KEPT_OF_SOME = KEPT / "some"
PAGE, NUMBERS = ROOT / "tests" / "times.md", ROOT / "tests" / "times.json"
SHARED = "tests/end_to_end/conftest.py::deployments that all tests share, at their end"
SLOWEST = 10
RED = 2.0  # times a budget
UNKNOWN_S = 3.0  # of a file that no run has timed
LEAST_BUDGET_S = 15  # what is faster is not watched: some starts of Python more would exceed it
FEW = 5  # folders tell nothing of the machine


@dataclass(frozen=True)
class Timing:
    """What one test took, with the fixtures that it set up."""

    test: str  # as pytest names it: tests/owner/test_owner.py::test_name
    wall_s: float
    processor_s: float
    is_rare: bool = False

    @property
    def folder(self) -> str:
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "."

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


_CHOOSE = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "maxfail")


def folder_of(config: pytest.Config) -> Path:
    """Return where a run keeps its durations: one of some tests, such as `make draws`, forgets none of all tests."""
    is_whole = config.args == config.getini("testpaths") and not any(map(config.getoption, _CHOOSE))
    return KEPT if is_whole else KEPT_OF_SOME


def begin(kept: Path = KEPT) -> None:
    """Forget the run before."""
    for path in kept.glob("times*.jsonl"):
        path.unlink()


def keep(timings: Iterable[Timing], process: str, kept: Path = KEPT) -> None:
    """Write what a process of the run has timed."""
    kept.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(timing)) + "\n" for timing in timings]
    (kept / f"times{process}.jsonl").write_text("".join(lines), encoding="utf-8")


def last_run(kept: Path = KEPT) -> list[Timing]:
    paths = sorted(kept.glob("times*.jsonl"))
    return [Timing(**json.loads(line)) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def by_folder(timings: Iterable[Timing]) -> dict[str, list[Timing]]:
    """Return the timings of each folder without the rare tests, the folder that takes longest first."""
    folders: dict[str, list[Timing]] = defaultdict(list)
    for timing in timings:
        if not timing.is_rare:
            folders[timing.folder].append(timing)
    return dict(sorted(folders.items(), key=lambda item: -_processor_s(item[1])))


def _processor_s(timings: Iterable[Timing]) -> float:
    return sum(timing.processor_s for timing in timings)


def by_file(timings: Iterable[Timing]) -> dict[str, float]:
    """Return the processor seconds of each file, without its rare tests."""
    files: dict[str, float] = defaultdict(float)
    for timing in timings:
        files[timing.file] += timing.processor_s * (not timing.is_rare)
    return {file: round(seconds, 1) for file, seconds in sorted(files.items())}


def budgets_of(timings: Iterable[Timing]) -> dict[str, int]:
    """Return a quarter more than each folder took, in whole steps of 5 s."""
    folders = by_folder(timings)
    return {folder: 5 * math.ceil(1.25 * _processor_s(folders[folder]) / 5) for folder in sorted(folders)}


def over(timings: Iterable[Timing], budgets: Mapping[str, int]) -> dict[str, float]:
    """Return the folders that took more than their budget, and how many times the budget they took.

    Where the median folder takes 1.6 times its budget the machine is slow, and one that takes 2.4 times is at 1.5."""
    taken = {folder: _processor_s(each) for folder, each in by_folder(timings).items() if folder in budgets}
    shares = {folder: seconds / max(LEAST_BUDGET_S, budgets[folder]) for folder, seconds in taken.items()}
    telling = [share for folder, share in shares.items() if budgets[folder] >= LEAST_BUDGET_S]
    pace = max(1.0, statistics.median(telling)) if len(telling) >= FEW else 1.0
    return {folder: share / pace for folder, share in shares.items() if share > pace}


def table(timings: Sequence[Timing], budgets: Mapping[str, int]) -> str:
    """Return the page's table: a row for each folder."""
    lines = [
        "| folder | tests | processor min | budget min | slowest test, in processor s |",
        "|---|---|---|---|---|",
    ]
    rare = [timing for timing in timings if timing.is_rare]
    for folder, each in {**by_folder(timings), **({"rare tests": rare} if rare else {}), "**all**": timings}.items():
        slowest = max(each, key=lambda timing: timing.processor_s)
        budget = f"{budgets[folder] / 60:.1f}" if folder in budgets else ""
        name = slowest.test.partition("::")[2]
        lines.append(
            f"| {folder} | {len(each):,} | {_processor_s(each) / 60:.1f} | {budget} | "
            f"`{name}` {slowest.processor_s:.0f} |"
        )
    lines += ["", f"The {SLOWEST} slowest tests:", "", "| test | processor s | wall s |", "|---|---|---|"]
    slow = sorted(timings, key=lambda timing: -timing.processor_s)[:SLOWEST]
    lines += [f"| `{timing.test}` | {timing.processor_s:.0f} | {timing.wall_s:.0f} |" for timing in slow]
    return "\n".join(lines)


def page(timings: Sequence[Timing], budgets: Mapping[str, int], commit: str) -> str:
    return (
        "# What the tests cost\n\n"
        f"By `python -m tests.times --write` after a run of all tests at {commit}. Processor time is of the tests and\n"
        "the processes that they start, without collection. `.ci/run` warns beyond a budget, and fails at twice.\n\n"
        f"{table(timings, budgets)}\n"
    )


def numbers() -> dict[str, dict[str, float]]:
    """Return the budget of each folder, and the seconds of each file in the run of the page."""
    found: dict[str, dict[str, float]] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page and the numbers of this run")
    parser.add_argument("--budgets", action="store_true", help="set each folder's budget by this run, and write")
    parser.add_argument("--some", action="store_true", help="show the last run of some tests")
    return parser


def main() -> int:
    given = _parser().parse_args()
    timings = last_run(kept_in := KEPT_OF_SOME if given.some else KEPT)
    if not timings:
        print(f"there is no run in {kept_in}: run pytest first", file=sys.stderr)
        return 2
    if given.some:
        print(table(timings, {}))
        return 0
    kept = numbers()
    budgets = budgets_of(timings) if given.budgets else {name: int(most) for name, most in kept["budgets_s"].items()}
    if given.write or given.budgets:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        PAGE.write_text(page(timings, budgets, done.stdout.strip() or "an unknown commit"), encoding="utf-8")
        written = {"budgets_s": budgets, "files_s": by_file(timings)}
        NUMBERS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(table(timings, budgets))
    beyond = over(timings, budgets)
    for folder, share in beyond.items():
        print(f"warning: tests/{folder} took {share:.1f} times its budget of {budgets[folder]} s of processor time")
    return int(any(share >= RED for share in beyond.values()))


if __name__ == "__main__":
    sys.exit(main())
