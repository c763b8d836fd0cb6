"""Compute how busy workers were, how unequal the prefixes in their batches, and how exact the cost model."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import fsum, isfinite
from types import SimpleNamespace as Figures

from alignedserve.cost.model import Kind
from alignedserve.lab.loads.records.distribution import Distribution, ratio
from alignedserve.lab.loads.records.records import CopyRecord, RunRecord, StepRecord


def spread(step: StepRecord) -> int:
    return step.shape.longest - step.shortest


def is_predicted(step: StepRecord) -> bool:
    return isfinite(step.predicted_s) and step.seconds > 0


def step_figures(steps: Sequence[StepRecord]) -> Figures:
    kinds = Counter(step.shape.kind for step in steps)
    return Figures(
        count=len(steps),
        prefill=kinds[Kind.PREFILL],
        decode=kinds[Kind.DECODE],
        mixed=kinds[Kind.MIXED],
        seconds=Distribution.from_values(step.seconds for step in steps),
        tokens=Distribution.from_values(step.shape.tokens for step in steps),
        spread=_spreads(steps),
        prediction=_prediction_errors(steps),
    )


def _spreads(steps: Iterable[StepRecord]) -> Figures:
    """Return the spread of prefixes among the decodes of a step, longest less shortest, over steps with decodes; and
    the share of longest x decodes that no prefix fills: Σ(B · max C - ΣC) ÷ Σ(B · max C)."""
    spreads, room, filled = array("q"), 0, 0
    for step in steps:
        shape = step.shape
        if shape.decodes:
            spreads.append(spread(step))
            room += shape.decodes * shape.longest
            filled += shape.prefixes
    found = Distribution.from_values(spreads)
    return Figures(mean=found.mean, p90=found.p90, bubble_share=ratio(room - filled, room))


def _prediction_errors(steps: Iterable[StepRecord]) -> Figures:
    """Return |predicted ÷ true - 1| of steps with a prediction, of all and of each kind."""
    errors = {kind: array("d") for kind in Kind}
    for step in steps:
        if is_predicted(step):
            errors[step.shape.kind].append(abs(step.predicted_s / step.seconds - 1))

    def of(values: Iterable[float]) -> Figures:
        found = Distribution.from_values(values)
        return Figures(count=found.count, p50=found.p50, p90=found.p90)

    return Figures(all=of(chain(*errors.values())), **{kind.value: of(values) for kind, values in errors.items()})


def copy_figures(copies: Sequence[CopyRecord]) -> Figures:
    """Return the figures of copies in both directions together."""
    return Figures(
        count=len(copies),
        to_device=sum(copy.to_device for copy in copies),
        tokens=sum(copy.num_tokens for copy in copies),
        seconds=fsum(copy.seconds for copy in copies),
    )


def worker_figures(record: RunRecord) -> tuple[Figures, ...]:
    """Return each worker's shares of the run. Time in which a copy runs beside a step counts in both, so their sum may
    be above 1; it waits for KV where no step ran and KV was on its way to the device."""
    steps, copies = _seconds_by_worker(record.steps), _seconds_by_worker(record.copies)
    waited = _seconds_without_kv(record)
    return tuple(
        Figures(
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
