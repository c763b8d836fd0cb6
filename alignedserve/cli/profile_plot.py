"""Draw predicted against measured step times: a dot per step, on the diagonal where it was predicted well."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path

from alignedserve.cost.fit import Point
from alignedserve.cost.model import CostModel
from alignedserve.simulator.reports.plots import KIND_COLOURS, new_figure, save_figure

_SIDE = 6  # inches
_BAND = 1.25  # as a factor: the shaded part


def draw(model: CostModel, points: Sequence[Point], title: str, path: Path) -> None:
    """Write the picture; raise SimulateError where matplotlib is absent or the file cannot be written."""
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
