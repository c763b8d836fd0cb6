"""What workers did: how busy they were, how unequal their batches, how well the cost model told their steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from alignedserve.core import Role
from alignedserve.cost import Kind
from alignedserve.simulator.distribution import Distribution, mean, ratio
from alignedserve.simulator.records import CopyRecord, RunRecord, StepRecord


@dataclass(frozen=True, slots=True)
class PrefixSpread:
    """Among the decodes of a step, of steps that have any."""

    mean: float  # tokens, longest less shortest
    p90: float
    bubble_share: float  # of longest · decodes, what no prefix fills: Σ(B · max C - ΣC) ÷ Σ(B · max C)

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> PrefixSpread:
        shapes = [step.shape for step in steps if step.shape.decodes]
        spreads = Distribution.of(spread(step) for step in steps if step.shape.decodes)
        room = sum(shape.decodes * shape.longest for shape in shapes)
        return cls(spreads.mean, spreads.p90, ratio(room - sum(shape.prefixes for shape in shapes), room))


def spread(step: StepRecord) -> int:
    return step.shape.longest - step.shortest


@dataclass(frozen=True, slots=True)
class PredictionError:
    """|predicted ÷ true - 1|, of steps that were predicted."""

    count: int
    p50: float
    p90: float

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> PredictionError:
        errors = Distribution.of(abs(step.predicted_s / step.seconds - 1) for step in steps if is_predicted(step))
        return cls(errors.count, errors.p50, errors.p90)


def is_predicted(step: StepRecord) -> bool:
    return isfinite(step.predicted_s) and step.seconds > 0


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    all: PredictionError
    prefill: PredictionError
    decode: PredictionError
    mixed: PredictionError

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> PredictionErrors:
        by_kind = (PredictionError.of(of_kind(steps, kind)) for kind in Kind)
        return cls(PredictionError.of(steps), *by_kind)


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
        prefill, decode, mixed = (len(of_kind(steps, kind)) for kind in Kind)
        return cls(
            count=len(steps),
            prefill=prefill,
            decode=decode,
            mixed=mixed,
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
    return tuple(_worker(record, name, role) for name, role in record.workers.items())


def _worker(record: RunRecord, name: str, role: Role) -> WorkerFigures:
    steps = [step.seconds for step in record.steps if step.worker == name]
    copies = [copy.seconds for copy in record.copies if copy.worker == name]
    return WorkerFigures(
        name, role, len(steps), ratio(fsum(steps), record.duration_s), ratio(fsum(copies), record.duration_s)
    )


def mean_step_share(workers: Iterable[WorkerFigures]) -> float:
    return mean([worker.step_share for worker in workers])
