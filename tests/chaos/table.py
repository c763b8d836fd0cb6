"""The state file, a line for each trial, and the table of all its trials."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos.faults import KINDS
from tests.chaos.parts import ROLES
from tests.chaos.trial import Row

_SUMMED = (
    *("seconds", "streams", "tokens", "wrong", "near_ties", "broken", "refused", "blamed"),
    "false_alarms",
)


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(vars(row)) + "\n")


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return [
        replace(row, faults=Counter(row.faults), killed=Counter(row.killed), hung=Counter(row.hung)) for row in rows
    ]


def num_faults(rows: Iterable[Row], kind: str = "kills") -> int:
    return sum(row.faults[kind] for row in rows)


def least_tried(scenarios: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the scenario with the fewest trials, the first of them: parts of a run go on where the last one ended."""
    trials = Counter(row.scenario for row in rows)
    return min(scenarios, key=lambda name: trials[name])


def summed(name: str, rows: Sequence[Row]) -> Row:
    """Return one row for several trials."""
    first = rows[0]
    total = Row(name, first.topology, first.launcher, first.seed)
    for key in _SUMMED:
        setattr(total, key, sum(getattr(row, key) for row in rows))
    for row in rows:
        total.faults += row.faults
        total.killed += row.killed
        total.hung += row.hung
    total.noticed_s = max(row.noticed_s for row in rows)
    total.longest_pause_s = max(row.longest_pause_s for row in rows)
    total.problems = [problem for row in rows for problem in row.problems]
    total.absent = sorted({reason for row in rows for reason in row.absent})
    return total


def table(rows: Sequence[Row]) -> str:
    """Return the table of all trials, a row for each scenario, and what went wrong below it. The columns with the names
    of parts say how often those were killed."""
    names = list(dict.fromkeys(row.scenario for row in rows))
    totals = [summed(name, [row for row in rows if row.scenario == name]) for name in names]
    everything = summed("all", rows)
    everything.topology, everything.launcher = "", ""
    kinds = [kind for kind in KINDS if everything.faults[kind]]
    head = [
        *("scenario", "topology", "launcher", "min", *ROLES, *kinds, "streams", "tokens", "wrong"),
        *("near ties", "broken", "refused", "blamed", "false alarms", "noticed s", "pause s", "problems"),
    ]
    cells = [head, *(_cells(row, kinds) for row in (*totals, everything))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    notes = [
        "broken: the gateway was away; refused: 429 or 503, of all clients for a minute at most; blamed: given up "
        "after its workers were killed in a row; none is a problem, and all other streams were compared"
    ]
    notes += [f"hung: {what}: {number}" for what, number in sorted(everything.hung.items())]
    notes += [f"not here: {reason}" for reason in everything.absent]
    notes += [f"{row.scenario}: {problem}" for row in totals for problem in row.problems]
    return "\n".join([*lines, *notes])


def _cells(row: Row, kinds: Sequence[str]) -> list[str]:
    return [
        *(row.scenario, row.topology, row.launcher, f"{row.seconds / 60:.1f}"),
        *(str(row.killed[role]) for role in ROLES),
        *(str(row.faults[kind]) for kind in kinds),
        *(str(getattr(row, key)) for key in _SUMMED[1:]),
        f"{row.noticed_s:.1f}",
        f"{row.longest_pause_s:.1f}",
        str(len(row.problems)),
    ]
