"""The interface of a scheduler: an object that plans the steps of one worker.

A worker asks `plan` for its next step, and gives it a view: the requests that may run, the prompts that wait, and the
memory that a step may take. The other methods answer what comes before a step: how many requests it takes, which
prompt gets a seat where `plan` does not give seats, and which request leaves where memory is short. As they stand they
are first come, first served.

A request with memory on a decode worker is a resident. Residents that a step leaves out keep their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.cost.model import Kind
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds
from alignedserve.worker.step.view import Selection, StepView, all_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

MaySeat: TypeAlias = Callable[[Running], bool]  # tells whether a prompt waits for memory alone


@dataclass(frozen=True)
class SchedulerSetup:
    """What a scheduler knows of its worker when it is made."""

    policy: Policy
    most: int  # requests in a step that the engine takes
    # Picks the request that is preempted first, among requests of one class.
    first_to_leave: Callable[[Sequence[Running], float], Running] = lambda requests, _now: requests[-1]
    times: Callable[[], StepTimes] = StepTimes  # of recent steps
    # Picks the requests of the old batch while another batch takes its place; otherwise returns all.
    old_of: Callable[[Sequence[Running]], Sequence[Running]] = lambda requests: requests


class Scheduler(ABC):
    bounds_steps = False  # whether promises bound the time of a step

    def __init__(self, setup: SchedulerSetup) -> None:
        self.policy, self.most = setup.policy, setup.most

    @abstractmethod
    def plan(self, view: StepView) -> Selection:
        """Return what the next step runs."""

    def bounds(self, view: StepView) -> StepBounds:
        """Return the most time that the next step may take."""
        return UNBOUNDED

    def all_decodes(self, view: StepView) -> Selection | None:
        """Return a step of all decodes where no prompt waits and all fit, else None."""
        at, decodes = view.at, view.decodes
        if view.prompts or view.waiting or len(decodes) > min(at.room, at.batch):
            return None
        found = all_of(decodes, (), at)
        return found if found.predicted_s <= self.bounds(view).all_s / at.caution(Kind.DECODE) else None

    @property
    def batch(self) -> int:
        """Return the largest number of requests for the next step."""
        return self.most

    def planned(self, selection: Selection) -> None:  # noqa: B027  (most schedulers keep nothing)
        """Note what runs next on a decode worker."""

    # --- Seats and memory

    def has_seat(self, num_seated: int) -> bool:
        """Return whether a prompt may be seated beside `num_seated` requests, where `plan` gives no seats."""
        return num_seated < self.most

    def first(self, waiting: WaitingPrompts, may_seat: MaySeat) -> Running | None:
        """Return the prompt that is seated next, where `plan` gives no seats."""
        return next(filter(may_seat, waiting), None)

    def takes_prompts(self, prompts_s: float, decodes_s: float) -> bool:
        """Return whether prompts may get memory for the next step, where memory is given by worth: prompts and decodes
        have been pending for so long in all."""
        return True

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        """Return the request that leaves for lack of memory; both are in the order of their seats."""
        return (prompts or decodes)[-1]

    def level(self, running: Running, now: float) -> int:
        """Return the level of a request, where requests take memory from others of lower levels (Policy.swaps)."""
        return 0

    def gives_way(self, seated: Sequence[Running], to: Running, now: float) -> list[Running]:
        """Return the seated requests that may leave for this one, the first to leave last."""
        return []
