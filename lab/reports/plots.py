"""Draw runs, comparisons and sweeps with matplotlib, which is imported only when a plot is asked for.

`figure.savefig` chooses the canvas by the suffix of the file, so that no screen is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate, groupby
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from alignedserve.cli.plotting import KIND_COLOURS, new_figure, save_figure
from alignedserve.core import ServiceClass
from alignedserve.cost.model import Kind
from alignedserve.errors import SimulateError
from alignedserve.lab.loads.figures.request_figures import attains, gaps_s, requests_of_class, ttft_s
from alignedserve.lab.loads.records.distribution import MOST_DOTS, cdf, share
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.reports.comparison import MARKS, Cell, Sweep, compare, sweeps
from alignedserve.lab.reports.figure_rows import FigureRow
from alignedserve.lab.reports.step_figures import is_predicted
from alignedserve.lab.reports.trial import TrialRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_WINDOWS = 40  # in the plot of attainment over time
_LETTERS_IN_AN_INCH = 11  # width of letters in a title


def check(path: Path) -> None:
    """Raise SimulateError if no plot can be drawn at this path: the user should know before a run, not after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise SimulateError(f"a plot is a .png or an .svg, not {path.name}")
    new_figure(1, 1)


def are_possible() -> bool:
    return find_spec("matplotlib") is not None


def _title(figure: Figure, text: str) -> None:
    """Wrap the title to the width of the figure: the text of a workload may be long."""
    width = int(figure.get_figwidth() * _LETTERS_IN_AN_INCH)
    figure.suptitle(
        "\n".join(part for line in text.splitlines() for part in wrap(line, width, break_on_hyphens=False)),
        fontsize="medium",
    )


# --- A single run


def plot_run(record: RunRecord, title: str, path: Path) -> None:
    figure = new_figure(15, 8)
    _title(figure, title)
    axes = figure.subplots(2, 3).flat
    for draw, axis in zip((_ttft, _tbt, _attainment, _load, _step_times), axes, strict=False):
        draw(record, axis)
    axes[-1].set_axis_off()
    save_figure(figure, path)


def _ttft(record: RunRecord, axis: Axes) -> None:
    for service in ServiceClass:
        requests = [request for request in requests_of_class(record.requests, service) if request.token_at]
        _cdf(axis, [ttft_s(request) for request in requests], service.value.upper())
    label_axis(axis, "time to first token", "seconds", "share of requests with a token")


def _tbt(record: RunRecord, axis: Axes) -> None:
    for service in ServiceClass:
        requests = requests_of_class(record.requests, service)
        _cdf(axis, [gap for request in requests for gap in gaps_s(request)], service.value.upper())
    label_axis(axis, "time between tokens", "seconds", "share of gaps")


def _cdf(axis: Axes, values: Iterable[float], label: str) -> None:
    points = cdf(values)
    if points:
        axis.step([value for value, _ in points], [part for _, part in points], where="post", label=label)


def _attainment(record: RunRecord, axis: Axes) -> None:
    points = attainment_over_time(record)
    axis.plot([at for at, _ in points], [part for _, part in points], marker=".", label="RT")
    axis.set_ylim(-0.02, 1.02)
    label_axis(axis, f"attainment, by arrival in {_WINDOWS} windows", "seconds", "share of requests")


def attainment_over_time(record: RunRecord) -> list[tuple[float, float]]:
    """Return the attainment of the RT requests that arrived in each window of time, without empty windows."""
    window_s = record.duration_s / _WINDOWS or 1.0
    windows: dict[int, list[bool]] = {}
    for request in requests_of_class(record.requests, ServiceClass.RT):
        windows.setdefault(int((request.arrival_at - record.began_at) / window_s), []).append(attains(request))
    return [((number + 0.5) * window_s, share(held)) for number, held in sorted(windows.items())]


def _load(record: RunRecord, axis: Axes) -> None:
    spans = [(request.token_at[0], _end(record, request)) for request in record.requests if request.token_at]
    for label, changes in (("waiting", _waits(record)), ("running", _changes(record, spans))):
        points = over_time(changes)
        axis.step([at for at, _ in points], [count for _, count in points], where="post", label=label)
    label_axis(axis, "waiting for a first token; running", "seconds", "requests")


Change = tuple[float, int]  # time, and the change of the count at that time


def over_time(changes: Iterable[Change]) -> list[Change]:
    """Return the count after each change, with changes at the same time merged."""
    ordered = [
        (at, sum(change for _, change in same)) for at, same in groupby(sorted(changes), lambda change: change[0])
    ]
    return list(zip([at for at, _ in ordered], accumulate(change for _, change in ordered), strict=True))


def _waits(record: RunRecord) -> list[Change]:
    spans = [
        (request.arrival_at, request.token_at[0] if request.token_at else _end(record, request))
        for request in record.requests
    ]
    return _changes(record, spans)


def _changes(record: RunRecord, spans: Iterable[tuple[float, float]]) -> list[Change]:
    return [change for start, end in spans for change in ((start - record.began_at, 1), (end - record.began_at, -1))]


def _end(record: RunRecord, request: RequestRecord) -> float:
    return record.ended_at if request.outcome is RequestOutcome.OPEN else request.ended_at


def _step_times(record: RunRecord, axis: Axes) -> None:
    for kind in Kind:
        steps = [step for step in record.steps if step.shape.kind is kind and is_predicted(step)]
        steps = steps[:: len(steps) // MOST_DOTS + 1]
        if steps:
            true, predicted = [step.seconds * 1e3 for step in steps], [step.predicted_s * 1e3 for step in steps]
            axis.plot(true, predicted, ".", label=kind.value, color=KIND_COLOURS[kind], alpha=0.5)
            axis.axline((0, 0), slope=1, color="#888888", linewidth=0.8)
    label_axis(axis, "step time" if axis.lines else "step time: nothing was predicted", "true ms", "predicted ms")


def label_axis(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend()


# --- Several runs

_SHOWN = (
    "rt.attainment", "rt.tokens_in_time", "rt.ttft_s.p99", "rt.tbt_s.p99", "be.tokens_per_s", "tokens_per_s",
    "requests.refused", "papers.accelgen.goodput",
)  # fmt: skip


def plot_comparison(runs: Sequence[TrialRun], path: Path) -> None:
    """Draw a bar for each preset: the mean over the seeds ± half the range, the best preset darker."""
    comparison = compare(runs)
    figure = new_figure(16, 8)
    rate = runs[0].trial.rate
    at = "" if rate is None else f"{rate:g}/s, "
    _title(figure, f"{runs[0].trial.setting}\n{at}{_seeds(comparison.seeds)}")
    rows = {row.path: (row, cells) for row, cells in comparison.rows.items()}
    for name, axis in zip(_SHOWN, figure.subplots(2, 4).flat, strict=True):
        _bars(*rows[name], axis)
    save_figure(figure, path)


def _bars(row: FigureRow, cells: Mapping[str, Cell], axis: Axes) -> None:
    found = [(preset, cell) for preset, cell in cells.items() if isfinite(cell.mean)]
    factor, suffix = row.unit.value
    for preset, cell in found:
        strength = 0.9 if cell.is_best else 0.5
        axis.bar(preset, cell.mean * factor, yerr=cell.half_range * factor, capsize=4, alpha=strength)
    label_axis(axis, row.label, "", suffix.strip())
    axis.set_ylim(bottom=0, top=None if any(cell.mean for _, cell in found) else 1)
    axis.tick_params(axis="x", rotation=30)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}: mean ± half the range" if len(seeds) > 1 else f"seed {seeds[0]}"


def plot_several(runs: Sequence[TrialRun], path: Path) -> None:
    is_sweep = len({run.trial.rate for run in runs}) > 1
    (plot_sweep if is_sweep else plot_comparison)(runs, path)


def plot_sweep(runs: Sequence[TrialRun], path: Path) -> None:
    """Draw attainment against the rate, and the rates at which it crosses the marks."""
    figure = new_figure(8, 5)
    _title(figure, f"{runs[0].trial.setting}\n{_seeds(sorted({run.trial.seed for run in runs}))}")
    axis = figure.subplots()
    for number, sweep in enumerate(sweeps(runs)):
        _curve(sweep, f"C{number}", axis)
    for mark in MARKS:
        axis.axhline(mark, color="#888888", linestyle=":", linewidth=1)
    axis.set_ylim(-0.02, 1.02)
    label_axis(axis, "RT attainment", "arrivals in a second", "share of requests")
    save_figure(figure, path)


def _curve(sweep: Sweep, colour: str, axis: Axes) -> None:
    rates, found = [point.rate for point in sweep.points], [point.attainment for point in sweep.points]
    means, errors = [cell.mean for cell in found], [cell.half_range for cell in found]
    axis.errorbar(rates, means, errors, marker="o", capsize=3, color=colour, label=sweep.preset)
    for crossing in sweep.effective:
        if isfinite(crossing.rate) and not crossing.is_lower_bound:
            axis.plot(crossing.rate, crossing.mark, marker="v", color=colour)
            label, place = f"{crossing.rate:.3g}", (crossing.rate, crossing.mark)
            axis.annotate(label, place, xytext=(4, 4), textcoords="offset points")
