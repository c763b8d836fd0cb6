"""Define the input of a simulated run, the function that makes it, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.reports.figures import RunFigures

OnProgress = Callable[[int, int], None]  # number of ended requests, number of all requests


@dataclass(frozen=True, slots=True)
class SimulationTrial:
    preset: str
    workload: str | None = None  # text as the user wrote it; None: the default
    cluster: str = "colocated"
    seed: int = 0
    rate: float | None = None  # arrivals per second, instead of the workload's own rate
    profile: str | None = None  # name of a GPU profile, or a file, that gives the duration of steps
    direct: bool | None = None  # whether prefill workers send KV directly to decode workers; None: as the preset says
    options: tuple[str, ...] = ()  # settings that override the preset's, each as path=value
    gateway_ms: float = 0.0  # time of a request besides steps and messages: HTTP, templates, tokens

    @property
    def name(self) -> str:
        at = "" if self.rate is None else f", {self.rate:g}/s"
        return f"{self.preset}{at}, seed {self.seed}"

    @property
    def setting(self) -> str:
        """Return the settings that all runs of a comparison share, as text."""
        parts = [self.cluster, f"workload {self.workload or 'default'}"]
        parts += [f"profile {self.profile}"] if self.profile else []
        parts += [*self.options]
        parts += ["KV sent from device to device"] if self.direct else []
        parts += [f"gateway {self.gateway_ms:g} ms"] if self.gateway_ms else []
        return ", ".join(parts)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.setting}"


@dataclass(frozen=True, slots=True)
class TrialRun:
    trial: SimulationTrial
    figures: RunFigures
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # hints for the reader of the figures

    @classmethod
    def from_record(cls, trial: SimulationTrial, record: RunRecord) -> TrialRun:
        return cls(trial, RunFigures.from_record(record), record.problems, record.notes)


def trials(
    common: SimulationTrial, presets: Sequence[str], seeds: Sequence[int], rates: Sequence[float]
) -> list[SimulationTrial]:
    """Return a trial for each preset, seed and rate. The order of presets alternates, so that none always runs warm."""
    wanted: Sequence[float | None] = rates or [common.rate]
    return [
        replace(common, preset=preset, seed=seed, rate=rate)
        for rate in wanted
        for number, seed in enumerate(seeds)
        for preset in (presets[::-1] if number % 2 else presets)
    ]


def by_preset(runs: Iterable[TrialRun]) -> dict[str, list[TrialRun]]:
    found: dict[str, list[TrialRun]] = {}
    for run in runs:
        found.setdefault(run.trial.preset, []).append(run)
    return found


def by_rate(runs: Iterable[TrialRun]) -> Iterator[tuple[float | None, list[TrialRun]]]:
    """Yield the runs of each rate, from the lowest rate."""
    found: dict[float | None, list[TrialRun]] = {}
    for run in runs:
        found.setdefault(run.trial.rate, []).append(run)
    yield from sorted(found.items(), key=lambda at_rate: at_rate[0] or 0.0)
