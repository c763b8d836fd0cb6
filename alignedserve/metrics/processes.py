"""Metrics of processes and their Python, under the names that Prometheus' clients give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from alignedserve.metrics.exposition import block, label
from alignedserve.metrics.part_tables import PartMetric, Values
from alignedserve.metrics.series import PART
from alignedserve.protocol.figures import Garbage, ProcessFigures


def _alone(read: Callable[[ProcessFigures], float]) -> Callable[[ProcessFigures], Values]:
    return lambda figures: (("", read(figures)),)


def _by_generation(read: Callable[[Garbage], int]) -> Callable[[ProcessFigures], Values]:
    return lambda figures: [(f'generation="{age}"', read(found)) for age, found in enumerate(figures.garbage)]


def _version(figures: ProcessFigures) -> Values:
    return ((label("version", figures.python), 1),) if figures.python else ()


_METRICS = (
    PartMetric(
        "counter", "process_cpu_seconds_total", "Processor time of the process.", PART, _alone(lambda told: told.cpu_s)
    ),
    PartMetric(
        "gauge",
        "process_resident_memory_bytes",
        "Memory of the process.",
        PART,
        _alone(lambda told: told.resident_bytes),
    ),
    PartMetric(
        "gauge", "process_open_fds", "Files that the process has open.", PART, _alone(lambda told: told.num_files)
    ),
    PartMetric(
        "gauge",
        "process_start_time_seconds",
        "When the process started, in seconds since 1970.",
        PART,
        _alone(lambda told: told.started_at),
    ),
    PartMetric("gauge", "python_info", "The version of Python that the process runs.", PART, _version),
    PartMetric(
        "counter",
        "python_gc_collections_total",
        "Runs of Python's collector of garbage, by generation.",
        PART,
        _by_generation(lambda garbage: garbage.collections),
    ),
    PartMetric(
        "counter",
        "python_gc_objects_collected_total",
        "Objects that the collector freed.",
        PART,
        _by_generation(lambda garbage: garbage.collected),
    ),
    PartMetric(
        "counter",
        "python_gc_objects_uncollectable_total",
        "Objects that the collector found unreachable and could not free.",
        PART,
        _by_generation(lambda garbage: garbage.uncollectable),
    ),
)


def process_blocks(parts: Sequence[tuple[str, ProcessFigures]]) -> Iterator[str]:
    """Yield the families of the processes of these parts, each with its part's name."""
    for metric in _METRICS:
        lines = [line for part, figures in parts for line in metric.lines(metric.name, "", part, figures)]
        yield block(metric.name, metric.kind, metric.about, lines)
