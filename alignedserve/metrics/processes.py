"""Metrics of processes, under the names that Prometheus' clients give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from alignedserve.metrics.exposition import block, label, line
from alignedserve.metrics.series import PART
from alignedserve.protocol.figures import ProcessFigures


@dataclass(frozen=True)
class _Metric:
    name: str
    about: str
    read: Callable[[ProcessFigures], float]


_CPU = _Metric("process_cpu_seconds_total", "Processor time of the process.", lambda figures: figures.cpu_s)
_GAUGES = (
    _Metric("process_resident_memory_bytes", "Memory of the process.", lambda figures: figures.resident_bytes),
    _Metric("process_open_fds", "Files that the process has open.", lambda figures: figures.num_files),
    _Metric(
        "process_start_time_seconds",
        "When the process started, in seconds since 1970.",
        lambda figures: figures.started_at,
    ),
)


class ProcessCollector(Collector):
    """Shows this process's own figures."""

    def __init__(self, part: str, read: Callable[[], ProcessFigures | None]) -> None:
        self._part, self._read = part, read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        found = self._read()
        if found is None:
            return
        counter = CounterMetricFamily(_CPU.name.removesuffix("_total"), _CPU.about, labels=[PART])
        counter.add_metric([self._part], _CPU.read(found))
        yield counter
        for metric in _GAUGES:
            gauge = GaugeMetricFamily(metric.name, metric.about, labels=[PART])
            gauge.add_metric([self._part], metric.read(found))
            yield gauge


def process_blocks(parts: Sequence[tuple[str, ProcessFigures]]) -> Iterator[str]:
    """Yield the families of other parts' processes, each with its part's name."""
    for metric, kind in ((_CPU, "counter"), *((gauge, "gauge") for gauge in _GAUGES)):
        lines = [line(metric.name, label(PART, part), metric.read(figures)) for part, figures in parts]
        yield block(metric.name, kind, metric.about, lines)
