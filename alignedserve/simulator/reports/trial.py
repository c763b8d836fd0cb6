"""One run of a comparison: what is asked for, who does it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.figures import RunFigures

OnProgress = Callable[[int, int], None]  # requests that have ended, and all of them


@dataclass(frozen=True, slots=True)
class SimulationTrial:
    preset: str
    workload: str | None = None  # as the user wrote it; None for the default
    cluster: str = "colocated"
    seed: int = 0
    rate: float | None = None  # arrivals in a second, in place of the workload's own
    profile: str | None = None  # what steps take: the name of a GPU profile, or a file
    direct: bool | None = (
        None  # whether prefill workers send KV to decode workers, or only by the pool; None: by preset
    )
    options: tuple[str, ...] = ()  # settings that outweigh the preset's, each as path=value
    gateway_ms: float = 0.0  # what a request takes besides its steps and the parts' frames: HTTP, templates, tokens

    @property
    def name(self) -> str:
        at = "" if self.rate is None else f", {self.rate:g}/s"
        return f"{self.preset}{at}, seed {self.seed}"

    @property
    def setting(self) -> str:
        """What all runs of a comparison share."""
        parts = [self.cluster, f"workload {self.workload or 'default'}"]
        parts += [f"profile {self.profile}"] if self.profile else []
        parts += [*self.options]
        parts += ["KV sent from device to device"] if self.direct else []
        parts += [f"gateway {self.gateway_ms:g} ms"] if self.gateway_ms else []
        return ", ".join(parts)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.setting}"


class RunOnce(Protocol):
    """Nothing but the trial decides what comes of it, the wall-clock time apart."""

    def __call__(self, trial: SimulationTrial, on_progress: OnProgress) -> RunRecord: ...


@dataclass(frozen=True, slots=True)
class TrialRun:
    trial: SimulationTrial
    figures: RunFigures
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the reader of the figures should know

    @classmethod
    def of(cls, trial: SimulationTrial, record: RunRecord) -> TrialRun:
        return cls(trial, RunFigures.of(record), record.problems, record.notes)


def trials(
    common: SimulationTrial, presets: Sequence[str], seeds: Sequence[int], rates: Sequence[float]
) -> list[SimulationTrial]:
    """Each preset with each seed at each rate; the presets take turns in going first, so that none always runs warm."""
    wanted: Sequence[float | None] = rates or [common.rate]
    return [
        replace(common, preset=preset, seed=seed, rate=rate)
        for rate in wanted
        for number, seed in enumerate(seeds)
        for preset in _turned(presets, number)
    ]


def _turned(presets: Sequence[str], number: int) -> Sequence[str]:
    return presets[::-1] if number % 2 else presets


def by_preset(runs: Iterable[TrialRun]) -> dict[str, list[TrialRun]]:
    found: dict[str, list[TrialRun]] = {}
    for run in runs:
        found.setdefault(run.trial.preset, []).append(run)
    return found


def by_rate(runs: Iterable[TrialRun]) -> Iterator[tuple[float | None, list[TrialRun]]]:
    """From the lowest."""
    found: dict[float | None, list[TrialRun]] = {}
    for run in runs:
        found.setdefault(run.trial.rate, []).append(run)
    yield from sorted(found.items(), key=lambda one: one[0] or 0.0)
