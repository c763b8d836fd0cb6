"""Measure how well the cost model predicts the time of steps of this machine's engine.

    python -m lab.benchmarks.cost                        # two minutes on two idle cores
    python -m lab.benchmarks.cost --record FILE          # also writes the steps that tests/cost/test_cost.py replays

Held-out steps of the real engine have random sizes; the true time of a step is the median of four runs. Nothing else
should run on the machine. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import resolve
from alignedserve.config.config import Config
from alignedserve.config.sections import EngineConfig
from alignedserve.cost.fit import Point, fit, spread
from alignedserve.cost.model import CostModel, Kind, Shape
from alignedserve.cost.trials import Bounds, Trial, random_trials, trials
from alignedserve.engine.engine import Engine
from alignedserve.engine.profiling import Meter, measure_profile, own_cache, subject_of
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.models import llama160m
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.sizing.capacity import capacity

SHARED_MEMORY = Path("/dev/shm")
MEDIAN, P90 = 0.10, 0.25  # goals for relative errors


@dataclass(frozen=True)
class MeasuredSteps:
    profile: list[Point]
    held_out: list[Point]
    served: list[Point]  # single runs of steps in the order of serving


def worker(folder: Path) -> tuple[Bounds, Meter]:
    """Make the engine of a worker as `alignedserve serve` does: one thread on two cores."""
    room = capacity(Config(engine=EngineConfig(kv_memory_mb=1024)), read_config(folder))
    use_threads(None, workers=1)
    limits = room.limits
    engine = Engine(folder, num_blocks=limits.num_blocks, block_size=limits.block_size, dtype=room.dtype, tune_s=1.0)
    return Bounds(limits, room.max_model_len), Meter(engine)


def measure_model(folder: Path, budget_s: float, held_out: int, served: int) -> MeasuredSteps:
    """Measure steps. The truth of a held-out step is the median of runs before and after profiling: machines drift."""
    bounds, meter = worker(folder)
    profiled = {trial.shape for trial in trials(bounds)}
    new = [trial for trial in random_trials(bounds, held_out, seed=1) if trial.shape not in profiled]
    with own_cache(meter.engine):
        rounds = [[meter.run(trial).seconds for trial in new] for _ in range(2)]
        start = time.perf_counter()
        profile = measure_profile(meter, bounds, subject_of(meter.engine, folder), SHARED_MEMORY, budget_s)
        report(
            f"{folder.name}: time to profile {len(profile.points)} steps", time.perf_counter() - start, "s", goal=20.0
        )
        rounds += [[meter.run(trial).seconds for trial in new] for _ in range(2)]
        steps = [Point(trial.shape, meter.run(trial).seconds) for trial in serving(bounds, served, seed=2)]
    before, after = (sum(map(sum, pair)) for pair in (rounds[:2], rounds[2:]))
    report(f"{folder.name}: held-out steps after the profile, compared with before it", after / before, "1")
    truths = [Point(trial.shape, median(runs)) for trial, *runs in zip(new, *rounds, strict=True)]
    return MeasuredSteps([*profile.points], truths, steps)


def serving(bounds: Bounds, count: int, seed: int) -> Iterator[Trial]:
    """Yield steps as a worker runs them: prompts arrive, run in chunks beside decodes, and decode until they end."""
    chance, limits = random.Random(seed), bounds.limits
    waiting: list[list[int]] = []  # [prompt tokens, prompt tokens that have run]
    running: list[list[int]] = []  # [prefix, remaining tokens]
    for _ in range(count):
        if chance.random() < 0.1 and len(waiting) + len(running) < limits.max_batch:
            waiting.append([min(bounds.longest // 2, int(20 * 40 ** chance.random())), 0])
        if not waiting and not running:
            waiting.append([64, 0])
        prefixes = [prefix for prefix, _ in running]
        chunks = []
        if waiting:
            prompt, done = waiting[0]
            length = min(prompt - done, limits.max_step_tokens // 4)
            chunks.append((length, done))
            waiting[0][1] += length
        yield Trial(tuple(chunks), tuple(prefixes))
        running = [[prefix + 1, left - 1] for prefix, left in running if left > 1 and prefix + 2 < bounds.longest]
        if waiting and waiting[0][0] == waiting[0][1]:
            running.append([waiting.pop(0)[0], int(10 * 20 ** chance.random())])


def report_errors(name: str, model: CostModel, points: Sequence[Point]) -> None:
    for kind in Kind:
        steps = [point for point in points if point.shape.kind is kind]
        off = spread([abs(model.seconds(point.shape) / point.seconds - 1) for point in steps])
        goals = (None, None) if kind is Kind.MIXED else (MEDIAN, P90)
        report(f"{name} {kind.value}: median error", off.median, "share", goal=goals[0])
        report(f"{name} {kind.value}: p90 error", off.p90, "share", goal=goals[1])


def _rows(points: Sequence[Point]) -> list[list[Any]]:
    return [[*point.shape, float(f"{point.seconds:.5g}")] for point in points]


def _record(path: Path, measured: dict[str, MeasuredSteps]) -> None:
    """Write the file that tests read."""
    about = {"fields": [*Shape._fields, "seconds"], "made_by": "python -m lab.benchmarks.cost --record", "models": {}}
    models = {
        name: {"profile": _rows(model.profile), "held_out": _rows(model.held_out), "served": _rows(model.served)}
        for name, model in measured.items()
    }
    path.write_text(json.dumps(about | {"models": models}, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the measured steps")
    args = parser.parse_args()
    measured = {"demo": measure_model(resolve("demo"), 20.0, 25, 800)}
    with TemporaryDirectory() as folder:
        measured["llama160m"] = measure_model(llama160m(Path(folder) / "llama160m"), 20.0, 10, 0)
    for name, model in measured.items():
        report_errors(name, fit(model.profile), model.held_out)
    if args.record:
        _record(args.record, measured)
    sys.exit(status())


if __name__ == "__main__":
    main()
