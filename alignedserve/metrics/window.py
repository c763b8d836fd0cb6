"""Count which promises were kept over the last minutes: by class, by deadline, and by tier."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from alignedserve.core import ServiceClass
from alignedserve.metrics.series import Series

WINDOW_S, _SLOT_S = 900.0, 15.0


ALL = "all"  # the deadlines of a request together


@dataclass(frozen=True, slots=True)
class DeadlineOutcome:
    """A deadline of a request that has ended, or ALL of them, and whether it was kept."""

    service: ServiceClass
    deadline: str
    tier: str
    is_kept: bool


class AttainmentWindow(Collector):
    """Counts of the last WINDOW_S seconds, in slots of time; it shows their shares as a gauge when it is asked."""

    def __init__(self, series: Series, now: Callable[[], float]) -> None:
        self._series, self._now = series, now
        self._slots: deque[tuple[int, Counter[DeadlineOutcome]]] = deque()  # the oldest first
        series.registry.register(self)

    def count(self, outcome: DeadlineOutcome) -> None:
        slot = int(self._now() // _SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
            self._forget(slot)
        self._slots[-1][1][outcome] += 1

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the share that was kept, by class, deadline and tier."""
        self._forget(int(self._now() // _SLOT_S))
        kept: Counter[tuple[ServiceClass, str, str]] = Counter()
        every: Counter[tuple[ServiceClass, str, str]] = Counter()
        for _, counts in self._slots:
            for found, number in counts.items():
                key = found.service, found.deadline, found.tier
                every[key] += number
                kept[key] += number * found.is_kept
        about = f"Share of requests that ended in the last {WINDOW_S / 60:g} minutes with this deadline kept."
        labels = (*self._series.names, "class", "kind", "tier")
        family = GaugeMetricFamily(f"{self._series.prefix}slo_attainment", about, labels=labels)
        for key in sorted(every, key=lambda key: str((key, kept[key] / every[key]))):
            service, deadline, tier = key
            family.add_metric([*self._series.values, service.value, deadline, tier], kept[key] / every[key])
        yield family

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - WINDOW_S / _SLOT_S:
            self._slots.popleft()
