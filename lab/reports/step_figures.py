"""Compute how busy workers were, how unequal the prefixes in their batches, and how exact the cost model."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum, isfinite

from alignedserve.core import Role
from alignedserve.cost.model import Kind
from alignedserve.loads.records.distribution import Distribution, mean, ratio
from alignedserve.loads.records.records import CopyRecord, RunRecord, StepRecord


@dataclass(frozen=True, slots=True)
class PrefixSpread:
    """The spread of prefixes among the decodes of a step, over steps with decodes."""

    mean: float  # longest less shortest, in tokens
    p90: float
    bubble_share: float  # share of longest · decodes that no prefix fills: Σ(B · max C - ΣC) ÷ Σ(B · max C)

    @classmethod
    def from_steps(cls, steps: Iterable[StepRecord]) -> PrefixSpread:
        spreads, room, filled = array("q"), 0, 0
        for step in steps:
            shape = step.shape
            if shape.decodes:
                spreads.append(spread(step))
                room += shape.decodes * shape.longest
                filled += shape.prefixes
        found = Distribution.from_values(spreads)
        return cls(found.mean, found.p90, ratio(room - filled, room))


def spread(step: StepRecord) -> int:
    return step.shape.longest - step.shortest


@dataclass(frozen=True, slots=True)
class PredictionError:
    """|predicted ÷ true - 1|, over steps with a prediction."""

    count: int
    p50: float
    p90: float

    @classmethod
    def from_errors(cls, errors: Iterable[float]) -> PredictionError:
        found = Distribution.from_values(errors)
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
    def from_steps(cls, steps: Iterable[StepRecord]) -> PredictionErrors:
        errors = {kind: array("d") for kind in Kind}
        for step in steps:
            if is_predicted(step):
                errors[step.shape.kind].append(abs(step.predicted_s / step.seconds - 1))
        return cls(
            PredictionError.from_errors(chain(*errors.values())), *map(PredictionError.from_errors, errors.values())
        )


def steps_of_kind(steps: Iterable[StepRecord], kind: Kind) -> list[StepRecord]:
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
    def from_steps(cls, steps: Sequence[StepRecord]) -> StepFigures:
        kinds = Counter(step.shape.kind for step in steps)
        return cls(
            count=len(steps),
            prefill=kinds[Kind.PREFILL],
            decode=kinds[Kind.DECODE],
            mixed=kinds[Kind.MIXED],
            seconds=Distribution.from_values(step.seconds for step in steps),
            tokens=Distribution.from_values(step.shape.tokens for step in steps),
            spread=PrefixSpread.from_steps(steps),
            prediction=PredictionErrors.from_steps(steps),
        )


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """Figures of copies in both directions together."""

    count: int
    to_device: int
    tokens: int
    seconds: float

    @classmethod
    def from_copies(cls, copies: Sequence[CopyRecord]) -> CopyFigures:
        return cls(
            count=len(copies),
            to_device=sum(copy.to_device for copy in copies),
            tokens=sum(copy.num_tokens for copy in copies),
            seconds=fsum(copy.seconds for copy in copies),
        )


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Shares of the run. Time in which a copy runs beside a step counts in both, so their sum may be above 1."""

    name: str
    role: Role
    steps: int
    step_share: float
    copy_share: float
    kv_wait_share: float  # no step ran, and KV was on its way to the device


def worker_figures(record: RunRecord) -> tuple[WorkerFigures, ...]:
    steps, copies = _seconds_by_worker(record.steps), _seconds_by_worker(record.copies)
    waited = _seconds_without_kv(record)
    return tuple(
        WorkerFigures(
            name=name,
            role=role,
            steps=len(steps[name]),
            step_share=ratio(fsum(steps[name]), record.duration_s),
            copy_share=ratio(fsum(copies[name]), record.duration_s),
            kv_wait_share=ratio(waited[name], record.duration_s),
        )
        for name, role in record.workers.items()
    )


def _seconds_without_kv(record: RunRecord) -> Mapping[str, float]:
    """Return for how long each worker ran no step while KV came to its device.

    Steps of a worker follow each other; KV for several requests may come at once."""
    is_kv: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in record.workers}
    for copy in chain(record.copies, record.received):
        if copy.to_device:
            is_kv[copy.worker].append((copy.began_at, copy.seconds, True))
    for step in record.steps:
        is_kv[step.worker].append((step.began_at, step.seconds, False))
    waited = dict.fromkeys(record.workers, 0.0)
    for name, work in is_kv.items():
        edges = sorted((at, change, kv) for began, s, kv in work for at, change in ((began, 1), (began + s, -1)))
        since, coming, stepping = 0.0, 0, 0
        for at, change, kv in edges:
            waited[name] += at - since if coming and not stepping else 0.0
            since, coming, stepping = at, coming + change * kv, stepping + change * (not kv)
    return waited


def _seconds_by_worker(work: Iterable[StepRecord | CopyRecord]) -> Mapping[str, Sequence[float]]:
    seconds: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    for record in work:
        seconds[record.worker].append(record.seconds)
    return seconds


def mean_step_share(workers: Iterable[WorkerFigures]) -> float:
    return mean([worker.step_share for worker in workers])
