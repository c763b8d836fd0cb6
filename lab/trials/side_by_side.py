"""Runs many trials of the simulator, in as many processes as there are cores.

with side_by_side(figures_of) as run_all:
    figures = {run.trial: run.figures for run in run_all(trials)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

from alignedserve.lab.processes import one_for_each_core, processes
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun
from alignedserve.lab.trials.running import run_once

T = TypeVar("T")
R = TypeVar("R")
RunAll: TypeAlias = Callable[[Iterable[T]], Iterator[R]]


def figures_of(trial: SimulationTrial) -> TrialRun:
    return TrialRun.from_record(trial, run_once(trial, lambda _ended, _all_requests: None))


@contextmanager
def side_by_side(run: Callable[[T], R], jobs: int | None = None) -> Iterator[RunAll[T, R]]:
    """Return a function that runs trials, and yields each run when it has ended, in whatever order.

    The processes stay until the end of the block, for several calls.
    """
    with processes(jobs or one_for_each_core()) as started:
        yield partial(started.as_done, run)
