"""The metrics of workers, pools and the router, as each told last. Every gateway hears the same, and shows the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

from alignedserve.config.choices import MetricsPrefix
from alignedserve.core import Fallback, Role
from alignedserve.metrics.part_tables import (
    HISTOGRAMS,
    PART_METRICS,
    PartMetric,
    WorkerHistogram,
    machine_blocks,
    process_blocks,
)
from alignedserve.metrics.series import MODEL, block, label, line
from alignedserve.protocol.figures import machine_of_each_node
from alignedserve.protocol.messages import ROUTER, Figures, Member
from alignedserve.protocol.roads import Road, road_between

ROADS = "kv_road", "How KV goes between a prefill and a decode worker: 1 for each pair."
_Told: TypeAlias = Sequence[tuple[str, Figures]]


class PartMetrics:
    def __init__(
        self,
        model: str = "",
        prefix: MetricsPrefix = MetricsPrefix.ALIGNEDSERVE,
        members: Callable[[], Iterable[Member]] | None = None,
    ) -> None:
        """`members` returns those that are there; without it all that were heard of are taken to be there."""
        self._prefix, self._model, self._members = f"{prefix.value}:", label(MODEL, model), members
        # part -> its life, where that was known already, what it told last, and the number of that among all that was
        # told; other threads only set items
        self._told: dict[str, tuple[int | None, Figures, int]] = {}
        self._numbers = count()
        self._models: dict[str, str] = {}  # of parts that have another one

    def update(self, figures: Figures, model: str | None = None) -> None:
        """Take what a pool, a worker or the router tells, which may be of another model. Another thread may ask for the
        text meanwhile."""
        if model is not None:
            self._models[figures.member] = label(MODEL, model)
        self._told[figures.member] = self._lives().get(figures.member), figures, next(self._numbers)

    def blocks(self) -> Iterator[str]:
        """Yield each family, with the series of all parts that are there."""
        told = self._there()
        processes = [(part, figures.process) for part, figures in told if figures.process is not None]
        yield from process_blocks(processes)
        metrics: tuple[PartMetric[Figures] | WorkerHistogram, ...] = (*PART_METRICS, *HISTOGRAMS)
        for metric in metrics:
            name = f"{self._prefix}{metric.name}"
            labelled = ((self._models.get(part, self._model), part, figures) for part, figures in told)
            lines = (line for each in labelled for line in metric.lines(name, *each))
            yield block(name, metric.kind, metric.about, lines)
        yield block(f"{self._prefix}{ROADS[0]}", "gauge", ROADS[1], self._roads())
        nodes = {} if self._members is None else {member.name: member.node for member in self._members()}
        in_turn = sorted(processes, key=lambda told: self._told[told[0]][2])
        machines = ((nodes.get(part, ""), process.machine) for part, process in in_turn if process.machine is not None)
        yield from machine_blocks(self._prefix, self._model, machine_of_each_node(machines))

    def _roads(self) -> Iterator[str]:
        """Yield the road of each pair: workers of several nodes are one only where KV goes directly."""
        members = [] if self._members is None else [*self._members()]
        for one in members:
            for other in members:
                if one.kind is Role.PREFILL and other.kind is Role.DECODE:
                    road = road_between(one, other)
                    if road is not Road.HOST or one.node == other.node:
                        ends = label("prefill", one.name), label("decode", other.name), label("road", road.value)
                        yield line(f"{self._prefix}{ROADS[0]}", ",".join((self._model, *ends)), 1)

    def fallbacks(self) -> list[tuple[str, Fallback]]:
        """Return what does not work in each part that is there, and what it does instead."""
        processes = [(part, figures.process) for part, figures in self._there()]
        return [(part, fallback) for part, process in processes if process for fallback in process.fell_back]

    def weights(self) -> dict[str, str]:
        """Return how each worker keeps the weights of its model."""
        processes = [(part, figures.process) for part, figures in self._there()]
        return {part: process.weights for part, process in processes if process and process.weights}

    def _there(self) -> _Told:
        """Return what parts have told in a life that has not ended; of the router also while it is away."""
        told = [*self._told.items()]
        if self._members is None:
            return [(part, figures) for part, (_, figures, _) in told]
        lives = self._lives()
        return [
            (part, figures)
            for part, (life, figures, _) in told
            if part == ROUTER or (part in lives and life in (None, lives[part]))
        ]

    def _lives(self) -> dict[str, int]:
        return {} if self._members is None else {member.name: member.incarnation for member in self._members()}
