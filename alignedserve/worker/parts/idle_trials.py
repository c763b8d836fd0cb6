"""Measure again how fast the machine is, while the worker has nothing to do.

A worker that takes its machine to be slow, as its profile or its last steps were, may be wrong by now: the other work
may have ended. So after some idle seconds it runs a few short steps that nobody asked for, on free pairs, and then
expects as much of steps as these took. A request that comes meanwhile waits for one of them at most; those that had run
are forgotten.
"""

from __future__ import annotations

from statistics import median

from alignedserve.core import StepPlan
from alignedserve.cost.model import EMPTY
from alignedserve.cost.profile import BUSY
from alignedserve.cost.trials import Bounds, Trial
from alignedserve.protocol.commands import Command, RunStep, SetTimer
from alignedserve.protocol.events import Event, StepDone
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart

IDLE_S = 2.0
AGAIN_S = 60.0  # after which an idle worker measures again whose machine is still slow, or whose trial failed
_TIMER = "idle trials"
_LONGEST = 64  # tokens of a request
_TRIALS = (
    *(Trial(((8, 0),)), Trial(prefixes=(16,)), Trial(((8, 0),), (16,))),
    *(Trial(((16, 0),)), Trial(prefixes=(16,) * 2), Trial(((16, 0),), (16,) * 2)),
    *(Trial(((32, 0),)), Trial(prefixes=(16,) * 4), Trial(((32, 0),), (16,) * 4)),
)


class IdleTrials(CorePart):
    def __init__(self, common: Common) -> None:
        self._steps, self._pace, self._memory = common.steps, common.pace, common.memory
        self._roster, self._retirement, self._limits = common.roster, common.retirement, common.limits
        bounds = Bounds(common.limits, _LONGEST)
        # Without a profile nothing is known of a quiet machine.
        self._trials = [trial for trial in _TRIALS if bounds.allow(trial) and common.setup.cost is not None]
        self._starts_at: float | None = None  # the first trial; None while there is work, or nothing to measure
        self._running: StepPlan | None = None
        self._ratios: list[float] = []  # of the trials that have run, measured / predicted

    def hear(self, event: Event, now: float) -> list[Command]:
        """Note what a trial took; this comes before the step's end."""
        trial = self._running
        if not isinstance(event, StepDone) or trial is None or event.result.number != trial.number:
            return []
        self._running = None
        if (
            event.result.failure is not None or trial.predicted_s <= 0
        ):  # what is predicted to take no time tells nothing
            return self._start_in(AGAIN_S, now)
        self._ratios.append(event.seconds / trial.predicted_s)
        return []

    def measure(self, now: float) -> list[Command]:
        """Run the next trial if the worker is idle and believes its machine to be slow."""
        if self._steps.running is not None:
            return []
        is_of_use = self._trials and self._pace.slowdown >= BUSY and not self._retirement.is_retiring
        if not is_of_use or self._roster.attempts():
            self._starts_at = None
            return []
        if self._starts_at is None:
            return self._start_in(IDLE_S, now)
        if now < self._starts_at:
            return []
        if len(self._ratios) < len(self._trials):
            return self._run(self._trials[len(self._ratios)])
        self._pace.rescale(median(self._ratios))
        return self._start_in(AGAIN_S, now)

    def _start_in(self, seconds: float, now: float) -> list[Command]:
        self._ratios.clear()
        self._starts_at = now + seconds
        return [SetTimer(_TIMER, self._starts_at)]

    def _run(self, trial: Trial) -> list[Command]:
        """Begin the step of a trial on pairs that come free with its end. Nothing else is learned from it."""
        block_size = self._limits.block_size
        counts = trial.num_pairs(block_size)
        pairs = self._memory.blocks.take(sum(counts))
        if pairs is None:
            return []
        chunks, decodes = trial.parts(pairs, block_size)
        self._running = self._steps.begin(chunks, decodes, EMPTY, self._pace.cost.seconds(trial.shape))
        self._memory.leave(pairs)
        return [RunStep(self._running)]
