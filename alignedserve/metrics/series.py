"""Metrics of one process. No metric is global, so that two applications in one process stay apart.

In Prometheus' text form they are blocks: a family's name and meaning, and below them its series. Blocks are made one at
a time, and the event loop goes on in between: all of them together would hold it for milliseconds, in which no stream
gets its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
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


# --- The text form


_HELP = "# HELP "


def block(name: str, kind: str, about: str, lines: Iterable[str]) -> str:
    return f"{_HELP}{name} {about}\n# TYPE {name} {kind}\n{''.join(lines)}"


def line(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {float(value)}\n"


def label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'


async def in_turns(blocks: Iterable[str]) -> list[str]:
    """Make the blocks, and let the event loop go on after each."""
    made: list[str] = []
    for one in blocks:
        made.append(one)
        await asyncio.sleep(0)
    return made


def split(text: str) -> list[str]:
    """Return the blocks of a text."""
    return [f"{_HELP}{rest}\n" for rest in f"\n{text}".removesuffix("\n").split(f"\n{_HELP}")[1:]]


def merge(blocks: Iterable[str]) -> str:
    """Return the blocks as one text, with each family once, that has the series of all."""
    families: dict[tuple[str, str], list[str]] = {}  # by its two lines of comment
    for one in blocks:
        about, kind, series = one.split("\n", 2)
        families.setdefault((about, kind), []).append(series)
    return "".join(piece for (about, kind), series in families.items() for piece in (f"{about}\n{kind}\n", *series))
