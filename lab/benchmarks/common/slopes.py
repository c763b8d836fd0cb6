"""Whether a figure grows with time: least squares over the parts of a run, with a level of its own for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean

Series = Sequence[tuple[float, float]]  # (time, value)
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Slope:
    mean: float
    slope: float  # per unit of time
    error: float  # its standard error; infinite where there are too few values

    def grows(self, least: float) -> bool:
        """Return whether it surely grows by more than `least` in a unit of time."""
        return self.slope - SURE * self.error > least


def slope(parts: Sequence[Series]) -> Slope:
    """Return the common slope of all parts.

    What comes soon after another value is like it, so the error of a plain fit would be too small: it counts as many
    values as the residuals' correlation from each value to the next leaves independent.
    """
    values = [value for part in parts for _, value in part]
    centred = [_centred(part) for part in parts if part]
    spread = sum(at * at for part in centred for at, _ in part)
    free = len(values) - len(centred) - 1
    if free < 1 or not spread:
        return Slope(fmean(values) if values else 0.0, 0.0, inf)
    found = sum(at * value for part in centred for at, value in part) / spread
    residuals = [[value - found * at for at, value in part] for part in centred]
    squares = sum(rest * rest for part in residuals for rest in part)
    error = sqrt(squares / free / spread)
    return Slope(fmean(values), found, error * _widened(residuals, squares))


def _centred(part: Series) -> list[tuple[float, float]]:
    at, value = (fmean(each[axis] for each in part) for axis in (0, 1))
    return [(time - at, found - value) for time, found in part]


def _widened(residuals: Sequence[Sequence[float]], squares: float) -> float:
    """Return the factor for the error that the residuals' correlation makes."""
    if not squares:
        return 1.0
    together = sum(one * other for part in residuals for one, other in pairwise(part))
    correlation = min(0.95, max(0.0, together / squares))
    return sqrt((1 + correlation) / (1 - correlation))
