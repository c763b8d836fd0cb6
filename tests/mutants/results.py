"""The table of what kills which mutant, in results.md: read, brought up to date, written."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.planted import SOURCE

RESULTS = Path(__file__).with_name("results.md")
NOT_TRIED = "not tried"
_HEAD = "| mutant | in | unit test | fuzzer: seed and broken rule | commit |"


@dataclass(frozen=True)
class Finding:
    """The unit test and the seed that kill a mutant, as far as they were found."""

    test: str  # the first unit test that fails, or nothing
    seed: str  # the first seed that fails and the rule that it breaks, or nothing
    num_seeds: int  # how many seeds were tried, at most
    commit: str

    @property
    def is_killed(self) -> bool:
        return bool(self.test or self.seed)


Findings = Mapping[str, Finding]  # by the names of mutants


def read(path: Path = RESULTS) -> dict[str, Finding]:
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ") and row != _HEAD]
    return {name: _finding(test, seed, commit) for name, _, test, seed, commit in cells}


def _finding(test: str, seed: str, commit: str) -> Finding:
    test = test if test.startswith("tests/") else ""
    if seed.startswith("none of "):
        return Finding(test, "", int(seed.removeprefix("none of ").replace(",", "")), commit)
    return Finding(test, "" if seed == NOT_TRIED else seed, 0, commit)


def write(mutants: tuple[Mutant, ...], findings: Findings, path: Path = RESULTS) -> None:
    text = (
        "# The tests and seeds that kill each mutant\n\n"
        f"Written by `python -m tests.mutants --write`, last on {date.today()}. The table names the first unit test\n"
        "that fails, of those near the file, and the first seed. Both pass without the mutant.\n\n"
    )
    path.write_text(text + table(mutants, findings) + "\n", encoding="utf-8")


def table(mutants: tuple[Mutant, ...], findings: Findings) -> str:
    """Return the table as Markdown, and the totals."""
    rows = [_row(mutant, findings[mutant.name]) for mutant in mutants if mutant.name in findings]
    return "\n".join([_HEAD, "|---|---|---|---|---|", *rows, "", totals(mutants, findings)])


def _row(mutant: Mutant, found: Finding) -> str:
    test = found.test or (f"equivalent: {mutant.is_the_same}" if mutant.is_the_same else "none")
    seed = found.seed or (f"none of {found.num_seeds:,}" if found.num_seeds else NOT_TRIED)
    return f"| {mutant.name} | {mutant.file} | {test} | {seed} | {found.commit} |"


def totals(mutants: tuple[Mutant, ...], findings: Findings) -> str:
    tried = [(mutant, findings[mutant.name]) for mutant in mutants if mutant.name in findings]
    killed = [found for _, found in tried if found.is_killed]
    alive = [mutant for mutant, found in tried if not found.is_killed]
    tests, seeds = sum(bool(found.test) for found in killed), sum(bool(found.seed) for found in killed)
    both = sum(bool(found.test and found.seed) for found in killed)
    same = sum(bool(mutant.is_the_same) for mutant in alive)
    return (
        f"{len(tried)} mutants: {len(killed)} killed ({tests} by unit tests, {seeds} by the fuzzer, {both} by both), "
        f"{same} equivalent, {len(alive) - same} surviving."
    )


def commit() -> str:
    """Return the commit of the source, with a plus where files differ from it."""
    git = ["git", "-C", str(SOURCE)]
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", ".", ":!tests/mutants/*.md"], check=False
    ).returncode
    short = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return short.stdout.strip() + "+" * bool(changed)
