"""Counting up, down and in steps. The prompt decides the answer's length: 1 to 100 numbers."""

from __future__ import annotations

from demo_corpus.phrasing import number, request
from demo_corpus.sample import Draw, Sample, Turn

HIGHEST = 250

_UP = (
    "Count from {a} to {b}",
    "Count up from {a} to {b}",
    "Count from {a} up to {b}",
    "Write the numbers from {a} to {b}",
    "Give me the numbers from {a} to {b}",
    "Say all the numbers between {a} and {b}, both included",
    "List the numbers {a} to {b}",
    "Start at {a} and count to {b}",
    "Count {a} to {b}",
)
_UP_FROM_ONE = ("Count to {b}", "Count up to {b}", "Write the numbers up to {b}", "Count for me up to {b}")
_DOWN = (
    "Count down from {a} to {b}",
    "Count backwards from {a} to {b}",
    "Count from {a} down to {b}",
    "Write the numbers from {a} down to {b}",
    "Give me a countdown from {a} to {b}",
    "Start at {a} and count down to {b}",
    "Count in reverse from {a} to {b}",
)
_STEPS = (
    "Count from {a} to {b} in steps of {s}",
    "Count from {a} to {b} by {s}",
    "Count up from {a} to {b} in steps of {s}",
    "Count in steps of {s} from {a} to {b}",
    "Go from {a} to {b} in steps of {s}",
    "Write the numbers from {a} to {b} in steps of {s}",
)
_STEP_SIZES = (2, 3, 4, 5, 10, 20, 25, 50)


def counted(first: int, last: int, step: int = 1) -> str:
    """Return every number from `first` to `last`; a negative step counts down."""
    return ", ".join(str(n) for n in range(first, last + (1 if step > 0 else -1), step))


def span(draw: Draw, longest: int = 100) -> tuple[int, int]:
    """Return two ends low <= high that this side owns; short spans are common, as with people."""

    def make() -> tuple[int, int]:
        length = min(draw.integer(1, longest), draw.integer(1, longest))
        low = draw.integer(0, 20) if draw.chance(0.5) else draw.integer(0, HIGHEST - length)
        return low, low + length - 1

    return draw.fresh(make)


def count_up(draw: Draw) -> Sample:
    low, high = span(draw)
    if draw.chance(0.25):
        low, high = 1, draw.fresh(lambda: min(draw.integer(1, 100), draw.integer(1, 100)))
        order = draw.choose(_UP_FROM_ONE).format(b=number(draw, high))
    else:
        order = draw.choose(_UP).format(a=number(draw, low), b=number(draw, high))
    return Sample("count_up", (Turn(request(draw, order), counted(low, high)),), asked=high - low + 1)


def count_down(draw: Draw) -> Sample:
    low, high = span(draw)
    order = draw.choose(_DOWN).format(a=number(draw, high), b=number(draw, low))
    return Sample("count_down", (Turn(request(draw, order), counted(high, low, -1)),), asked=high - low + 1)


def count_steps(draw: Draw) -> Sample:
    def make() -> tuple[int, int, int]:
        step = draw.choose(_STEP_SIZES)
        first = 0 if draw.chance(0.3) else step if draw.chance(0.3) else draw.integer(0, 50)
        steps = min(draw.integer(1, 30), (HIGHEST - first) // step)
        return first, first + steps * step, step

    first, last, step = draw.fresh(make)
    ends = {"a": number(draw, first), "b": number(draw, last), "s": number(draw, step)}
    order = draw.choose(_STEPS).format(**ends)
    return Sample(
        "count_steps", (Turn(request(draw, order), counted(first, last, step)),), asked=(last - first) // step + 1
    )
