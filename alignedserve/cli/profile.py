"""`alignedserve profile`: measures how long steps take on this machine, and how well the cost model predicts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

from alignedserve.architectures.families.model_config import read_config
from alignedserve.cli.plotting import KIND_COLOURS, new_figure, save_figure
from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config
from alignedserve.cost.fit import Point, spread
from alignedserve.cost.model import CostModel, Kind
from alignedserve.cost.profile import Profile, Subject, save
from alignedserve.errors import ConfigError, ProfileError, SimulateError
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import FreeMemory
from alignedserve.sizing.model_folder import model_folder, with_model
from alignedserve.sizing.sizes import with_sizes

if TYPE_CHECKING:
    from alignedserve.cost.trials import Bounds
    from alignedserve.engine.profiling import Meter

_HELD_OUT = 20  # steps of a kind
_SEED = 1
_LEAST_BUDGET_S = 2.0


def run(config: Config, out: Path, budget_s: float) -> int:
    check_writable(out)
    if budget_s < _LEAST_BUDGET_S:
        raise ProfileError(f"--budget {budget_s:g} is too short: give it {_LEAST_BUDGET_S:g} s at least")
    profile, held_out = _measure(config, budget_s)
    save(profile, out)
    picture = out.with_name(out.name + ".svg")
    _print(profile, held_out)
    print(f"\n{out}: the profile")
    try:
        _draw(profile.model, held_out, profile.subject.device, picture)
    except SimulateError as error:  # the profile is good without its picture
        print(f"no picture of it: {error}")
    else:
        print(f"{picture}: predicted against measured")
    return 0


def _measure(config: Config, budget_s: float) -> tuple[Profile, list[Point]]:
    from alignedserve.cost.trials import random_trials
    from alignedserve.engine.profiling import measure, measure_profile, own_cache

    opened = open_meter(config)
    meter, bounds = opened.meter, opened.bounds
    with own_cache(meter.engine):
        shared_memory = Path(opened.config.kvpool.directory)
        profile = measure_profile(meter, bounds, opened.subject, shared_memory, budget_s)
        held_out = measure(meter, random_trials(bounds, _HELD_OUT, _SEED), budget_s)
    return profile, [*held_out.points]


@dataclass(frozen=True)
class OpenedMeter:
    """An engine that serves nobody, ready to be measured."""

    config: Config
    meter: Meter
    bounds: Bounds
    subject: Subject


def open_meter(config: Config) -> OpenedMeter:
    """Load the model on this machine's CPU as a worker does."""
    from alignedserve.engine.engine import Engine
    from alignedserve.engine.profiling import Meter, bounds_of, subject_of
    from alignedserve.executor.loading import use_threads, weights_for

    config, about_demo = with_model(config)
    if about_demo is not None:
        print(f"alignedserve: warning: {about_demo}", file=sys.stderr)
    if config.engine.tensor_parallel_size > 1:
        raise ConfigError("this measures one process: set engine.tensor_parallel_size to 1")
    if config.engine.on_gpu:
        raise ConfigError("this measures the CPU: set engine.device to cpu; workers on GPUs measure at their start")
    config = replace(config, engine=replace(config.engine, device=DeviceKind.CPU))  # auto may stand for a GPU
    folder = model_folder(config)
    model = read_config(folder)
    config = with_sizes(config, model, folder, FreeMemory.here(Path(config.kvpool.directory)))
    room = capacity(config, model)
    topology = config.topology
    use_threads(config.engine.threads, topology.prefill_workers + topology.decode_workers)
    limits, tune_s = room.limits, config.engine.tune_s
    engine = Engine(
        folder,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        dtype=room.dtype,
        kv_dtype=room.kv_dtype,
        quantization=config.engine.quantization,
        tune_s=tune_s,
        tensors_of=weights_for(config),
    )
    bounds = bounds_of(engine, room.limits, room.max_model_len)
    return OpenedMeter(config, Meter(engine), bounds, subject_of(engine, folder))


def _print(profile: Profile, held_out: Sequence[Point]) -> None:
    subject = profile.subject
    print(f"{len(profile.points)} steps on {subject.device}, {subject.dtype}, {profile.quietness}")
    print("errors are of steps that were held out\n")
    print(f"{'steps':10}{'measured':>10}{'held out':>10}{'median error':>14}{'90 % below':>12}")
    for kind in Kind:
        known = [point for point in profile.points if point.shape.kind is kind]
        new = [point for point in held_out if point.shape.kind is kind]
        print(f"{kind.value:10}{len(known):>10}{len(new):>10}{_errors(profile, new)}")
    for route, link in profile.links.items():
        print(f"{route.value.replace('_', ' ')}: {link.bandwidth / 1e9:.1f} GB/s after {link.latency_s * 1e6:.0f} µs")


def _errors(profile: Profile, points: Sequence[Point]) -> str:
    if not points:
        return f"{'-':>14}{'-':>12}"
    off = spread([abs(profile.model.seconds(point.shape) / point.seconds - 1) for point in points])
    return f"{off.median:>14.1%}{off.p90:>12.1%}"


_SIDE = 6  # inches
_BAND = 1.25  # as a factor: the shaded part


def _draw(model: CostModel, points: Sequence[Point], title: str, path: Path) -> None:
    """Draw predicted against measured times, a dot per step; raise SimulateError if matplotlib or the file fails."""
    figure = new_figure(_SIDE, _SIDE)
    axes = figure.subplots()
    pairs = [(point.seconds * 1e3, model.seconds(point.shape) * 1e3, point.shape.kind) for point in points]
    times = [time for measured, predicted, _ in pairs for time in (measured, predicted) if time > 0] or [1.0]
    low = floor(log10(min(times)))
    ends = [10.0**low, 10.0 ** max(ceil(log10(max(times))), low + 1)]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured", ylabel="predicted", aspect="equal")
    axes.grid(color="#cccccc")
    axes.fill_between(ends, [end / _BAND for end in ends], [end * _BAND for end in ends], color="#eeeeee", zorder=0)
    axes.plot(ends, ends, color="#888888", linewidth=1)
    for kind, colour in KIND_COLOURS.items():
        dots = [(measured, predicted) for measured, predicted, of_step in pairs if of_step is kind]
        measured, predicted = [dot[0] for dot in dots], [dot[1] for dot in dots]
        axes.scatter(measured, predicted, s=10, color=colour, alpha=0.7, label=kind.value)
    axes.legend()
    figure.suptitle(f"{title}: milliseconds of held-out steps; shaded: within 25 %", fontsize="medium")
    save_figure(figure, path)
