"""Compare what the default scheduler does on published loads with the values that are committed beside this file.

    make figures                                                # all of it: 20 minutes of two quiet cores at most
    make figures FIGURES="--only 'bros:*' 'traces:*'"             # some loads, by patterns of their names
    make figures FIGURES="--write 'why the figures move'"       # and the values that ran become the committed ones
    make figures FIGURES="--drawn BASE"                         # loads that the base of a change draws, as in CI

Loads, all simulated, each with three seeds: every point of the published figures where the default runs
(lab/reproduce), traces and lengths (data/, 30 s), and the loads of the rule table (rules.py). A line for each load
and for each kind of them says how figures moved, in points or percent, with the error of the mean; above 0 is better.
Red, with exit code 1, is what got worse beyond the seeds' spread by a limit of common/shifts.py.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from alignedserve.lab.benchmarks.common.chat_loads import ANSWERS, CHATS, GPU
from alignedserve.lab.benchmarks.common.columns import Load, Row, kind_of, means, row_of
from alignedserve.lab.benchmarks.common.report import command
from alignedserve.lab.benchmarks.common.shifts import Seeds, Shifts, better, drawn, shifts, together, words, worse
from alignedserve.lab.benchmarks.rules import mixes
from alignedserve.lab.loads.figures.request_figures import attains, attains_p99
from alignedserve.lab.processes import processes
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.reproduce.papers import PAPERS

COMMITTED = Path(__file__).with_suffix(".jsonl")
FRESH = Path("build/figures.jsonl")
SEEDS = (0, 1, 2)
AT_ONCE = 2  # processes
DRAWN_S = 90.0  # of processor time, in CI
MOST_REASONS = 20
_CONVERSATIONS = "conversations,num_requests=100000"
_TRACES_S = 30
# Workload, its rates in a second, and the clusters: what the repository has of real lengths and arrivals.
_TRACES: tuple[tuple[str, str, Sequence[float], Sequence[str]], ...] = (
    ("azure", f"trace:{CHATS.resolve()}", (6.6, 13.8), ("2xcolocated", "1+1")),
    ("azure lengths, Poisson", f"lengths:{CHATS.resolve()}", (13.8, 24.0), ("2xcolocated",)),
    ("bwb", f"lengths:{ANSWERS.resolve()}", (1.5, 2.0, 3.0), ("2xcolocated",)),
    ("ShareGPT, drawn", "chat,num_requests=100000", (14.0, 23.7), ("2xcolocated", "1+1")),
    ("turns", _CONVERSATIONS, (2.5, 4.6), ("2xcolocated",)),
)


def loads(folder: Path) -> dict[str, Load]:
    """Return all loads by name; the folder gets their files."""
    found = (*_published(), *_traces(), *_of_rules(folder))
    return {load.name: load for load in found}


def _published() -> Iterator[Load]:
    """Yield each trial of the default once, named by the first figure that has it."""
    known = set[SimulationTrial]()
    for paper in PAPERS.values():
        counts = attains_p99 if paper.name == "apt-serve" else attains
        for figure in paper.figures:
            for label, x, trial in figure.trials(SEEDS[:1], False):
                if label in figure.ours and trial not in known:
                    known.add(trial)
                    yield Load(f"{paper.name}: {figure.number}, {x}, {trial.cluster}", trial, counts)


def _traces() -> Iterator[Load]:
    for name, workload, rates, clusters in _TRACES:
        for rate in rates:
            for cluster in clusters:
                trial = SimulationTrial("aligned", f"{workload},first_s={_TRACES_S}", cluster, 0, rate, GPU)
                yield Load(f"traces: {name}, {rate:g}/s, {cluster}", trial)


def _of_rules(folder: Path) -> Iterator[Load]:
    for mix, by_cluster in mixes(folder).items():
        for cluster, trial in by_cluster.items():
            yield Load(f"rules: {mix}, {cluster}", trial)


# --- What is committed


def read(path: Path) -> tuple[list[Row], dict[str, dict[int, Row]]]:
    """Return the reasons for the last writes, newest first, and the rows of each load by seed."""
    reasons, rows = list[Row](), defaultdict[str, dict[int, Row]](dict)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        tree = json.loads(line)
        if "reason" in tree:
            reasons.append(tree)
        else:
            rows[tree["load"]][tree["seed"]] = tree
    return reasons, rows


def write(path: Path, reasons: Iterable[Row], rows: Mapping[str, Mapping[int, Row]]) -> None:
    lines = [*reasons, *(by_seed[seed] for _, by_seed in sorted(rows.items()) for seed in sorted(by_seed))]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


# --- What is said


def line_of(load: str, before: Seeds, now: Seeds, moved: Shifts) -> str:
    red, gain = worse(moved), better(moved)
    state = "RED" if red else "new" if not before else "better" if gain else "ok"
    told = f": {words({**red, **gain})}" if red or gain else ""
    shown = ", ".join(f"{name} {value:.4g}" for name, value in means(now.values()).items())
    return f"{state:6} {load}{told} | {shown}"


def compare(before: Mapping[str, Seeds], now: Mapping[str, Seeds]) -> Iterator[tuple[str, Shifts]]:
    """Yield the shifts of each kind of loads, over all of its loads and seeds."""
    of_kind = defaultdict[str, list[Shifts]](list)
    for load, seeds in now.items():
        of_kind[kind_of(load)].append(shifts(before.get(load, {}), seeds))
    for kind, each in of_kind.items():
        yield f"all of {kind}", together(each)


def run(chosen: Sequence[Load]) -> Iterator[tuple[str, dict[int, Row]]]:
    """Yield the rows of each load, as they end."""
    trials = [replace(load, trial=replace(load.trial, seed=seed)) for load in chosen for seed in SEEDS]
    ended = defaultdict[str, dict[int, Row]](dict)
    with processes(AT_ONCE) as started:
        for row in started.in_order(row_of, trials):
            ended[row["load"]][row["seed"]] = row
            if len(by_seed := ended[row["load"]]) == len(SEEDS):
                yield row["load"], by_seed


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of loads' names; default: all")
    parser.add_argument("--drawn", metavar="BASE", help="loads that this commit draws, of 90 s of processor time")
    parser.add_argument("--write", metavar="REASON", help="commit what runs, for a reason that is kept in the file")
    args = parser.parse_args()
    reasons, before = read(COMMITTED)
    began_s, now, red = monotonic(), dict[str, dict[int, Row]](), list[str]()
    with TemporaryDirectory() as folder:
        known = loads(Path(folder))
        names = [name for name in known if any(fnmatch(name, pattern) for pattern in args.only)]
        if args.drawn:
            costs = {name: sum(row["cpu_s"] for row in before[name].values()) for name in names if name in before}
            names = drawn(costs, args.drawn, DRAWN_S)
        for load, by_seed in run([known[name] for name in names]):
            now[load] = by_seed
            write(FRESH, (), now)
            if args.write:  # at once: an interrupted run keeps what it has
                kept = {name: rows for name, rows in {**before, **now}.items() if name in known}
                write(COMMITTED, [{"reason": args.write, "loads": len(now)}, *reasons][:MOST_REASONS], kept)
            moved = shifts(before.get(load, {}), by_seed)
            red += [load] if worse(moved) else []
            print(line_of(load, before.get(load, {}), by_seed, moved), flush=True)
    for kind, moved in compare(before, now):
        red += [kind] if worse(moved) else []
        print(f"{'RED' if worse(moved) else 'ok':6} {kind}: {words(worse(moved) or better(moved)) or 'no shift'}")
    gone = sorted(before.keys() - known.keys())
    told = f"; RED: {'; '.join([*red, *(f'{name} is gone' for name in gone)])}" if red or gone else ""
    print(f"figures: {len(now)} loads, {len(red) + len(gone)} red, {monotonic() - began_s:.0f} s{told}")
    return int(bool(red or gone) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
