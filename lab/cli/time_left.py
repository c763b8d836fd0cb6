"""Estimate how long trials will take from how long those like them took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from alignedserve.lab.reports.trial import SimulationTrial


class TimeLeft:
    """A trial takes as long as those that differ from it by the seed; until one of these has ended, as long as the mean
    of all that have, and before that the usual time."""

    def __init__(self, usual_s: float, processes: int) -> None:
        self._usual_s, self._processes = usual_s, processes
        self._took_s: defaultdict[SimulationTrial, list[float]] = defaultdict(list)

    def ended(self, trial: SimulationTrial, took_s: float) -> None:
        self._took_s[replace(trial, seed=0)].append(took_s)

    def of(self, trials: Iterable[SimulationTrial]) -> float:
        """Return how many seconds these trials will take in all the processes together."""
        all_took_s = [took_s for those in self._took_s.values() for took_s in those]
        usual_s = [_mean(all_took_s) if all_took_s else self._usual_s]
        left_s = [_mean(self._took_s.get(replace(trial, seed=0), usual_s)) for trial in trials]
        return max(sum(left_s) / self._processes, max(left_s, default=0.0))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
