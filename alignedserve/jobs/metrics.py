"""The metrics of batch jobs: how many there are in which state, what became of lines, whether jobs are late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from alignedserve.jobs.state import JobFigures
from alignedserve.metrics.series import Series

_Kind = TypeVar("_Kind", bound=Enum)


class JobCollector(Collector):
    def __init__(self, series: Series, figures: Callable[[], JobFigures]) -> None:
        self._series, self._figures = series, figures
        series.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        found = self._figures()
        yield self._gauge("batch_jobs", "Open jobs by state.", "status", _named(found.open))
        yield self._counter("batch_jobs_ended", "Jobs that ended, by their last state.", "status", found.ended)
        lines = {"waiting": found.num_waiting, "running": found.num_running}
        yield self._gauge("batch_lines", "Lines of open jobs that have no result yet.", "state", lines)
        yield self._counter("batch_line_tries", "Tries of lines by what came of them.", "outcome", found.tries)
        about = "Open jobs that are expected to end after their window."
        yield self._gauge("batch_jobs_late", about, "", {"": found.num_late})
        about = "Time until the nearest end of an open job's window."
        nearest = {} if found.deadline_s is None else {"": found.deadline_s}
        yield self._gauge("batch_deadline_seconds", about, "", nearest)

    def _gauge(self, name: str, about: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        labels = [*self._series.names, *filter(None, (label,))]
        family = GaugeMetricFamily(f"{self._series.prefix}{name}", about, labels=labels)
        for kind, value in values.items():
            family.add_metric([*self._series.values, *filter(None, (kind,))], value)
        return family

    def _counter(self, name: str, about: str, label: str, values: Mapping[_Kind, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._series.prefix}{name}", about, labels=[*self._series.names, label])
        for kind, value in _named(values).items():
            family.add_metric([*self._series.values, kind], value)
        return family


def _named(values: Mapping[_Kind, int]) -> dict[str, int]:
    return {str(kind.value): value for kind, value in values.items()}
