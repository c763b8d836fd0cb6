"""Draws load tests as one page of HTML, which needs nothing else: a table, and a picture of each figure in SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from alignedserve.core import ServiceClass
from alignedserve.lab.bench.report import MeasuredRun, error_lines, heads, labels, note_lines, rows
from alignedserve.lab.loads.figures.request_figures import (
    end_to_end_s,
    finished,
    gaps_s,
    keeps_all,
    mean_tpot_s,
    requests_of_class,
    ttft_s,
)
from alignedserve.lab.loads.records.distribution import cdf, share
from alignedserve.lab.loads.records.records import RequestRecord

_COLOURS = {  # of a class, a shade for each run
    ServiceClass.RT: ("#2f74e0", "#7aa7f0", "#1746a0", "#5a6f9c"),
    ServiceClass.BE: ("#c96a0a", "#eaa65c", "#8f4700", "#a08468"),
}
_MOST_POINTS = 400  # of a curve
_WINDOWS = 30  # of a curve over time
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;"
    "color-scheme:light dark}"
    "h1{font-size:1.4em}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td{padding:.15em .8em;text-align:right;border-bottom:1px solid #8884}td:first-child{text-align:left}"
    "figure{display:inline-block;margin:1em 1em 0 0}svg{max-width:100%;height:auto}li{margin:.2em 0}"
)


def page(runs: Sequence[MeasuredRun]) -> str:
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test</title>',
        f"<style>{_STYLE}</style><h1>Load test</h1>",
        _list(heads(runs)),
        *(f"<p><b>{escape(label + _conclusion(run))}</b></p>" for label, run in zip(labels(runs), runs, strict=True)),
        "".join(f"<figure>{chart.svg()}</figure>" for chart in charts(runs)),
        _table(rows(runs)),
        *(
            f"<h2>{title}</h2>{_list(lines)}"
            for title, lines in [("Errors", error_lines(runs)), ("Notes", note_lines(runs))]
            if lines
        ),
    ]
    return "\n".join([*parts, "</html>"]) + "\n"


def _conclusion(run: MeasuredRun) -> str:
    """Return a sentence on what the clients of each class got."""
    said, seconds = list[str](), run.record.duration_s or 1.0
    for service, name in ((ServiceClass.RT, "real-time requests"), (ServiceClass.BE, "best-effort requests")):
        if not (requests := requests_of_class(run.record.requests, service)):
            continue
        tokens = sum(len(request.token_at) for request in requests) / seconds
        slo = requests[0].slo
        promise = f" (first token in {slo.ttft_s:g} s, gaps of {1e3 * slo.tbt_s:g} ms)"
        promised = promise if service is ServiceClass.RT else ""
        kept = 100 * share([keeps_all(request) for request in requests])
        said.append(
            f"{kept:.1f} % of {len(requests):,} {name} got all they were promised{promised}, {tokens:,.0f} tokens/s"
        )
    return "; ".join(said) + "."


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(cells: Sequence[Sequence[str]]) -> str:
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


# --- Charts


@dataclass(frozen=True)
class _ChartGroup:
    """The requests of a class in a run, and how they are drawn."""

    label: str
    service: ServiceClass
    colour: str
    is_dashed: bool
    began_at: float
    duration_s: float
    requests: list[RequestRecord]

    def curve(self, points: Iterable[tuple[float, float]]) -> Curve:
        return Curve(self.label, self.colour, self.is_dashed, tuple(points))

    @property
    def streamed(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.token_at and request.job is None]


Values = Callable[[_ChartGroup], Iterable[float]]


def charts(runs: Sequence[MeasuredRun]) -> list[Chart]:
    groups = list(_groups(runs))
    spread = [
        _spread("time to first token", groups, lambda group: map(ttft_s, group.streamed), "ttft_s"),
        _spread(
            "gaps between tokens", groups, lambda group: (gap for one in group.streamed for gap in gaps_s(one)), "tbt_s"
        ),
        _spread("mean time per output token", groups, _tpots, "tbt_s"),
        _spread("end to end", groups, lambda group: map(end_to_end_s, finished(group.requests))),
    ]
    over_time = [
        Chart("kept promises, by arrival", "seconds", "share of requests", _kept(groups), most_y=1.0),
        Chart("output", "seconds", "tokens in a second", _output(groups)),
    ]
    return [chart for chart in (*spread, *over_time) if chart.curves]


def _groups(runs: Sequence[MeasuredRun]) -> Iterator[_ChartGroup]:
    for number, (label, run) in enumerate(zip(labels(runs), runs, strict=True)):
        record = run.record
        for service in ServiceClass:
            requests = requests_of_class(record.requests, service)
            if requests:
                name = f"{label.strip()} {service.value.upper()}".strip()
                colour = _COLOURS[service][number % len(_COLOURS[service])]
                yield _ChartGroup(name, service, colour, number % 2 == 1, record.began_at, record.duration_s, requests)


def _spread(title: str, groups: Sequence[_ChartGroup], values: Values, promised: str = "") -> Chart:
    """Return the shares of values up to each value, and the first promise of real-time requests about it."""
    asked = (request.slo for group in groups if group.service is ServiceClass.RT for request in group.requests)
    promise: float | None = getattr(next(asked, None), promised, None) if promised else None
    curves = [group.curve(_thinned(cdf(values(group)))) for group in groups]
    return Chart(
        title,
        "seconds",
        "share that took at most this",
        _drawn(curves),
        most_y=1.0,
        is_logarithmic=True,
        promise=promise,
    )


def _tpots(group: _ChartGroup) -> Iterator[float]:
    return (mean_tpot_s(request) for request in group.streamed if len(request.token_at) > 1)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    every = len(points) // _MOST_POINTS + 1
    return points[::-every][::-1]


def _kept(groups: Sequence[_ChartGroup]) -> list[Curve]:
    def points(group: _ChartGroup) -> Iterator[tuple[float, float]]:
        for begin, end in _windows(group):
            kept = [keeps_all(request) for request in group.requests if begin <= request.arrival_at < end]
            if kept:
                yield (begin + end) / 2 - group.began_at, share(kept)

    return _drawn([group.curve(points(group)) for group in groups])


def _output(groups: Sequence[_ChartGroup]) -> list[Curve]:
    def points(group: _ChartGroup) -> Iterator[tuple[float, float]]:
        ats = sorted(at for request in group.requests for at in request.token_at)
        place = 0
        for begin, end in _windows(group):
            before = place
            while place < len(ats) and ats[place] < end:
                place += 1
            yield (begin + end) / 2 - group.began_at, (place - before) / (end - begin)

    return _drawn([group.curve(points(group)) for group in groups])


def _windows(group: _ChartGroup) -> Iterator[tuple[float, float]]:
    width = (group.duration_s or 1.0) * (1 + 1e-9) / _WINDOWS
    return pairwise(group.began_at + width * number for number in range(_WINDOWS + 1))


def _drawn(curves: Iterable[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.points]


# --- Curves in SVG


_WIDTH, _HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 62  # margins
_STEPS = (1, 2, 5, 10)
_TICKS = 6
_PROMISE = "#1c8a4a"
_LEGEND_WIDTH = 90  # of an entry


@dataclass(frozen=True)
class Curve:
    label: str
    colour: str
    is_dashed: bool
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _ChartAxis:
    """Numbers along an axis, and the place of each between 0 and 1."""

    least: float
    most: float
    is_logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], is_logarithmic: bool) -> _ChartAxis:
        """Return an axis over these values; a linear one begins with 0."""
        if not is_logarithmic:
            return cls(0.0, max(values) or 1.0, False)
        above = [value for value in values if value > 0] or [1.0]
        least, most = min(above), max(above)
        return cls(least, most, True) if most > least else cls(least / 2, most * 2, True)

    def place(self, value: float) -> float:
        if not self.is_logarithmic:
            return (value - self.least) / (self.most - self.least)
        return (log10(max(value, self.least)) - log10(self.least)) / (log10(self.most) - log10(self.least))

    @property
    def ticks(self) -> list[float]:
        return list(self._logarithmic_ticks() if self.is_logarithmic else self._linear_ticks())

    def _linear_ticks(self) -> Iterator[float]:
        rough = (self.most - self.least) / _TICKS
        power = 10.0 ** floor(log10(rough))
        step = next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))
        for number in range(ceil(self.least / step), floor(self.most / step * (1 + 1e-9)) + 1):
            yield number * step

    def _logarithmic_ticks(self) -> Iterator[float]:
        powers = range(floor(log10(self.least)), ceil(log10(self.most)) + 1)
        steps = (1, 2, 5) if len(powers) <= _TICKS // 2 else (1,)
        for tick in (step * 10.0**power for power in powers for step in steps):
            if self.least <= tick * (1 + 1e-9) and tick <= self.most * (1 + 1e-9):
                yield tick


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    most_y: float | None = None  # the end of the y axis, where the values do not decide it
    is_logarithmic: bool = False  # the x axis
    promise: float | None = None  # a place on the x axis

    def svg(self) -> str:
        xs = [x for curve in self.curves for x, _ in curve.points]
        x_axis = _ChartAxis.over(xs if self.promise is None else [*xs, self.promise], self.is_logarithmic)
        ys = [y for curve in self.curves for _, y in curve.points]
        y_axis = _ChartAxis.over(ys if self.most_y is None else [self.most_y], is_logarithmic=False)
        parts = [*_x_grid(x_axis), *_y_grid(y_axis), *self._names()]
        if self.promise is not None:
            parts.append(_promise_line(_across(x_axis.place(self.promise)), self.promise))
        parts += [_line(curve, x_axis, y_axis) for curve in self.curves]
        parts += [_entry(number, curve) for number, curve in enumerate(self.curves)]
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        style = 'font-family="sans-serif" font-size="11" fill="currentColor"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
        return "\n".join([head, *parts, "</svg>"])

    def _names(self) -> Iterator[str]:
        yield f'<text x="{_LEFT}" y="18" font-size="14">{escape(self.title)}</text>'
        yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 30}" text-anchor="end">{escape(self.x)}</text>'
        yield f'<text x="{_WIDTH - _RIGHT}" y="18" text-anchor="end">{escape(self.y)}</text>'


def _across(place: float) -> float:
    return _LEFT + place * (_WIDTH - _LEFT - _RIGHT)


def _up(place: float) -> float:
    return _HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM)


def _x_grid(axis: _ChartAxis) -> Iterator[str]:
    for tick in axis.ticks:
        at = _across(axis.place(tick))
        yield f'<path d="M{at:.1f} {_up(0):.1f}V{_up(1):.1f}" stroke="#8884"/>'
        yield f'<text x="{at:.1f}" y="{_up(0) + 15:.1f}" text-anchor="middle">{tick:g}</text>'


def _y_grid(axis: _ChartAxis) -> Iterator[str]:
    for tick in axis.ticks:
        at = _up(axis.place(tick))
        yield f'<path d="M{_across(0):.1f} {at:.1f}H{_across(1):.1f}" stroke="#8884"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,g}</text>'


def _promise_line(at: float, promise: float) -> str:
    side, to = ("end", -5) if at > _WIDTH / 2 else ("start", 5)
    place = f'x="{at + to:.1f}" y="{_up(0.06):.1f}" text-anchor="{side}" fill="{_PROMISE}"'
    line = (
        f'<path d="M{at:.1f} {_up(0):.1f}V{_up(1):.1f}" stroke="{_PROMISE}" stroke-width="1.5" stroke-dasharray="2 3"/>'
    )
    return f"{line}<text {place}>promise {promise:g} s</text>"


def _line(curve: Curve, x_axis: _ChartAxis, y_axis: _ChartAxis) -> str:
    points = " ".join(f"{_across(x_axis.place(x)):.1f},{_up(y_axis.place(y)):.1f}" for x, y in curve.points)
    return f'<polyline points="{points}" fill="none" {_stroke(curve)}/>'


def _stroke(curve: Curve) -> str:
    dashes = ' stroke-dasharray="6 3"' if curve.is_dashed else ""
    return f'stroke="{curve.colour}" stroke-width="1.8"{dashes}'


def _entry(number: int, curve: Curve) -> str:
    at, y = _LEFT + number * _LEGEND_WIDTH, _HEIGHT - 10
    name = f'<text x="{at + 26}" y="{y}">{escape(curve.label)}</text>'
    return f'<path d="M{at} {y - 4}h20" {_stroke(curve)}/>{name}'
