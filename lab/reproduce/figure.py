"""Declare a paper's figure: the systems, the points at which they run, the metric, and the paper's statements.

Each system runs at each point with each seed, and each such run is a `SimulationTrial`: a system is a preset on a
cluster, a point is a workload at a rate on a device. A module of a paper declares its figures, and nothing else:

    PAPER = Paper("alignedserve", "AlignedServe", (Figure("7", "Decode throughput ...", ...), ...))

`x` is a number (then the figure is drawn as curves) or a text (then as bars). `only_full` points run with --full alone;
`full` is the workload that --full runs in place of the usual, smaller one. One of the systems of a figure is always our
default, the preset `aligned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, log, nan
from pathlib import Path

from alignedserve.lab.loads.records.distribution import mean, ratio
from alignedserve.lab.reports.comparison import Cell, effective_throughput
from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reports.trial import SimulationTrial

_FACTORS = {"ms": 1e3, "%": 100.0}  # by which figures, in seconds and shares, are multiplied to be shown

_LEAST_FACTOR = 1e-4  # by which a system's values may differ from what the paper's number asks for

OURS = "aligned"  # the preset that is a curve of every figure
_FILES = Path(__file__).parent / "files"


def file(name: str) -> str:
    """Return the path of a device or a workload that a figure needs and that has no name."""
    return str(_FILES / name)


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    unit: str = ""

    @property
    def factor(self) -> float:
        return _FACTORS.get(self.unit, 1.0)

    def __str__(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Rival:
    """A curve of a figure."""

    label: str
    preset: str
    cluster: str = "colocated"
    options: tuple[str, ...] = ()  # settings that override the preset's, each as path=value
    direct: bool | None = None  # as in a trial
    profile: str | None = None  # its own device, in place of the points'


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the x axis: what all systems get there."""

    x: X
    workload: str
    rate: float | None = None
    profile: str | None = None
    options: tuple[str, ...] = ()
    full: str | None = None  # the workload with --full, where it is another
    only_full: bool = False  # whether only --full has this point

    def trial(self, system: Rival, seed: int, is_full: bool) -> SimulationTrial:
        return SimulationTrial(
            system.preset,
            self.full if is_full and self.full is not None else self.workload,
            system.cluster,
            seed,
            self.rate,
            system.profile or self.profile,
            system.direct,
            (*system.options, *self.options),
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that the paper states about a figure, and the function that computes ours from the cells.

    A picture has marks where the paper's number would put the system that it is `about`: the one with whose label the
    text begins, unless another is named. A number about a place on the x axis says where its mark is (`at`: x, value).
    """

    text: str
    paper: float
    of: Callable[[Cells], float]
    about: str | None = None
    at: Callable[[Cells], tuple[float, float]] | None = None
    is_effect: bool = True  # or it is what a system has, beside no other

    def shown(self, cells: Cells) -> float:
        """Return the part of the paper's effect that is shown: 1 for all of it, below 0 for the opposite.

        A quotient of 1 is no effect, and neither is a difference of 0. Half of a quotient of 4 is 2, and of 1/4 is 1/2.
        """
        ours = self.of(cells)
        if "÷" not in self.text:
            return ratio(ours, self.paper)
        return ratio(log(ours), log(self.paper)) if ours > 0 else nan

    def marks(self, cells: Cells) -> Iterator[tuple[str, X, float]]:
        """Yield the system, each x and the value with which our figure would have the paper's number, all else being as
        it is: where ours is 100 beside 80 of vLLM and the paper says 1.5 times vLLM's, that is 120."""
        text = self.text.lower()
        named = (label for label in cells.labels if text.startswith((f"{label} ".lower(), f"{label},".lower())))
        label = self.about or max(named, key=len, default=None)
        if label is not None and self.at is not None:
            yield label, *self.at(cells)
            return
        factor = None if label is None else self._factor(cells, label)
        if label is None or factor is None:
            return
        ours = self.of(cells)
        for x in cells.xs:
            if self.of(_scaled(cells, 2.0, (label, x))) != ours:  # or the number is about other places
                yield label, x, factor * cells.at(label, x)

    def _factor(self, cells: Cells, label: str) -> float | None:
        """Return by how much the system's values must grow for the paper's number, by bisection."""
        keys = [(label, x) for x in cells.xs]
        low, high = _LEAST_FACTOR, 1 / _LEAST_FACTOR

        def beyond(factor: float) -> bool:
            return self.of(_scaled(cells, factor, *keys)) > self.paper

        at_low, at_high = beyond(low), beyond(high)
        if at_low == at_high:
            return None
        while high / low > 1 + 1e-9:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if beyond(middle) == at_low else (low, middle)
        return low


def _scaled(cells: Cells, factor: float, *keys: tuple[str, X]) -> Cells:
    return Cells(
        {**cells.values, **{key: [factor * value for value in cells.values[key]] for key in keys}}, cells.better
    )


@dataclass(frozen=True, slots=True)
class Figure:
    number: str
    title: str
    x: Axis
    y: Axis
    systems: tuple[Rival, ...]
    points: tuple[Point, ...]
    metric: str  # a path of `RunFigures`, such as papers.alignedserve.decode_tokens_per_s
    claims: tuple[Claim, ...] = ()
    finding: str = ""  # a sentence on what the figure shows; needed where it does not show the paper's effect
    better: Better = Better.HIGHER
    behind: str = ""  # a sentence on why our default is not at least equal to the best, where it is not

    @property
    def ours(self) -> tuple[str, ...]:
        """Return the labels of the systems that are our default, on any cluster."""
        return tuple(system.label for system in self.systems if system.preset == OURS and not system.options)

    def shown(self, is_full: bool) -> tuple[Point, ...]:
        return tuple(point for point in self.points if is_full or not point.only_full)

    def trials(self, seeds: Sequence[int], is_full: bool) -> Iterator[tuple[str, X, SimulationTrial]]:
        """Yield the label and the x of each trial with it."""
        for seed in seeds:
            for point in self.shown(is_full):
                for system in self.systems:
                    yield system.label, point.x, point.trial(system, seed, is_full)


@dataclass(frozen=True, slots=True)
class Paper:
    name: str  # as users write it
    title: str
    figures: tuple[Figure, ...]
    pictured: tuple[str, ...] | None = None  # figures that the page shows as pictures too; None: all


# --- Its numbers: those of each system at each point over the seeds, and what claims compute with them


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
        attained = sorted((x, self.at(label, x)) for x in self.xs if not isinstance(x, str))
        return effective_throughput(attained, mark).rate

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
