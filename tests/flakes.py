"""Tests that failed and passed when they were tried again: a yellow run, which is remembered.

    python -m tests.flakes < names of tests        after such a run; exit code 1 where it is red all the same

Each such test becomes a line of tests/flakes.jsonl, which is committed: a clean checkout knows what happened before. A
run is red where the test did the same within the last twenty commits, or where it is of a part that must not race.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests" / "flakes.jsonl"
SOON = 20  # commits within which a second time is red
# A race in one of these may lose or repeat a token: one flake is red.
STRICT = ("transport", "worker", "prefill_worker", "decode_worker", "owner", "kvpool", "jobs", "test_transports.py")
Age = Callable[[str], int | None]  # commits since this one; None where that is unknown


@dataclass(frozen=True)
class Flake:
    test: str
    commit: str
    date: str
    mended_by: str = ""  # the commit that mended it: what comes later counts from there


def read(path: Path = KEPT) -> list[Flake]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Flake(**json.loads(line)) for line in lines]


def history(test: str, known: Sequence[Flake]) -> list[Flake]:
    return [flake for flake in known if flake.test == test]


def why_red(test: str, known: Sequence[Flake], age: Age) -> str:
    """Return why this flake fails the run; empty where it is yellow."""
    for part in Path(test.partition("::")[0]).parts[1:]:
        if part in STRICT:
            return f"a race in {part} may lose or repeat a token"
    for flake in history(test, known):
        since = age(flake.commit)
        if not flake.mended_by and (since is None or since <= SOON):
            return f"it did the same at {flake.commit}, {'some' if since is None else since} commits ago"
    return ""


def told(test: str, known: Sequence[Flake], age: Age) -> str:
    """Return the line of the summary: the colour, the test, and its history."""
    red, before = why_red(test, known, age), history(test, known)
    times = ", ".join(f"{flake.date} at {flake.commit}" for flake in before) or "never"
    return f"{'RED' if red else 'YELLOW'} {test}: before: {times}{f'; {red}' if red else ''}"


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _age(commit: str) -> int | None:
    count = _git("rev-list", "--count", f"{commit}..HEAD")
    return None if count is None else int(count)


def _names(lines: Iterator[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip()]


def main() -> int:
    known, tests = read(), _names(iter(sys.stdin))
    commit, date = _git("rev-parse", "--short", "HEAD") or "unknown", f"{datetime.now(timezone.utc):%Y-%m-%d}"
    for test in tests:
        print(told(test, known, _age))
    lines = [json.dumps(asdict(Flake(test, commit, date))) for test in tests]
    with KEPT.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    print(f"Commit these lines, which are in {KEPT.relative_to(ROOT)} now:", *lines, sep="\n")
    return int(any(why_red(test, known, _age) for test in tests))


if __name__ == "__main__":
    sys.exit(main())
