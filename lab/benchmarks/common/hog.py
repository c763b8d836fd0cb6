"""A tenant that takes half of the machine's memory bandwidth: in spells of the simulator's, and beside real servers.

Simulated, what steps read takes twice as long during a spell, and what they compute a tenth longer; spells and the
times between them last four seconds on average. Beside real servers a process copies memory without end, at half of
the rate at which this machine copies; it takes some of the processors' time too, which a neighbour in another virtual
machine would not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter, sleep

import numpy as np

from alignedserve.core import StepPlan
from alignedserve.cost.model import CostModel
from alignedserve.lab.devices.hardware import ProfileTruth

READING, COMPUTING = 2.0, 1.1  # times as long during a spell
SPELL_S = 4.0
_BYTES, _MEASURED_S, _SHARE = 64 << 20, 0.5, 0.5


@dataclass(eq=False)
class HoggedTruth(ProfileTruth):
    """A profiled device whose memory others use in spells."""

    model: CostModel
    seed: int
    now: Callable[[], float]
    _turns_at: list[float] = field(default_factory=lambda: [0.0])  # a spell ends, begins, ends, ...

    def __post_init__(self) -> None:
        super().__init__(self.model, self.seed)
        slowed = {kind: one.scaled(READING, COMPUTING) for kind, one in self.model.coefficients.items()}
        self._hogged = ProfileTruth(replace(self.model, coefficients=slowed), self.seed)
        self._chance = Random(self.seed)

    def seconds(self, plan: StepPlan) -> float:
        return self._hogged.seconds(plan) if self.is_in_spell() else super().seconds(plan)

    def is_in_spell(self) -> bool:
        while self._turns_at[-1] <= self.now():
            self._turns_at.append(self._turns_at[-1] + self._chance.expovariate(1 / SPELL_S))
        return len(self._turns_at) % 2 == 1


def copy_for_ever() -> None:
    memory, copy = (np.ones(_BYTES, np.uint8) for _ in range(2))
    began, copies = perf_counter(), 0
    while perf_counter() < began + _MEASURED_S:
        np.copyto(copy, memory)
        copies += 1
    each_s = (perf_counter() - began) / copies
    while True:
        ends_at = perf_counter() + each_s / _SHARE
        np.copyto(copy, memory)
        sleep(max(0.0, ends_at - perf_counter()))
