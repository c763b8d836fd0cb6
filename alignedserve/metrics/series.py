"""Metrics of one process. No metric is global, so that two applications in one process stay apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from alignedserve.config.choices import MetricsPrefix

disable_created_metrics()  # a fifth of all lines, which nobody asks for

PART, MODEL = "part", "model_name"
_MOST_SERIES = 200  # of a block, which takes the event loop some milliseconds

Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)


@dataclass(frozen=True)
class MetricFamily(Generic[Instrument]):
    """Metrics of one name, one for each combination of labels."""

    _metric: Instrument
    _common: tuple[str, ...]
    _known: dict[tuple[str, ...], Instrument] = field(default_factory=dict)  # to ask the library takes 5 µs

    def of(self, *labels: str) -> Instrument:
        if (known := self._known.get(labels)) is None:
            self._known[labels] = known = self._metric.labels(*self._common, *labels)
        return known

    def forget(self, *labels: str) -> None:
        """Show the metric with these labels no more."""
        self._known.pop(labels, None)
        with suppress(KeyError):
            self._metric.remove(*self._common, *labels)


class Series:
    """Makes metrics whose names have a common prefix, and whose first labels are the process's part and the model."""

    names = PART, MODEL

    def __init__(
        self, model: str = "", prefix: MetricsPrefix = MetricsPrefix.ALIGNEDSERVE, part: str = "gateway-0"
    ) -> None:
        self.prefix, self.registry = f"{prefix.value}:", CollectorRegistry()
        self.values = part, model  # of the labels `names`

    def counter(self, name: str, about: str, *labels: str) -> MetricFamily[Counter]:
        return MetricFamily(Counter(*self._named(name, about, labels), registry=self.registry), self.values)

    def gauge(self, name: str, about: str, *labels: str) -> MetricFamily[Gauge]:
        return MetricFamily(Gauge(*self._named(name, about, labels), registry=self.registry), self.values)

    def histogram(self, name: str, about: str, buckets: tuple[float, ...], *labels: str) -> MetricFamily[Histogram]:
        named = self._named(name, about, labels)
        return MetricFamily(Histogram(*named, buckets=buckets, registry=self.registry), self.values)

    def _named(self, name: str, about: str, labels: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
        return f"{self.prefix}{name}", about, (*self.names, *labels)

    def blocks(self) -> Iterator[str]:
        """Yield each family as it is when its turn comes; a long one, as of many keys, comes in several blocks."""
        for metric in self.registry.collect():
            for at in range(0, max(1, len(metric.samples)), _MOST_SERIES):
                some = Metric(metric.name, metric.documentation, metric.type)
                some.samples = metric.samples[at : at + _MOST_SERIES]
                yield generate_latest(_Alone(some)).decode()


class _Alone(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
