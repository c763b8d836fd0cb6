"""The ordered steps that have not ended: one; or two where a step is planned ahead, or runs in a pause of another.

    begin ──────▶ running ──▶ ended
    begin ──────▶ next ─────▶ running ──▶ ended  where a step fails, the step planned behind it does not count
    begin_amid ─▶ paused_step ───────▶ ended     in a pause of the running step, which goes on then
                    └───────▶ running ──▶ ended  where that step ended before the pause

Steps in flight may still write to blocks that are given up: such blocks are free when the last step that was ordered
by then has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.core import Chunk, Decode, StepPlan
from alignedserve.cost.model import EMPTY, Shape
from alignedserve.worker.step.view import RanStep


@dataclass(slots=True)
class Ended:
    """A step that has ended."""

    plan: StepPlan
    shape: Shape
    all_to: int  # all steps up to this number have ended
    free: list[tuple[int, ...]]  # blocks that no step writes to any more, in the order of leaving
    counts: bool  # whether the step before it went well
    paused: StepPlan | None  # the step that goes on now, where this one ran in its pause
    paused_s: float  # the pauses of this step


class StepsInFlight:
    def __init__(self, looks_ahead: bool = False) -> None:
        """`looks_ahead` says whether a step is planned while the step before runs."""
        self._looks_ahead = looks_ahead
        self.number = 0  # of the newest step that was ordered
        self.newest = RanStep()  # the newest step that was ordered, but for those in pauses; as schedulers see it
        self.running: StepPlan | None = None
        self._shape = EMPTY  # of the step that runs
        self._next: tuple[StepPlan, Shape] | None = None
        self._paused_step: tuple[StepPlan, Shape] | None = None  # in a pause of the step that runs
        self.takes_amid = False  # whether the running step may pause (open_to_pauses)
        self._paused_s = 0.0  # pauses of the running step so far
        self._goes_on = False  # whether the running step was planned while the one before it ran
        self._discarded_step = 0  # number of the step that was planned after a failed step
        self._left: list[tuple[int, tuple[int, ...]]] = []  # the last step that may still write there, and blocks

    @property
    def has_next(self) -> bool:
        return self._next is not None

    @property
    def takes_next(self) -> bool:
        """Return whether the step after the running step may be planned: while none is ordered for a pause."""
        return self._looks_ahead and self._next is None and self._paused_step is None

    @property
    def is_discarded(self) -> bool:
        """Return whether no result of the running step will count."""
        return self.running is not None and self.running.number == self._discarded_step

    @property
    def paused_step(self) -> StepPlan | None:
        """Return the step that was ordered for a pause of the running step."""
        return None if self._paused_step is None else self._paused_step[0]

    def plan(self, number: int) -> StepPlan | None:
        """Return the step of this number that ends now: the running step, or the one in its pause."""
        return self.paused_step if self.paused_step is not None and self.paused_step.number == number else self.running

    def beside(self, number: int) -> StepPlan | None:
        """Return the other step, where the step of this number is paused, or runs in a pause."""
        other = self.paused_step
        return self.running if other is not None and other.number == number else other

    @property
    def left(self) -> list[tuple[int, ...]]:
        """Return the blocks that no request has, and that are not free yet."""
        return [blocks for _, blocks in self._left]

    def begin(
        self, chunks: tuple[Chunk, ...], decodes: tuple[Decode, ...], shape: Shape, predicted_s: float
    ) -> StepPlan:
        """Return the plan of the next step. The running step pauses no more."""
        self.number += 1
        plan, self.takes_amid = StepPlan(self.number, chunks, decodes, predicted_s), False
        if self.running is None:
            self.running, self._shape = plan, shape
        else:
            self._next = plan, shape
        return plan

    def open_to_pauses(self) -> None:
        self.takes_amid = True

    def close_to_pauses(self) -> None:
        """Let the running step pause no more; a pause that has been ordered still comes."""
        self.takes_amid = False

    def begin_amid(self, chunks: tuple[Chunk, ...], shape: Shape, predicted_s: float) -> StepPlan:
        """Return the plan of a step for a pause of the running step."""
        self.number += 1
        plan = StepPlan(self.number, chunks, (), predicted_s)
        self._paused_step = plan, shape
        return plan

    def end(self, number: int, seconds: float = 0.0) -> Ended:
        """End the step, which ran for these seconds. Then the step planned ahead runs; or the step ordered for a pause,
        if the running step ended before the pause."""
        self._goes_on, paused, paused_s = self.has_next, None, 0.0
        if self._paused_step is not None and self._paused_step[0].number == number:
            (plan, shape), paused = self._paused_step, self.running
            self._paused_s += seconds
        else:
            plan, shape = self.running, self._shape
            self.running, self._shape = self._next or self._paused_step or (None, EMPTY)
            self.takes_amid = False
            paused_s, self._paused_s = self._paused_s, 0.0
        self._next = self._paused_step = None
        assert plan is not None, "a step ended that was not begun"
        assert plan.number == number, "a step ended that is not in flight"
        all_to = self.number if self.running is None else self.running.number - 1
        free: list[tuple[int, ...]] = []
        if self._left:
            free = [blocks for last, blocks in self._left if last <= all_to]
            self._left = [(last, blocks) for last, blocks in self._left if last > all_to]
        return Ended(
            plan, shape, all_to, free, counts=plan.number != self._discarded_step, paused=paused, paused_s=paused_s
        )

    def fail(self) -> None:
        """Note that the step that ended last failed: the next step has nothing to go on from."""
        if self.running is not None and self._goes_on:
            self._discarded_step = self.running.number

    def leave(self, blocks: tuple[int, ...]) -> bool:
        """Keep blocks until the steps in flight have ended; return False where no step is: the blocks are free now."""
        if self.running is None:
            return False
        self._left.append((self.number, blocks))
        return True
