"""Measure how well the cost model predicts the time of steps, and how much time a prediction takes.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import resolve
from alignedserve.config.config import Config
from alignedserve.config.sections import EngineConfig
from alignedserve.core import NO_KV, Decode, Sampling, StepPlan
from alignedserve.cost.fit import OnlineCost, Point, fit, spread
from alignedserve.cost.model import CostModel, Kind, Shape, StepEstimate
from alignedserve.cost.trials import Bounds, Trial, random_trials, trials
from alignedserve.engine.engine import Engine
from alignedserve.engine.profiling import Meter, measure_profile, own_cache, subject_of
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.models import llama160m
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.timing import least_us
from alignedserve.lab.devices import gpu_truth
from alignedserve.sizing.capacity import capacity

SHARED_MEMORY = Path("/dev/shm")
MEDIAN, P90 = 0.10, 0.25  # goals for relative errors
DRIFT, DRIFT_ERROR = 1.6, 0.15
STEPS_AFTER = range(200, 300)


@dataclass(frozen=True)
class Measured:
    profile: list[Point]
    held_out: list[Point]
    served: list[Point]  # single runs of steps in the order of serving


# --- The CPU engine


def worker(folder: Path) -> tuple[Bounds, Meter]:
    """Make the engine of a worker as `alignedserve serve` does: one thread on two cores."""
    room = capacity(Config(engine=EngineConfig(kv_memory_mb=1024)), read_config(folder))
    use_threads(None, workers=1)
    limits = room.limits
    engine = Engine(folder, num_pairs=limits.num_pairs, block_size=limits.block_size, dtype=room.dtype, tune_s=1.0)
    return Bounds(limits, room.max_model_len), Meter(engine)


def measure_model(folder: Path, budget_s: float, held_out: int, served: int) -> Measured:
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
    return Measured([*profile.points], truths, steps)


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


# --- Drift


def replay(online: OnlineCost, steps: Sequence[Point], factor: Callable[[int], float]) -> list[float]:
    """Return the relative errors of predictions, each made before the model learned from the step."""
    errors = []
    for at, step in enumerate(steps):
        seconds = step.seconds * factor(at)
        errors.append(abs(online.model.seconds(step.shape) / seconds - 1))
        online.learn(step.shape, seconds)
    return errors


def report_drift(name: str, measured: Measured) -> None:
    change = len(measured.served) - STEPS_AFTER.stop
    errors = replay(OnlineCost(measured.profile), measured.served, lambda at: DRIFT if at >= change else 1.0)
    before, after = errors[:change], [errors[change + at] for at in STEPS_AFTER]
    report(f"{name} served steps: median error before the drift", median(before), "share")
    report(f"{name} served steps: median error 200-300 steps after x{DRIFT}", median(after), "share", goal=DRIFT_ERROR)


# --- GPUs


def report_gpu(name: str, steps: dict[tuple[int, int, int, int], float]) -> None:
    """Fit sizes that are powers of four, and a hundred mixed steps; all other steps are held out."""
    points = {key: Point(_gpu_shape(*key), seconds) for key, seconds in steps.items()}
    known = [key for key in points if all(size in _PROFILED for size in key)]
    mixed = [key for key in known if points[key].shape.kind is Kind.MIXED]
    dropped = set(random.Random(0).sample(mixed, max(0, len(mixed) - 100)))
    model = fit([points[key] for key in known if key not in dropped])
    held_out = [point for key, point in points.items() if key not in known]
    report_errors(name, model, held_out)


_PROFILED = {0, *(4**power for power in range(8))}


def _gpu_shape(chunk: int, cached: int, decodes: int, prefix: int) -> Shape:
    return Shape.build([(chunk, cached)] if chunk else [], [prefix] * decodes)


def gpu_steps(name: str) -> dict[tuple[int, int, int, int], float]:
    """Return steps from a compiled profile, with sizes between those that it holds."""
    truth = gpu_truth.load(name)
    chunks, cached = [16, 24, 48, 64, 96, 256, 400, 700, 1024, 1500, 2048], [0, 16, 100, 256, 700, 1500, 4096, 10_000]
    counts, prefixes = [1, 3, 4, 10, 16, 30, 64, 100], [16, 64, 200, 256, 700, 1024, 2500, 4096, 9000, 16_384]
    decodes = [(count, prefix) for count in counts for prefix in prefixes]
    prompts = [(chunk, before) for chunk in chunks for before in cached]
    keys = [(0, 0, *decode) for decode in decodes] + [(*prompt, 0, 0) for prompt in prompts]
    keys += [(*prompt, *decode) for prompt in prompts[::2] for decode in decodes[::3]]
    return {key: truth.seconds_of([key[:2]] if key[0] else [], [key[3]] * key[2]) for key in keys}


# --- The time of predictions


def report_speed(model: CostModel, online: OnlineCost) -> None:
    chance = random.Random(0)
    prefixes = [chance.randrange(1, 2000) for _ in range(128)]
    decodes = tuple(Decode("r", 1, prefix, NO_KV, Sampling(), 0) for prefix in prefixes)
    estimate, plan = StepEstimate(model), StepPlan(0, (), decodes)
    for prefix in prefixes:
        estimate.add_decode(prefix)

    def add_and_ask() -> None:
        estimate.add_decode(700)
        _ = estimate.seconds

    report("one decode more: what if", least_us(lambda: estimate.with_decode(700), 20_000), "us", goal=2.0)
    report("one chunk more: what if", least_us(lambda: estimate.with_chunk(64, 700), 20_000), "us", goal=2.0)
    report("one decode more: added, then asked", least_us(add_and_ask, 20_000), "us", goal=2.0)
    report("a step of 128 decodes", least_us(lambda: model.plan_seconds(plan), 1000), "us", goal=20.0)
    shape = Shape.build([], prefixes)
    report("learning from a step", least_us(lambda: online.learn(shape, 0.01), 200), "us")


# --- The command


def _rows(points: Sequence[Point]) -> list[list[Any]]:
    return [[*point.shape, float(f"{point.seconds:.5g}")] for point in points]


def _record(path: Path, measured: dict[str, Measured]) -> None:
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
    parser.add_argument("--only", choices=("cpu", "gpu", "speed"), help="run a single part")
    args = parser.parse_args()
    parts = (args.only,) if args.only else ("gpu", "cpu", "speed")
    if "gpu" in parts:
        for name in gpu_truth.names():
            report_gpu(name, gpu_steps(name))
    if "cpu" in parts:
        measured = {"demo": measure_model(resolve("demo"), 20.0, 25, 800)}
        with TemporaryDirectory() as folder:
            measured["llama160m"] = measure_model(llama160m(Path(folder) / "llama160m"), 20.0, 10, 0)
        for name, model in measured.items():
            report_errors(name, fit(model.profile), model.held_out)
        report_drift("demo", measured["demo"])
        if args.record:
            _record(args.record, measured)
    if "speed" in parts:
        points = [Point(_gpu_shape(*key), seconds) for key, seconds in gpu_steps(gpu_truth.names()[0]).items()][::20]
        online = OnlineCost(points)
        report_speed(online.model, online)
    sys.exit(status())


if __name__ == "__main__":
    main()
