"""What workers did: how busy they were, how unequal their batches, how well the cost model told their steps."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum, isfinite

from alignedserve.core import Role
from alignedserve.cost.model import Kind
from alignedserve.simulator.records.distribution import Distribution, mean, ratio
from alignedserve.simulator.records.records import CopyRecord, RunRecord, StepRecord


@dataclass(frozen=True, slots=True)
class PrefixSpread:
    """Among the decodes of a step, of steps that have any."""

    mean: float  # tokens, longest less shortest
    p90: float
    bubble_share: float  # of longest · decodes, what no prefix fills: Σ(B · max C - ΣC) ÷ Σ(B · max C)

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> PrefixSpread:
        spreads, room, filled = array("q"), 0, 0
        for step in steps:
            shape = step.shape
            if shape.decodes:
                spreads.append(spread(step))
                room += shape.decodes * shape.longest
                filled += shape.prefixes
        found = Distribution.of(spreads)
        return cls(found.mean, found.p90, ratio(room - filled, room))


def spread(step: StepRecord) -> int:
    return step.shape.longest - step.shortest


@dataclass(frozen=True, slots=True)
class PredictionError:
    """|predicted ÷ true - 1|, of steps that were predicted."""

    count: int
    p50: float
    p90: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> PredictionError:
        found = Distribution.of(errors)
        return cls(found.count, found.p50, found.p90)


def is_predicted(step: StepRecord) -> bool:
    return isfinite(step.predicted_s) and step.seconds > 0


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    all: PredictionError
    prefill: PredictionError
    decode: PredictionError
    mixed: PredictionError

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> PredictionErrors:
        errors = {kind: array("d") for kind in Kind}
        for step in steps:
            if is_predicted(step):
                errors[step.shape.kind].append(abs(step.predicted_s / step.seconds - 1))
        return cls(PredictionError.of(chain(*errors.values())), *map(PredictionError.of, errors.values()))


def of_kind(steps: Iterable[StepRecord], kind: Kind) -> list[StepRecord]:
    return [step for step in steps if step.shape.kind is kind]


@dataclass(frozen=True, slots=True)
class StepFigures:
    count: int
    prefill: int
    decode: int
    mixed: int
    seconds: Distribution
    tokens: Distribution
    spread: PrefixSpread
    prediction: PredictionErrors

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> StepFigures:
        kinds = Counter(step.shape.kind for step in steps)
        return cls(
            count=len(steps),
            prefill=kinds[Kind.PREFILL],
            decode=kinds[Kind.DECODE],
            mixed=kinds[Kind.MIXED],
            seconds=Distribution.of(step.seconds for step in steps),
            tokens=Distribution.of(step.shape.tokens for step in steps),
            spread=PrefixSpread.of(steps),
            prediction=PredictionErrors.of(steps),
        )


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """To devices and from them together."""

    count: int
    to_device: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, copies: Sequence[CopyRecord]) -> CopyFigures:
        return cls(
            count=len(copies),
            to_device=sum(copy.to_device for copy in copies),
            tokens=sum(copy.num_tokens for copy in copies),
            seconds=fsum(copy.seconds for copy in copies),
        )


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Shares of the run; copies that run beside steps count in both, so their sum may be above 1."""

    name: str
    role: Role
    steps: int
    step_share: float
    copy_share: float


def workers_of(record: RunRecord) -> tuple[WorkerFigures, ...]:
    steps, copies = _seconds_of(record.steps), _seconds_of(record.copies)
    return tuple(
        WorkerFigures(
            name=name,
            role=role,
            steps=len(steps[name]),
            step_share=ratio(fsum(steps[name]), record.duration_s),
            copy_share=ratio(fsum(copies[name]), record.duration_s),
        )
        for name, role in record.workers.items()
    )


def _seconds_of(work: Iterable[StepRecord | CopyRecord]) -> Mapping[str, Sequence[float]]:
    """By worker."""
    seconds: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    for one in work:
        seconds[one.worker].append(one.seconds)
    return seconds


def mean_step_share(workers: Iterable[WorkerFigures]) -> float:
    return mean([worker.step_share for worker in workers])
