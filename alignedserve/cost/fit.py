"""Find the coefficients of the cost model: first from a profile, then from every step that runs.

Both are one problem: minimise the sum of squares of *relative* errors over coefficients that are not negative. The
problem is kept as its normal equations, so one more step is an addition, and forgetting is a multiplication (recursive
least squares in information form). Coordinate descent solves them: each coefficient in turn takes its best value >= 0.

Robust: a step that is off by much more than others counts less (Huber), so a page fault has no effect.

Drift: where others use the machine, its memory or its cores become slower, and soon quick again. So there is a factor
for what steps read and one for what they compute, which follow the newest steps within a few of them; the coefficients
describe steps at factors of 1. The coefficients follow slowly, and stay with the profile where recent steps tell
nothing: a worker that decoded eight requests for an hour still knows how long sixty-four take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import exp, log
from operator import mul
from typing import NamedTuple

from alignedserve.cost.model import Coefficients, CostModel, Kind, Shape, Uncertainty, length_of
from alignedserve.cost.sums import added

Vector = list[float]

BUSY = 1.25  # slowdown from which on the machine counts as busy
_REST = 8  # coefficients besides those of tokens
_KINSHIP = 0.02  # weight of steps of other kinds: it matters where a kind was hardly measured
_HUBER = 0.1  # steps with a larger relative error count less
_ROUNDS = 5  # times that the points are weighed again
_SWEEPS = 200  # most sweeps of the coordinate descent for a profile ...
_SWEEPS_A_STEP = 2  # ... and for a step
_FOLDS = 3
_UNKNOWN = Uncertainty(1.0, 1.0)
_SMOOTHNESS = 0.03  # a bend as large as a step's time counts like three points that are off by a tenth
_CLOSE = 1e-7  # a coefficient that moves by a smaller share of itself has converged

_PACE, _LEAP = 0.5, 0.7  # share of a surprise that the factors follow, and its most (logarithms)
_STEADY = 0.25  # computing follows a surprise a quarter as fast as reading: it changes less
_KEEP = 0.99  # share of what was learned that each step of the kind keeps
_PROFILE_STEPS = 30  # the profile always counts as much as 30 steps
_EAGER = 64  # the first steps of a kind are all learned from,
_EVERY = 32  # and each 32nd of the later ones; the factors follow every step
_RETELL, _MOVED = 8, 0.01  # the model is told again after 8 steps, or when a factor has moved by 1 %
_STRIDE, _LEAST_ERROR = 0.1, 0.005
# The least uncertainties: few steps were measured, and predictions leave out a token's way to its client.
_LEAST_P90, _LEAST_TAIL = 0.1, 0.15
_SEEN, _ENOUGH = 1024, 50  # steps of each kind whose errors are kept, and how many of a length tell that length's tail
_DECADES = 2.0  # from one in a hundred to one in ten thousand


@dataclass(frozen=True, slots=True)
class Point:
    """A step that ran, and how long it took."""

    shape: Shape
    seconds: float


def features(shape: Shape, pieces: int) -> Vector:
    """Return what the coefficients are multiplied with, in the order of `_vector`."""
    row = [1.0, *_token_features(shape.tokens, pieces)]
    row += [shape.work / 2, shape.chunks, shape.cached, shape.decodes, shape.prefixes]
    row += [shape.decodes * shape.longest - shape.prefixes, shape.remade]
    return row


def _token_features(tokens: int, pieces: int) -> Iterable[float]:
    """Yield how many of the tokens lie in each piece: 0..2, 2..4, 4..8, ..."""
    starts = [0, *(1 << power for power in range(1, pieces))]
    ends = [*starts[1:], tokens]
    return (max(0, min(tokens, end) - start) for start, end in zip(starts, ends, strict=True))


def _vector(values: Coefficients) -> Vector:
    c = values
    return [c.fixed, *c.token, c.work, c.chunk, c.cached, c.decode, c.prefix, c.bubble, c.remade]


def _coefficients(vector: Sequence[float]) -> Coefficients:
    return Coefficients(vector[0], tuple(vector[1 : 1 - _REST]), *vector[1 - _REST :])


class _Equations:
    """Normal equations of weighted least squares, solved over vectors that are not negative."""

    def __init__(self, size: int) -> None:
        self.matrix = [[0.0] * size for _ in range(size)]
        self.target = [0.0] * size

    def add(self, row: Vector, wanted: float, weight: float) -> None:
        filled = [(at, value) for at, value in enumerate(row) if value]  # of a step's features most are 0
        for at, value in filled:
            equation, scaled = self.matrix[at], weight * value
            for other_at, other in filled:
                equation[other_at] += scaled * other
            self.target[at] += weight * wanted * value

    def blend(self, keep: float, other: _Equations) -> None:
        """Forget a share of these equations, and take as much of the other ones."""
        rest = 1 - keep
        for row, added_row in zip((*self.matrix, self.target), (*other.matrix, other.target), strict=True):
            row[:] = [keep * value + rest * added_value for value, added_value in zip(row, added_row, strict=True)]

    def scaled(self, by: float) -> _Equations:
        result = _Equations(len(self.target))
        result.matrix = [[by * value for value in row] for row in self.matrix]
        result.target = [by * value for value in self.target]
        return result

    def descend(self, solution: Vector, sweeps: int) -> None:
        """Improve a solution in place. Coefficients that no step depends on stay as they are."""
        for _ in range(sweeps):
            moved = False
            for at, (row, wanted) in enumerate(zip(self.matrix, self.target, strict=True)):
                if row[at] <= 0.0:
                    continue
                old = solution[at]
                new = max(0.0, old + (wanted - _dot(row, solution)) / row[at])
                solution[at] = new
                moved = moved or abs(new - old) > _CLOSE * new
            if not moved:
                return


# --- Fitting a profile


@dataclass(frozen=True)
class _KindFit:
    solution: Vector
    equations: _Equations  # the mean of one step
    pieces: int

    def seconds(self, shape: Shape) -> float:
        return _dot(features(shape, self.pieces), self.solution)


def fit(points: Sequence[Point], remade_token_s: float = 0.0) -> CostModel:
    """Fit the cost model to profiled steps. `remade_token_s` holds where no step made K and V again."""
    return OnlineCost(points, remade_token_s).model


def _fit(own: Sequence[Point], others: Sequence[Point], remade_token_s: float) -> _KindFit:
    """Fit one kind: weigh the points again by their errors, a few times. Points of other kinds count a little."""
    points, shares = [*own, *others], [1.0] * len(own) + [_KINSHIP] * len(others)
    longest = max((point.shape.tokens for point in points), default=1)
    pieces = max(1, (longest - 1).bit_length())  # the last piece begins before the longest step
    rows = [features(point.shape, pieces) for point in points]
    solution = [0.0] * (pieces + _REST)
    solution[-1] = remade_token_s
    equations, weights = _Equations(len(solution)), shares
    for _ in range(_ROUNDS):
        equations = _Equations(len(solution))
        for point, row, weight in zip(points, rows, weights, strict=True):
            equations.add(row, point.seconds, weight / point.seconds**2)
        _smooth(equations, points, pieces)
        equations.descend(solution, _SWEEPS)
        errors = (error(point.seconds, _dot(row, solution)) for point, row in zip(points, rows, strict=True))
        weights = [share * _huber(off) for share, off in zip(shares, errors, strict=True)]
    return _KindFit(solution, equations.scaled(1 / (added(weights) or 1.0)), pieces)


def _smooth(equations: _Equations, points: Sequence[Point], pieces: int) -> None:
    """Let a token take as long in two neighbouring pieces as long as no step tells them apart."""
    if not points:
        return
    for piece in range(1, pieces):
        begin = 1 << piece
        near = min(points, key=lambda point: abs(point.shape.tokens - begin))
        row = [0.0] * len(equations.target)
        row[piece], row[piece + 1] = -float(begin), float(begin)
        equations.add(row, 0.0, _SMOOTHNESS / near.seconds**2)


def _uncertainty(own: Sequence[Point], others: Sequence[Point]) -> Uncertainty:
    """Predict each point by a fit that has not seen it, and return how far these predictions are off."""
    errors = []
    for fold in range(_FOLDS):
        fitted = _fit([point for at, point in enumerate(own) if at % _FOLDS != fold], others, 0.0)
        errors += [error(point.seconds, fitted.seconds(point.shape)) for point in own[fold::_FOLDS]]
    return spread(errors) if errors else _UNKNOWN


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return added(map(mul, left, right))


def _huber(off: float) -> float:
    return min(1.0, _HUBER / off) if off else 1.0


def error(measured: float, predicted: float) -> float:
    """Return the relative error of a prediction; 0 where there is none yet."""
    return abs(measured / predicted - 1) if predicted > 0 else 0.0


def spread(errors: Sequence[float]) -> Uncertainty:
    ordered = sorted(errors)
    if not ordered:
        return Uncertainty()
    return Uncertainty(ordered[len(ordered) // 2], ordered[(len(ordered) - 1) * 9 // 10])


# --- Learning from steps


class OnlineCost:
    """The cost model of one worker, which learns from its steps."""

    def __init__(
        self,
        points: Sequence[Point],
        remade_token_s: float = 0.0,
        slowdown: float = 1.0,
        known: Mapping[Kind, Uncertainty] | None = None,
    ) -> None:
        """`points` are of a quiet machine; until steps tell otherwise, they take `slowdown` times as long. `known` is
        how uncertain a fit of these points is: to find that takes three more fits."""
        self._kinds: dict[Kind, _Learner] = {}
        for kind in Kind:
            own = [point for point in points if point.shape.kind is kind]
            others = [point for point in points if point.shape.kind is not kind]
            uncertainty = _uncertainty(own, others) if known is None else known[kind]
            self._kinds[kind] = _Learner(_fit(own, others, remade_token_s), uncertainty)
        self._factors = self._told = TimeFactors(slowdown, slowdown)
        self._surprises = {True: 0.0, False: 0.0}  # of the last step that mostly read, and of the last other one
        self._model: CostModel | None = None

    def copy(self) -> OnlineCost:
        """Return a copy for another worker that knows the same; both share what never changes."""
        other = copy(self)
        other._kinds = {kind: learner.copy() for kind, learner in self._kinds.items()}
        other._surprises = dict(self._surprises)
        return other

    @property
    def model(self) -> CostModel:
        """Return a snapshot, the same one until the next step is learned."""
        if self._model is None:
            learners, self._told = self._kinds.items(), self._factors
            coefficients = {kind: _coefficients(learner.solution).scaled(*self._told) for kind, learner in learners}
            self._model = CostModel(coefficients, {kind: learner.uncertainty for kind, learner in learners})
        return self._model

    @property
    def quiet(self) -> CostModel:
        """Return what has been learned, for a machine where nothing else runs: no factor below 1 is of the moment."""
        quickest, learners = [min(1.0, factor) for factor in self._factors], self._kinds.items()
        coefficients = {kind: _coefficients(learner.solution).scaled(*quickest) for kind, learner in learners}
        return CostModel(coefficients, {kind: learner.uncertainty for kind, learner in learners})

    def refined(self, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points of a profile as they were learned to be, where enough steps of their kind have run."""
        model = self.quiet
        for point in points:
            seconds = model.seconds(point.shape) if self._kinds[point.shape.kind].has_learned else 0.0
            yield Point(point.shape, seconds or point.seconds)

    @property
    def slowdown(self) -> float:
        """Return how many times as long as in the profile reading takes, or computing if that is more."""
        return max(self._factors)

    def rescale(self, by: float) -> None:
        """Multiply the slowdown of reading and computing by `by`. A factor of 1 does not fall further: short steps,
        which mostly read, say little about computing."""
        reading, computing = (max(min(1.0, factor), by * factor) for factor in self._factors)
        self._factors, self._model = TimeFactors(reading, computing), None

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn from a step of this shape that took so long."""
        if not shape.tokens or seconds <= 0:
            return
        model, learner = self.model, self._kinds[shape.kind]
        predicted = model.seconds(shape)
        if predicted > 0:
            surprise = max(-_LEAP, min(_LEAP, log(seconds / predicted)))
            reads = model.reading_s(shape) / predicted
            last, self._surprises[reads > 0.5] = self._surprises[reads > 0.5], surprise
            self._factors = self._factors.after(surprise, last, reads)
        if learner.learn(shape, seconds, predicted, self._factors) or self._factors.differ_from(self._told):
            self._model = None


class TimeFactors(NamedTuple):
    """How many times as long as in the profile a step takes to read memory, and to compute."""

    reading: float = 1.0
    computing: float = 1.0

    def after(self, surprise: float, last: float, reads: float) -> TimeFactors:
        """Return the factors after a step, `reads` of whose time was to be reading, with this surprise (logarithm).

        A step that is off by itself moves nothing: a surprise counts where that of the last such step was to the same
        side, and then the smaller of both. One time does not tell what of it was reading: the factors take up the
        surprise by their parts of the time. For example, a step of few tokens that reads for nine tenths of its time
        tells of reading next to alone, and one of many tokens of both.
        """
        if surprise * last <= 0:
            return self
        moves, computes = _PACE * min(surprise, last, key=abs), _STEADY * (1 - reads)
        size = reads * reads + (1 - reads) * computes
        return TimeFactors(self.reading * exp(moves * reads / size), self.computing * exp(moves * computes / size))

    def differ_from(self, told: TimeFactors) -> bool:
        return any(abs(one / other - 1) > _MOVED for one, other in zip(self, told, strict=True))


class _Learner:
    """Learns one kind of step."""

    def __init__(self, profile: _KindFit, uncertainty: Uncertainty) -> None:
        self._pieces = profile.pieces
        self._profile = profile.equations.scaled(_PROFILE_STEPS)
        self._equations = profile.equations.scaled(_PROFILE_STEPS)
        self._num_steps = 0
        self.solution = list(profile.solution)
        # Errors of predictions. A profile of few steps is no less sure than none.
        self._median, self._p90 = min(_UNKNOWN.median, uncertainty.median), min(_UNKNOWN.p90, uncertainty.p90)
        self._tails: dict[int, _Tail] = {}  # by the length of steps

    def copy(self) -> _Learner:
        other = copy(self)
        other._equations, other.solution = self._equations.scaled(1.0), list(self.solution)
        other._tails = {length: tail.copy() for length, tail in self._tails.items()}
        return other

    @property
    def uncertainty(self) -> Uncertainty:
        tails = {length: tail.beyond for length, tail in self._tails.items() if tail.is_known}
        return Uncertainty(self._median, max(_LEAST_P90, self._p90), tails)

    @property
    def has_learned(self) -> bool:
        """Return whether as many steps have run as the profile counts for."""
        return self._num_steps >= _PROFILE_STEPS

    def learn(self, shape: Shape, seconds: float, predicted: float, factors: TimeFactors) -> bool:
        """Learn from a step, and return whether predictions change."""
        off_by = error(seconds, predicted)
        if predicted > 0:
            self._tails.setdefault(length_of(predicted), _Tail()).add(self._num_steps, seconds / predicted - 1)
            for tail in self._tails.values():
                tail.forget(self._num_steps - _SEEN)
        self._median, self._p90 = _tracked(self._median, off_by, 0.5), _tracked(self._p90, off_by, 0.9)
        self._num_steps += 1
        if self._num_steps > _EAGER and self._num_steps % _EVERY:
            return self._num_steps % _RETELL == 0
        ones = _vector(Coefficients(1.0, (1.0,) * self._pieces, *(1.0,) * (_REST - 1)).scaled(*factors))
        row = list(map(mul, features(shape, self._pieces), ones))
        weight = _huber(error(seconds, _dot(row, self.solution))) / seconds**2
        self._equations.blend(_KEEP, self._profile)
        self._equations.add(row, seconds, weight)
        self._equations.descend(self.solution, _SWEEPS_A_STEP)
        return True


class _Tail:
    """The share by which about one step in ten thousand takes longer than predicted, of steps of about one length.

    This is measured, and not derived from the usual errors: what makes a step late (another process, a page fault) is
    not what makes it a little longer. A thousand steps do not show one in ten thousand, so the tail is extrapolated
    from the longest hundredth: where stalls come by chance, each factor of ten adds as much as from one in ten to one
    in a hundred. A stall of some milliseconds is a large share of a short step and a small one of a long step, so each
    length has a tail of its own.

    Old errors are forgotten also where no step of the length runs: a length that took long for some seconds is else
    never tried again.
    """

    def __init__(self, last: Iterable[tuple[int, float]] = ()) -> None:
        self._last = deque(last)  # numbers of steps and their errors, in order; `_ordered` has the errors sorted
        self._ordered = sorted(error for _, error in self._last)

    def copy(self) -> _Tail:
        return _Tail(self._last)

    def add(self, number: int, error: float) -> None:
        self._last.append((number, error))
        insort(self._ordered, error)

    def forget(self, until: int) -> None:
        """Forget the errors of all steps up to this number."""
        while self._last and self._last[0][0] <= until:
            _, error = self._last.popleft()
            del self._ordered[bisect_left(self._ordered, error)]

    @property
    def is_known(self) -> bool:
        return len(self._ordered) >= _ENOUGH

    @property
    def beyond(self) -> float:
        ordered, num = self._ordered, len(self._ordered)
        p90, p99 = ordered[num * 90 // 100], ordered[num * 99 // 100]
        return max(_LEAST_TAIL, p99 + _DECADES * (p99 - p90), ordered[num * 998 // 1000])


def _tracked(quantile: float, value: float, share: float) -> float:
    """Return the running quantile after one more value: it steps up and down so that `share` of values lie below."""
    stride = _STRIDE * max(quantile, _LEAST_ERROR)
    return quantile + stride * (share if value > quantile else share - 1)
