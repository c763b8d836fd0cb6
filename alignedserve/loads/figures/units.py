"""The units of figures."""

from __future__ import annotations

from enum import Enum
from math import isfinite


class Unit(Enum):
    """The unit of a figure: the factor that a table multiplies by, and the suffix of the number."""

    NUMBER = (1.0, "")
    SHARE = (100.0, " %")
    SECONDS = (1.0, " s")
    MILLISECONDS = (1000.0, " ms")
    PER_SECOND = (1.0, "/s")

    def show(self, value: float, spread: float = 0.0) -> str:
        factor, suffix = self.value
        if not isfinite(value):
            return "-"
        around = f" ± {_digits(spread * factor)}" if spread else ""
        return f"{_digits(value * factor)}{around}{suffix}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3g}"
