"""Hurt real deployments while they serve, and judge what their clients saw.

Each trial starts a deployment, asks it questions calmly, asks them again while its processes, disks, clocks and wires
are hurt for some seconds, and calmly once more; other clients keep files and responses, run a batch and meet limits. A
round has one trial of each scenario. Each trial adds a line to the state file, the next one is of a scenario that has
the fewest there, and the table at the end is of the whole file: a long run may be stopped and go on. Exit code 1: the
oracle (oracle.py) found an anomaly, or a deployment did not come back or left something; the folder beside the state
file has the log and the history of each trial.
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from alignedserve.lab.benchmarks.common.report import command, several
from tests.chaos.faults import KINDS
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.table import append, least_tried, num_faults, read, table
from tests.chaos.trial import run

STATE = Path("build/chaos.jsonl")


def _parser() -> argparse.ArgumentParser:
    names = [scenario.name for scenario in SCENARIOS]
    parser = command(__doc__)
    parser.add_argument("--kills", type=int, help="rounds until the state file has this many kills; default: one round")
    parser.add_argument("--hangs", type=int, help="rounds until it has this many hangs: parts hang beside kills")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no trial after this time")
    parser.add_argument("--no-rest", action="store_true", help="faults do not wait until clients get tokens")
    parser.add_argument("--only", type=several(str, names), default=names, help=f"scenarios: {', '.join(names)}")
    parser.add_argument("--faults", type=several(str, KINDS), default=KINDS, help=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=15.0, help="of faults in a trial")
    parser.add_argument("--state", type=Path, default=STATE, help="file with a line for each trial")
    parser.add_argument("--new", action="store_true", help="begin the state file again")
    parser.add_argument("--table", action="store_true", help="print the table of the state file, and try nothing")
    return parser


def main() -> None:
    given = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends the deployment too
    if given.new:
        given.state.unlink(missing_ok=True)
    try:
        if not given.table:
            _try(given.only, given)
    except KeyboardInterrupt:
        print("stopped: the next run goes on with the same state file", file=sys.stderr)
    rows = read(given.state)
    if rows:
        print(table(rows))
    sys.exit(any(row.problems for row in rows))


def _try(chosen: list[str], given: argparse.Namespace) -> None:
    until, by_name = time.monotonic() + 60 * given.minutes, {scenario.name: scenario for scenario in SCENARIOS}
    for number in itertools.count():
        rows = read(given.state)
        goals = [(kind, goal) for kind, goal in (("kills", given.kills), ("hangs", given.hangs)) if goal is not None]
        has_all = all(num_faults(rows, kind) >= goal for kind, goal in goals)
        is_done = has_all if goals else number == len(chosen)
        if is_done or time.monotonic() >= until:
            return
        scenario = by_name[least_tried(chosen, rows)]
        how = {"hangs": given.hangs is not None, "rests": not given.no_rest, "faults": given.faults}
        scenario = replace(scenario, **how)
        row = run(scenario, len(rows), given.seconds, given.state.with_suffix(".logs"))
        append(given.state, row)
        print(f"{scenario.name}: {dict(row.faults)}, {row.streams} streams, {len(row.problems)} problems", flush=True)


if __name__ == "__main__":
    main()
