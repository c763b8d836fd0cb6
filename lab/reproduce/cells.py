"""The numbers of a figure: those of each system at each point over the seeds, and what claims compute with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from alignedserve.lab.reports.comparison import Cell, SweepPoint, effective_throughput
from alignedserve.lab.reports.figure_rows import Better
from alignedserve.loads.records.distribution import mean, ratio

X = float | str  # a place on the x axis

_EQUAL = 0.01  # by this share two systems may differ and count as equal


@dataclass(frozen=True)
class Cells:
    """The values of all seeds, by the label of the system and by x; every system has every x."""

    values: Mapping[tuple[str, X], Sequence[float]]
    better: Better = Better.HIGHER
    labels: tuple[str, ...] = field(init=False)
    xs: tuple[X, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(dict.fromkeys(label for label, _ in self.values)))
        object.__setattr__(self, "xs", tuple(dict.fromkeys(x for _, x in self.values)))

    def cell(self, label: str, x: X) -> Cell:
        return Cell.from_values(self.values[label, x])

    def at(self, label: str, x: X) -> float:
        """Return the mean over the seeds."""
        return self.cell(label, x).mean

    def over(self, label: str) -> float:
        """Return the mean over all x."""
        return mean([self.at(label, x) for x in self.xs])

    def times(self, label: str, other: str, x: X) -> float:
        """Return how many times as large a system's value is as another's."""
        return ratio(self.at(label, x), self.at(other, x))

    def most_times(self, label: str, other: str) -> float:
        """Return that at the x where it is largest."""
        return max(filter(isfinite, (self.times(label, other, x) for x in self.xs)), default=float("nan"))

    def times_over(self, label: str, other: str) -> float:
        """Return how many times as large the mean over all x is."""
        return ratio(self.over(label), self.over(other))

    def less(self, label: str, other: str) -> float:
        """Return by how many percent a system's values are below another's, on average over all x."""
        return 100 * mean([1 - self.times(label, other, x) for x in self.xs])

    def crossing(self, label: str, mark: float) -> float:
        """Return the highest x at which the values, which fall along x, are still at the mark: Apt-Serve's effective
        throughput."""
        points = [
            SweepPoint(x, self.cell(label, x), Cell.from_values([0.0])) for x in self.xs if not isinstance(x, str)
        ]
        return effective_throughput(sorted(points, key=lambda point: point.rate), mark).rate

    def behind(self, label: str, kin: Sequence[str] = ()) -> dict[X, float]:
        """Return by which share the system is worse than the best of all others but its kin, where it is."""
        shares = {x: self._share_behind(label, kin, x) for x in self.xs}
        return {x: share for x, share in shares.items() if share > _EQUAL}

    def _share_behind(self, label: str, kin: Sequence[str], x: X) -> float:
        ours = self.at(label, x)
        others = self._best([self.at(other, x) for other in self.labels if other not in (label, *kin)])
        if not isfinite(others) or ours == others:
            return 0.0
        return abs(ratio(ours, others) - 1) if self._best([ours, others]) == others else 0.0

    def _best(self, found: Sequence[float]) -> float:
        known = [value for value in found if isfinite(value)]
        if not known:
            return float("nan")
        return min(known) if self.better is Better.LOWER else max(known)
