"""The score of the tests, by a sample of mutants: what became of each folder's, in score.md, and whether it fell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from tests.mutants.drawing import files_by_folder, is_core
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.operators import changes
from tests.mutants.planted import SOURCE, Planted
from tests.mutants.results import commit
from tests.mutants.trying import KILLED, SURVIVED, TIMED_OUT, Tried

SCORE = Path(__file__).with_name("score.md")
MAY_FALL = 1.0  # points
GOALS = {"cores": 85, "elsewhere": 70}  # percent


@dataclass(frozen=True)
class Row:
    """What became of a folder's mutants."""

    folder: str
    lines: int
    mutants: int
    killed: int
    timed_out: int
    survived: int
    equivalent: int
    commit: str

    def __str__(self) -> str:
        *counts, commit = (str(cell) for cell in astuple(self))
        return f"| {' | '.join(counts)} | {percent([self])} | {commit} |"


@dataclass(frozen=True)
class Score:
    """All rows, and a line for each survivor, by folder."""

    rows: Mapping[str, Row]
    survivors: Mapping[str, tuple[str, ...]]
    seed: int

    def has_survived(self, mutant: Planted) -> bool:
        return any(line.startswith(f"- `{mutant.name}`: ") for line in self.survivors.get(mutant.folder, ()))

    def tried_again(self, files: Iterable[str]) -> list[Planted]:
        """Return the survivors of some files of a folder, also where other code of the files has changed since."""
        all_of_them = (change.planted(file) for file in files for change in changes(file))
        return list({mutant.name: mutant for mutant in all_of_them if self.has_survived(mutant)}.values())

    def after(self, row: Row, survivors: Sequence[str], tried: Set[str]) -> tuple[Row, list[str]]:
        """Return a folder's row and survivors, where more were tried, or some that had survived were tried again. Of
        survivors whose code is another by now nothing is known: they go on as survivors."""
        before = self.rows.get(row.folder, Row(row.folder, 0, 0, 0, 0, 0, 0, ""))
        lines = self.survivors.get(row.folder, ())
        others = [line for line in lines if line[3:].partition("`: ")[0] not in tried]
        mutants = before.mutants + row.mutants - (len(lines) - len(others))
        killed, timed_out = before.killed + row.killed, before.timed_out + row.timed_out
        survived, equivalent = row.survived + len(others), before.equivalent + row.equivalent
        row = replace(row, mutants=mutants, killed=killed, timed_out=timed_out, survived=survived)
        return replace(row, equivalent=equivalent), [*survivors, *others]

    def with_folder(self, row: Row, survivors: Iterable[str]) -> Score:
        rows = {**self.rows, row.folder: row}
        order = sorted(rows, key=lambda folder: (not is_core(folder), folder))
        found = {**self.survivors, row.folder: tuple(survivors)}
        return Score(
            {folder: rows[folder] for folder in order}, {name: found.get(name, ()) for name in order}, self.seed
        )


def row_of(folder: str, lines: int, found: Mapping[Planted, Tried]) -> tuple[Row, list[str]]:
    """Count what became of a folder's mutants, and name the survivors."""
    same = [mutant for mutant in found if mutant.name in EQUIVALENT]
    counted = {mutant: each for mutant, each in found.items() if mutant not in same}
    verdicts = [each.verdict for each in counted.values()]
    killed, timed_out, survived = (verdicts.count(verdict) for verdict in (KILLED, TIMED_OUT, SURVIVED))
    row = Row(folder, lines, len(found), killed, timed_out, survived, len(same), commit())
    alive = [(mutant.name, each.num_tests) for mutant, each in counted.items() if each.verdict == SURVIVED]
    return row, [
        f"- `{name}`: {f'passes {number} tests' if number else 'no near test runs it'}" for name, number in alive
    ]


def percent(rows: Iterable[Row]) -> str:
    score = points(rows)
    return "-" if score is None else f"{score:.0f} %"


def points(rows: Iterable[Row]) -> float | None:
    """Return how many percent of the mutants, without those that are equivalent, were found."""
    rows = list(rows)
    all_of_them = sum(row.mutants - row.equivalent for row in rows)
    return 100 * sum(row.killed + row.timed_out for row in rows) / all_of_them if all_of_them else None


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    rows = list(rows)
    cores = [row for row in rows if is_core(row.folder)]
    return {"cores": cores, "elsewhere": [row for row in rows if row not in cores], "all": rows}


def falls(published: Score, now: Score) -> list[str]:
    """Say where the score of the folders that were tried now is lower than published by more than it may be."""
    then = groups(row for folder, row in published.rows.items() if folder in now.rows)
    found = []
    for name, rows in groups(row for folder, row in now.rows.items() if folder in published.rows).items():
        before, after = points(then[name]), points(rows)
        if before is not None and after is not None and after < before - MAY_FALL:
            found.append(f"{name}: {after:.1f} % of the mutants are found, and {before:.1f} % were")
    return found


def text(score: Score) -> str:
    rows = list(score.rows.values())
    totals = [
        f"| **{name}** | {sum(row.lines for row in some):,} | {sum(row.mutants for row in some)} "
        f"| {sum(row.killed for row in some)} | {sum(row.timed_out for row in some)} "
        f"| {sum(row.survived for row in some)} | {sum(row.equivalent for row in some)} | **{percent(some)}** | |"
        for name, some in groups(rows).items()
    ]
    survivors = [line for folder in score.rows for line in score.survivors.get(folder, ())]
    unknown = [folder for folder in files_by_folder() if folder not in score.rows]
    return "\n".join(
        [
            "# How many mutants the tests find",
            "",
            "Mutants drawn at random from all product Python, each tried against tests that may run it; tests that",
            "start whole deployments and the fuzzer's seeds are left out. Written by",
            f"`python -m tests.mutants --sample 600 --seed {score.seed} --write`, which fails where it finds less. A",
            "smaller number tries the first of these, `--more` those that a folder lacks, `--compiled 16` those of",
            "the C++ kernels. A folder's commit is that of its last run.",
            f"{sum(row.mutants for row in rows)} are tried: some 600, at least 3 of a folder, and 16 of C++ are all.",
            "",
            f"| {' | '.join(field.name.replace('_', ' ') for field in fields(Row)[:-1])} | score | commit |",
            "|---" * (len(fields(Row)) + 1) + "|",
            *map(str, rows),
            *totals,
            "",
            *(["Not tried yet: " + ", ".join(unknown) + ".", ""] if unknown else []),
            "## Survivors",
            "",
            *survivors,
            "",
        ]
    )


def read(path: Path = SCORE) -> Score:
    rows, survivors, seed = dict[str, Row](), dict[str, list[str]](), 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 9 and cells[1].isdigit() and _is_there(cells[0]):
            lines, mutants, killed, timed_out, survived, equivalent = map(int, cells[1:7])
            rows[cells[0]] = Row(cells[0], lines, mutants, killed, timed_out, survived, equivalent, cells[8])
        elif line.startswith("- `") and (folder := str(Path(line[3:].partition(" | ")[0]).parent)) in rows:
            survivors.setdefault(folder, []).append(line)
        elif named := re.search(r"--seed (\d+)", line):
            seed = int(named[1])
    return Score(rows, {folder: tuple(lines) for folder, lines in survivors.items()}, seed)


def _is_there(folder: str) -> bool:
    """Return whether a folder has files: one that is gone may have left those that Python compiled."""
    return any(path.is_file() for path in (SOURCE / folder).glob("*"))


def write(score: Score, path: Path = SCORE) -> None:
    path.write_text(text(score), encoding="utf-8")
