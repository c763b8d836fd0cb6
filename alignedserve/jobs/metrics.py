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
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


class JobCollector(Collector):
    def __init__(self, series: Series, figures: Callable[[], JobFigures]) -> None:
        self._series, self._figures = series, figures
        series.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        found, gauge, counter = self._figures(), GaugeMetricFamily, CounterMetricFamily
        yield self._family(gauge, "batch_jobs", "Open jobs by state.", _named(found.open), "status")
        ended = _named(found.ended)
        yield self._family(counter, "batch_jobs_ended", "Jobs that ended, by their last state.", ended, "status")
        lines = {"waiting": found.num_waiting, "running": found.num_running}
        yield self._family(gauge, "batch_lines", "Lines of open jobs that have no result yet.", lines, "state")
        tries = _named(found.tries)
        yield self._family(counter, "batch_line_tries", "Tries of lines by what came of them.", tries, "outcome")
        about = "Open jobs that are expected to end after their window."
        yield self._family(gauge, "batch_jobs_late", about, {"": found.num_late})
        about = "Time until the nearest end of an open job's window."
        nearest = {} if found.deadline_s is None else {"": found.deadline_s}
        yield self._family(gauge, "batch_deadline_seconds", about, nearest)

    def _family(self, kind: type[_Family], name: str, about: str, values: Mapping[str, float], *label: str) -> _Family:
        """Return the family with a series for each value of its label; without one, with a series of its own."""
        family = kind(f"{self._series.prefix}{name}", about, labels=[*self._series.names, *label])
        for of, value in values.items():
            family.add_metric([*self._series.values, *([of] if label else [])], value)
        return family


def _named(values: Mapping[_Kind, int]) -> dict[str, int]:
    return {str(kind.value): value for kind, value in values.items()}
