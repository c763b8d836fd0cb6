"""What the simulation notes while it runs, if it is asked to: a tuple for each step and copy, and no more.

Objects are made of them when the run is over. What a worker was doing when it died is not noted: it brought nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import nan

from alignedserve.core import StepPlan
from alignedserve.cost import Shape, shape_of
from alignedserve.messages import Command, CopyIn, CopyOut, Event, Member, RunStep
from alignedserve.simulator.records import CopyRecord, StepRecord
from alignedserve.simulator.world import Hands

# worker, began_at, seconds, predicted_s, shape, shortest, emitted
_Step = tuple[str, float, float, float, Shape, int, tuple[str, ...]]


class Recorder:
    def __init__(self, budget: int) -> None:
        self._budget = budget  # of every worker
        self.num_recomputed: Counter[str] = Counter()  # request -> how often its prompt ran anew after its first token
        self._steps: list[_Step] = []
        self._copies: list[tuple[str, float, float, bool, int]] = []  # worker, began_at, seconds, to_device, tokens

    def step(self, worker: str, began_at: float, seconds: float, plan: StepPlan) -> None:
        shortest = min((decode.start for decode in plan.decodes), default=0)
        self.num_recomputed.update(chunk.request for chunk in plan.chunks if not chunk.start and chunk.index)
        self._steps.append(
            (worker, began_at, seconds, plan.predicted_s or nan, shape_of(plan), shortest, _emitted(plan))
        )

    def copy(self, worker: str, began_at: float, seconds: float, command: CopyIn | CopyOut) -> None:
        to_device = isinstance(command, CopyIn)
        self._copies.append((worker, began_at, seconds, to_device, len(command.tokens)))

    def steps(self) -> list[StepRecord]:
        return [
            StepRecord(worker, began_at, seconds, predicted_s, shape, shortest, self._budget, emitted=emitted)
            for worker, began_at, seconds, predicted_s, shape, shortest, emitted in self._steps
        ]

    def copies(self) -> list[CopyRecord]:
        return [CopyRecord(*copy) for copy in self._copies]


def _emitted(plan: StepPlan) -> tuple[str, ...]:
    ended = [chunk.request for chunk in plan.chunks if chunk.sampling is not None]
    return (*ended, *(decode.request for decode in plan.decodes))


class RecordedHands:
    """The hands of a worker, which does one thing at a time, and what they do noted."""

    def __init__(self, hands: Hands, worker: str, now: Callable[[], float], recorder: Recorder) -> None:
        self._hands, self._worker, self._now, self._recorder = hands, worker, now, recorder
        self._begun_at = 0.0

    def meet(self, member: Member) -> None:
        self._hands.meet(member)

    def part_from(self, member: Member) -> None:
        self._hands.part_from(member)

    def perform(self, command: Command) -> None:
        self._hands.perform(command)

    def begin(self, command: Command) -> float:
        self._begun_at = self._now()
        return self._hands.begin(command)

    def finish(self, command: Command, seconds: float) -> Event:
        match command:
            case RunStep(plan):
                self._recorder.step(self._worker, self._begun_at, seconds, plan)
            case CopyIn() | CopyOut():
                self._recorder.copy(self._worker, self._begun_at, seconds, command)
        return self._hands.finish(command, seconds)
