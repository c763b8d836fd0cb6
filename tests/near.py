"""The tests near the files that differ from main: `python -m tests.near`, in a minute at most.

    python -m tests.near [FILE...] [--seconds 60]

Changed tests come first, then those nearest to each changed file (tests/mutants/nearest.py). By tests/times.json
their files fit into the time; the run ends at its first failure, or when the time is over, and says what it left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from draw_folders import modules
from tests.mutants.nearest import near_tests
from tests.times import ROOT, UNKNOWN_S, numbers

START_S = 8.0  # of pytest, and the imports of tests that need torch
MAIN = ("main", "origin/main", "HEAD")
# Tests of what is not Python of the product.
OF_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "kernels": ("tests/kernels/test_spans.py", "tests/kernels/test_elementwise.py", "tests/kernels/test_attention.py"),
    "docs": ("tests/house/test_pages.py", "tests/house/test_site.py"),
    "deploy/chart": ("tests/cluster/test_chart.py",),
    "deploy": ("tests/cluster/test_config.py", "tests/metrics/test_board.py"),
    "alignedserve/dashboard": ("tests/dashboard/test_page.py", "tests/end_to_end/test_dashboard.py"),
    "alignedserve/gateway": ("tests/dashboard/test_page.py", "tests/gateway/test_app.py"),
}
OF_ALL = ("tests/house/test_pages.py", "tests/house/test_circles.py")


class Deadline:
    """A plugin of pytest that ends a run when its time is over, and counts."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._session: pytest.Session | None = None
        self.num_run = 0
        self.failed: list[str] = []  # tests, and files that could not be collected
        self.left_out: dict[str, None] = {}  # tests that have not run yet

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self.left_out = dict.fromkeys(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.num_run += 1
        self.left_out.pop(nodeid, None)
        if self._session is not None and time.monotonic() >= self._until:
            self._session.shouldstop = "the time is over"


def changed() -> list[str]:
    """Return the files that differ from where this branch left main, and new ones."""
    base = next(filter(None, (_git("merge-base", "HEAD", name) for name in MAIN)))
    files = [*_git("diff", "--name-only", base).split("\n"), *_git("ls-files", "-o", "--exclude-standard").split("\n")]
    return [file for file in dict.fromkeys(files) if file and (ROOT / file).exists()]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def near(file: str) -> list[str]:
    """Return the test files near a file, the nearest first."""
    path = Path(file)
    if path.parts[0] == "tests":
        if path.name.startswith("test_") and path.suffix == ".py":
            return [file]
        beside = sorted((ROOT / path.parent).rglob("test_*.py"))
        return [str(test.relative_to(ROOT)) for test in beside if path.stem in test.read_text(encoding="utf-8")]
    if path.suffix != ".py" or ROOT / file not in modules().values():
        return list(next((tests for folder, tests in OF_FOLDERS.items() if file.startswith(f"{folder}/")), OF_ALL))
    return near_tests(file)


def by_turns(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the first of each list, then the second of each, and so on, each once."""
    turns: Iterator[str | None] = (name for turn in zip_longest(*lists) for name in turn)
    return list(dict.fromkeys(name for name in turns if name is not None))


def that_fit(tests: Iterable[str], known_s: Mapping[str, float], seconds: float) -> list[str]:
    """Return files whose tests fit into the time together, the first ones that do; the very first one always."""
    chosen: list[str] = []
    left_s = seconds - START_S
    for test in tests:
        takes_s = known_s.get(test, UNKNOWN_S)
        if not chosen or takes_s <= left_s:
            chosen.append(test)
            left_s -= takes_s
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: what differs from main")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    os.chdir(ROOT)
    files = given.files or changed()
    tests = by_turns(map(near, files))
    if not tests:
        print("nothing differs from main")
        return 0
    chosen = that_fit(tests, numbers()["files_s"], given.seconds)
    deadline = Deadline(until)
    options = ["-q", "--no-header", "-x", f"--timeout={given.seconds:g}", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *chosen], plugins=[deadline])
    print(f"{len(files)} changed files, {len(tests)} files of tests near them; {deadline.num_run} tests ran.")
    later = [test for test in tests if test not in chosen]
    if later:
        print(f"Left out, for want of time: {len(later)} files, first {', '.join(later[:5])}")
    if deadline.left_out:
        print(f"Left out, when it ended: {len(deadline.left_out)} tests, first {next(iter(deadline.left_out))}")
    return int(bool(deadline.failed) or status not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED))


if __name__ == "__main__":
    sys.exit(main())
