"""Metrics of processes and their Python, under the names that Prometheus' clients give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.metrics.exposition import block, label, line
from alignedserve.metrics.series import PART
from alignedserve.protocol.figures import Garbage, ProcessFigures

_Values: TypeAlias = Iterable[tuple[str, float]]  # each with labels of its own, if any


@dataclass(frozen=True)
class _Metric:
    kind: str
    name: str
    about: str
    read: Callable[[ProcessFigures], _Values]

    def lines(self, part: str, figures: ProcessFigures) -> Iterator[str]:
        whose = label(PART, part)
        for labels, value in self.read(figures):
            yield line(self.name, f"{labels},{whose}" if labels else whose, value)


def _alone(read: Callable[[ProcessFigures], float]) -> Callable[[ProcessFigures], _Values]:
    return lambda figures: (("", read(figures)),)


def _by_generation(read: Callable[[Garbage], int]) -> Callable[[ProcessFigures], _Values]:
    return lambda figures: [(f'generation="{age}"', read(found)) for age, found in enumerate(figures.garbage)]


def _version(figures: ProcessFigures) -> _Values:
    return ((label("version", figures.python), 1),) if figures.python else ()


_METRICS = (
    _Metric("counter", "process_cpu_seconds_total", "Processor time of the process.", _alone(lambda told: told.cpu_s)),
    _Metric(
        "gauge", "process_resident_memory_bytes", "Memory of the process.", _alone(lambda told: told.resident_bytes)
    ),
    _Metric("gauge", "process_open_fds", "Files that the process has open.", _alone(lambda told: told.num_files)),
    _Metric(
        "gauge",
        "process_start_time_seconds",
        "When the process started, in seconds since 1970.",
        _alone(lambda told: told.started_at),
    ),
    _Metric("gauge", "python_info", "The version of Python that the process runs.", _version),
    _Metric(
        "counter",
        "python_gc_collections_total",
        "Runs of Python's collector of garbage, by generation.",
        _by_generation(lambda garbage: garbage.collections),
    ),
    _Metric(
        "counter",
        "python_gc_objects_collected_total",
        "Objects that the collector freed.",
        _by_generation(lambda garbage: garbage.collected),
    ),
    _Metric(
        "counter",
        "python_gc_objects_uncollectable_total",
        "Objects that the collector found unreachable and could not free.",
        _by_generation(lambda garbage: garbage.uncollectable),
    ),
)


def process_blocks(parts: Sequence[tuple[str, ProcessFigures]]) -> Iterator[str]:
    """Yield the families of the processes of these parts, each with its part's name."""
    for metric in _METRICS:
        lines = [line for part, figures in parts for line in metric.lines(part, figures)]
        yield block(metric.name, metric.kind, metric.about, lines)
