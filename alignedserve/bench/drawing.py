"""Draws curves in SVG: axes with round numbers, a grid, a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 62  # margins
_STEPS = (1, 2, 5, 10)
_TICKS = 6
_PROMISE = "#1c8a4a"
_LEGEND_WIDTH = 90  # of an entry


class AxisScale(Enum):
    LINEAR = auto()
    LOGARITHMIC = auto()


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
    scale: AxisScale

    @classmethod
    def over(cls, values: Sequence[float], scale: AxisScale) -> _ChartAxis:
        """Return an axis over these values; a linear one begins with 0."""
        if scale is AxisScale.LINEAR:
            return cls(0.0, max(values) or 1.0, scale)
        above = [value for value in values if value > 0] or [1.0]
        least, most = min(above), max(above)
        return cls(least, most, scale) if most > least else cls(least / 2, most * 2, scale)

    def place(self, value: float) -> float:
        if self.scale is AxisScale.LINEAR:
            return (value - self.least) / (self.most - self.least)
        return (log10(max(value, self.least)) - log10(self.least)) / (log10(self.most) - log10(self.least))

    @property
    def ticks(self) -> list[float]:
        return list(self._linear_ticks() if self.scale is AxisScale.LINEAR else self._logarithmic_ticks())

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
    x_scale: AxisScale = AxisScale.LINEAR
    promise: float | None = None  # a place on the x axis

    def svg(self) -> str:
        xs = [x for curve in self.curves for x, _ in curve.points]
        x_axis = _ChartAxis.over(xs if self.promise is None else [*xs, self.promise], self.x_scale)
        ys = [y for curve in self.curves for _, y in curve.points]
        y_axis = _ChartAxis.over(ys if self.most_y is None else [self.most_y], AxisScale.LINEAR)
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
