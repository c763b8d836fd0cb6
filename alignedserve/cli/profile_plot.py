"""Predicted against measured step times, as a picture: each step a dot, on the diagonal where it was told right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from alignedserve.cost.fit import Point
from alignedserve.cost.model import CostModel, Kind

_SIZE, _MARGIN = 480, 60  # of the square with the dots, and around it
_BAND = 1.25  # as a factor: the shaded part
_COLOURS = {Kind.PREFILL: "#0b6e99", Kind.DECODE: "#c4541a", Kind.MIXED: "#5b8c2a"}


def plot(model: CostModel, points: Sequence[Point], title: str) -> str:
    dots = [(point.seconds * 1e3, model.seconds(point.shape) * 1e3, point.shape.kind) for point in points]
    times = [time for measured, predicted, _ in dots for time in (measured, predicted) if time > 0] or [1.0]
    scale = _Scale(floor(log10(min(times))), max(ceil(log10(max(times))), floor(log10(min(times))) + 1))
    return "\n".join(_lines(dots, scale, title))


class _Scale:
    """From milliseconds to places along an axis."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high  # powers of ten

    def at(self, time: float) -> float:
        place = (log10(time) - self.low) / (self.high - self.low) if time > 0 else 0.0
        return _SIZE * min(1.0, max(0.0, place))

    def x(self, time: float) -> str:
        return f"{_MARGIN + self.at(time):.1f}"

    def y(self, time: float) -> str:
        return f"{_MARGIN + _SIZE - self.at(time):.1f}"


def _lines(dots: Sequence[tuple[float, float, Kind]], scale: _Scale, title: str) -> Iterator[str]:
    whole, first, last = _SIZE + 2 * _MARGIN, 10.0**scale.low, 10.0**scale.high
    about = f'viewBox="0 0 {whole} {whole}" font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {about}>'
    yield f'<rect width="{whole}" height="{whole}" fill="white"/>'
    corners = ((first, first * _BAND), (last, last * _BAND), (last, last / _BAND), (first, first / _BAND))
    yield f'<polygon points="{" ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in corners)}" fill="#eeeeee"/>'
    for power in range(scale.low, scale.high + 1):
        yield from _grid_line(scale, 10.0**power, first, last)
    yield _line(scale, (first, first), (last, last), "#888888")
    for measured, predicted, kind in dots:
        centre = f'cx="{scale.x(measured)}" cy="{scale.y(predicted)}"'
        yield f'<circle {centre} r="3" fill="{_COLOURS[kind]}" opacity="0.7"/>'
    for number, (kind, colour) in enumerate(_COLOURS.items()):
        yield f'<text x="{_MARGIN + 10}" y="{_MARGIN + 20 + 16 * number}" fill="{colour}">{kind.value}</text>'
    yield _text(whole / 2, 24, f"{title}: milliseconds of held-out steps; shaded: within 25 %")
    yield _text(whole / 2, whole - 14, "measured")
    yield f'<g transform="translate(16 {whole / 2}) rotate(-90)">{_text(0, 0, "predicted")}</g>'
    yield "</svg>\n"


def _grid_line(scale: _Scale, time: float, first: float, last: float) -> Iterator[str]:
    yield _line(scale, (time, first), (time, last), "#cccccc")
    yield _line(scale, (first, time), (last, time), "#cccccc")
    yield _text(float(scale.x(time)), _MARGIN + _SIZE + 16, f"{time:g}")
    yield _text(_MARGIN - 18, float(scale.y(time)) + 4, f"{time:g}")


def _line(scale: _Scale, start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    ends = f'x1="{scale.x(x1)}" y1="{scale.y(y1)}" x2="{scale.x(x2)}" y2="{scale.y(y2)}"'
    return f'<line {ends} stroke="{colour}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'
