"""Try kinds of poison on real deployments, and say what each did.

A kind is a place and a way (places.py). Each trial adds a line to the state file, and the next run leaves out what has
its lines there: so a long run may be stopped and go on. Exit code 1: an innocent request was lost or answered
wrongly, the poison's client was not told once and honestly, a deployment ended, or more than three parts died.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from alignedserve.lab.benchmarks.common.report import command, several
from tests.poison.places import ALL, PLACES, WAYS, Place
from tests.poison.trial import Row, Trials

STATE = Path("build/poison.jsonl")
_TURN = 12  # trials on one deployment


def _parser() -> argparse.ArgumentParser:
    names = [place.name for place in PLACES]
    parser = command(__doc__)
    parser.add_argument("--topologies", type=several(str, ALL), default=ALL, help=", ".join(ALL))
    parser.add_argument("--places", type=several(str, names), default=names, help="; ".join(names))
    parser.add_argument("--ways", type=several(str, WAYS), default=WAYS, help=", ".join(WAYS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no trial after this many minutes")
    parser.add_argument(
        "--times", type=int, default=1, help="trials of each kind in each topology, those before counted"
    )
    parser.add_argument("--state", type=Path, default=STATE, help="file with a line for each trial")
    parser.add_argument("--table", action="store_true", help="print the table of the state file, and try nothing")
    return parser


def main() -> None:
    given = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends the deployment too
    try:
        if not given.table:
            _try(given)
    except KeyboardInterrupt:
        print("stopped: the next run goes on with the same state file", file=sys.stderr)
    rows = read(given.state)
    print(table(rows))
    sys.exit(any(row.problems for row in rows))


def _try(given: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * given.minutes
    logs = given.state.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < until:
        tried = Counter((row.topology, row.place, row.way) for row in read(given.state))
        left = {
            topology: [
                (place, way)
                for place, way in kinds(topology, given.places, given.ways)
                if tried[topology, place.name, way] < given.times
            ]
            for topology in given.topologies
        }
        topology = max(left, key=lambda name: len(left[name]))
        if not left[topology]:
            return
        with tempfile.TemporaryDirectory() as folder:
            trials = Trials(topology, Path(folder), logs)
            try:
                with trials.deployed() as deployment:
                    for place, way in left[topology][:_TURN]:
                        if time.monotonic() >= until:
                            break
                        row = trials.run(deployment, place, way)
                        append(given.state, row)
                        print(line(row), flush=True)
                        if row.problems:  # the next trial shall not suffer from it
                            break
            except AssertionError as error:
                print(f"{topology}: {str(error)[:500]}", file=sys.stderr)


def kinds(topology: str, places: Iterable[str], ways: Sequence[str]) -> list[tuple[Place, str]]:
    """Return all kinds of a topology: first each place once, in one way or another, then all again in the next way."""
    there = [place for place in PLACES if place.name in places and topology in place.topologies]
    return [(place, ways[(PLACES.index(place) + turn) % len(ways)]) for turn in range(len(ways)) for place in there]


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    return [Row(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def line(row: Row) -> str:
    died = " ".join(row.deaths) or "none"
    said = f"{row.topology}, {row.place}, {row.way}: {row.said}; {row.strikes} strikes, deaths: {died}, {row.seconds} s"
    broken = f", {row.broken} broken" if row.broken else ""
    return said + broken + "".join(f"\n    PROBLEM {problem}" for problem in row.problems)


def table(rows: Sequence[Row]) -> str:
    """Return a line for each place: what its kinds did, and all problems below."""
    at = defaultdict[str, list[Row]](list)
    for row in rows:
        at[row.place].append(row)
    cells = [("place", "trials", "not reached", "most deaths", "broken", "said", "seconds", "problems")]
    for place, here in [*at.items(), ("all", [*rows])]:
        said = Counter(row.said for row in here)
        cells.append(
            (
                place,
                str(len(here)),
                str(sum(not row.strikes for row in here)),
                str(max((len(row.deaths) for row in here), default=0)),
                str(sum(row.broken for row in here)),
                ", ".join(f"{number} x {what}" for what, number in said.most_common(4)),
                f"{sum(row.seconds for row in here):.0f}",
                str(sum(bool(row.problems) for row in here)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    kinds_of = {(row.place, row.way) for row in rows if row.strikes}
    lines.append(f"{len(kinds_of)} kinds struck, in {len({row.topology for row in rows})} topologies")
    return "\n".join([*lines, *(line(row) for row in rows if row.problems)])


if __name__ == "__main__":
    main()
