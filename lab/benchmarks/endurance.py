"""Measure whether a deployment stays as it is for hours: memory, descriptors, threads and latencies of a mixed load.

    python -m lab.benchmarks.endurance [--minutes 20] [--topology 1+1] [--load 4] [--state FILE] [--new]

All kinds of clients are there at once (common/mixed_load.py). Each half minute adds a line to the state file, until the
file has all minutes: a run may be stopped, and the next one goes on with a new deployment, as another part. The
table at the end is of the whole file: each figure's mean after the first minutes of each part, its least-squares slope
in an hour (a common slope, and a level of its own for each part) with its standard error, and whether it grows: surely,
by more than a percent in an hour. Nobody hurts the deployment here: a part that ends was ended for nothing. With
`--load 4` four processes for each processor compute all the time, and the deployment may
refuse work. Exit code 1: something grows, a process ended, or a client saw an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from alignedserve.core import Role
from alignedserve.lab.benchmarks.common.mixed_load import MixedLoad, SeenByClients
from alignedserve.lab.benchmarks.common.report import command
from alignedserve.lab.benchmarks.common.serving import ServedDeployment, beside, name_of, processes_under, serve
from alignedserve.lab.loads.records.distribution import percentile

EVERY_S = 30.0
WARM_UP_S = 300.0  # caches fill, and allocators find their sizes
LEAST_GROWTH = 0.01  # of the mean, in an hour
STATE = Path("build/endurance.jsonl")
_SIZES = {"Pss_Anon": "own MB", "Pss_Shmem": "shared MB"}

Sample = Mapping[str, Any]  # a line of the state file: part, at_s, figures {name: value}, done, errors


# --- Whether a figure grows


Series = Sequence[tuple[float, float]]  # (time, value)
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Slope:
    mean: float
    slope: float  # per unit of time
    error: float  # its standard error; infinite where there are too few values

    def grows(self, least: float) -> bool:
        """Return whether it surely grows by more than `least` in a unit of time."""
        return self.slope - SURE * self.error > least


def slope(parts: Sequence[Series]) -> Slope:
    """Return the common slope of all parts.

    What comes soon after another value is like it, so the error of a plain fit would be too small: it counts as many
    values as the residuals' correlation from each value to the next leaves independent.
    """
    values = [value for part in parts for _, value in part]
    centred = [_centred(part) for part in parts if part]
    spread = sum(at * at for part in centred for at, _ in part)
    free = len(values) - len(centred) - 1
    if free < 1 or not spread:
        return Slope(fmean(values) if values else 0.0, 0.0, inf)
    found = sum(at * value for part in centred for at, value in part) / spread
    residuals = [[value - found * at for at, value in part] for part in centred]
    squares = sum(rest * rest for part in residuals for rest in part)
    error = sqrt(squares / free / spread)
    return Slope(fmean(values), found, error * _widened(residuals, squares))


def _centred(part: Series) -> list[tuple[float, float]]:
    at, value = (fmean(each[axis] for each in part) for axis in (0, 1))
    return [(time - at, found - value) for time, found in part]


def _widened(residuals: Sequence[Sequence[float]], squares: float) -> float:
    """Return the factor for the error that the residuals' correlation makes."""
    if not squares:
        return 1.0
    together = sum(one * other for part in residuals for one, other in pairwise(part))
    correlation = min(0.95, max(0.0, together / squares))
    return sqrt((1 + correlation) / (1 - correlation))


# --- A sample


def names(deployment: ServedDeployment) -> dict[int, str]:
    """Return the name of each process of the deployment, by its process id."""
    titles = {deployment.pid: "-m alignedserve serve", **processes_under(deployment.pid)}
    return {pid: name_of(title) or f"process {title.split()[0]}" for pid, title in titles.items()}


def _is_part(name: str) -> bool:
    return name.partition("-")[0] in set(Role)


def figures(processes: Mapping[int, str], shared: Path, seen: SeenByClients) -> Iterator[tuple[str, float]]:
    """Yield the figures of the last half minute."""
    for pid, name in processes.items():
        with suppress(OSError):  # it has just ended
            for figure, value in _of_process(pid):
                yield f"{name}: {figure}", value
    yield "files in shared memory: MB", sum(file.stat().st_blocks for file in shared.rglob("*")) * 512 / 1e6
    for name, times in (("TTFT", seen.ttfts), ("gap", seen.gaps)):
        for percent in (50, 99):
            if times:
                yield f"chats: p{percent} {name} ms", 1e3 * percentile(times, percent)


def _of_process(pid: int) -> Iterator[tuple[str, float]]:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    for row, figure in _SIZES.items():
        yield figure, int(sizes[row]) / 1024
    yield "descriptors", len(os.listdir(f"/proc/{pid}/fd"))
    yield "threads", len(os.listdir(f"/proc/{pid}/task"))


# --- A part


async def watch(deployment: ServedDeployment, shared: Path, args: Any, part: int, left_s: float) -> None:
    """Load the deployment for this time, and add a line for each half minute."""
    load, began = MixedLoad(deployment.url, args.rate, seed=part, may_refuse=args.load > 0), perf_counter()
    playing, before = asyncio.create_task(load.play()), names(deployment)
    try:
        for number in range(1, round(left_s / EVERY_S) + 1):
            await asyncio.sleep(max(0.0, began + number * EVERY_S - perf_counter()))
            seen, there = load.take(), names(deployment)
            line: dict[str, Any] = {"part": part, "at_s": perf_counter() - began, "done": seen.done}
            ended = [f"{name} ended" for pid, name in before.items() if pid not in there and _is_part(name)]
            line["errors"], before = seen.errors + ended, there
            line["figures"] = {name: round(value, 3) for name, value in figures(there, shared, seen)}
            with args.state.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if playing.done():
                playing.result()
    finally:
        load.stop()
        await playing


def _compute() -> None:
    while True:
        pass


def run_part(args: Any, part: int, left_s: float) -> None:
    with TemporaryDirectory(prefix="endurance-", dir="/dev/shm") as shared, TemporaryDirectory() as folder:
        flags = ["--topology", args.topology, "--pool-directory", shared, "--jobs-directory", f"{folder}/jobs"]
        num_busy = round(args.load * (os.cpu_count() or 1))
        with beside(_compute, times=num_busy), serve("demo", *flags) as deployment:
            asyncio.run(watch(deployment, Path(shared), args, part, left_s))


# --- All parts


def read(path: Path) -> list[Sample]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def slopes(samples: Sequence[Sample], warm_up_s: float) -> dict[str, Slope]:
    """Return the slope in an hour of each figure."""
    warm = [sample for sample in samples if sample["at_s"] > warm_up_s]
    names = dict.fromkeys(name for sample in warm for name in sample["figures"])
    parts = sorted({sample["part"] for sample in warm})
    return {name: slope([_series(warm, part, name) for part in parts]) for name in sorted(names)}


def _series(samples: Sequence[Sample], part: int, name: str) -> list[tuple[float, float]]:
    return [
        (sample["at_s"] / 3600, sample["figures"][name])
        for sample in samples
        if sample["part"] == part and name in sample["figures"]
    ]


def table(samples: Sequence[Sample], warm_up_s: float) -> tuple[str, bool]:
    """Return the table of all parts, and whether all is well."""
    lines, found, is_well = [], slopes(samples, warm_up_s), True
    widest = max(map(len, found), default=0)
    for name, fitted in found.items():
        grows = fitted.grows(LEAST_GROWTH * abs(fitted.mean))
        is_well = is_well and not grows
        shown = f"{fitted.mean:10.2f} {fitted.slope:+10.2f} ± {fitted.error:.2f}"
        verdict = "grows" if grows else "flat" if fitted.error < inf else "too few values to tell"
        lines.append(f"{name:<{widest}} {shown:<34} {verdict}")
    done, errors = Counter[str](), [error for sample in samples for error in sample["errors"]]
    for sample in samples:
        done.update(sample["done"])
    head = f"{'':<{widest}} {'mean':>10} {'in an hour':>10}"
    parts, minutes = len({sample["part"] for sample in samples}), len(samples) * EVERY_S / 60
    ended = ", ".join(f"{count} {kind}" for kind, count in done.items())
    notes = [f"{minutes:g} minutes in {parts} parts; {ended or 'nothing'}; {len(errors)} errors"]
    notes += [] if found else [f"no figures: the first {warm_up_s:g} s of each part do not count (--warm-up-s)"]
    notes += dict.fromkeys(errors)
    return "\n".join([head, *lines, *notes]), is_well and not errors


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="that the state file is to have")
    parser.add_argument("--warm-up-s", type=float, default=WARM_UP_S, help="of each part, which do not count")
    parser.add_argument("--topology", default="1+1")
    parser.add_argument("--rate", type=float, default=1.0, help="chats in a second")
    parser.add_argument("--load", type=float, default=0.0, help="times that all processors are wanted; 0: by us alone")
    parser.add_argument("--state", type=Path, default=STATE, help="file with a line for each half minute")
    parser.add_argument("--new", action="store_true", help="begin the state file again")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends the deployment too
    args.state.parent.mkdir(parents=True, exist_ok=True)
    if args.new:
        args.state.unlink(missing_ok=True)
    samples = read(args.state)
    left_s = 60 * args.minutes - len(samples) * EVERY_S
    try:
        if left_s > 0:
            run_part(args, 1 + max((sample["part"] for sample in samples), default=0), left_s)
    except KeyboardInterrupt:
        print("stopped: the next run goes on with the same state file", file=sys.stderr)
    shown, is_well = table(read(args.state), args.warm_up_s)
    print(shown)
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
