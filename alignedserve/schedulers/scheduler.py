"""The interface of a scheduler: an object that plans the steps of one worker.

A worker asks for its next step, which `plan` returns for a view: the requests that may run, the prompts that wait, and
the memory that a step may take. The other methods answer what comes before a step: how many requests a step takes,
which prompt gets a seat where `plan` does not give seats, and which request leaves where memory is short. By default
these are first come, first served. A method is given all that it needs to know of the worker: a scheduler asks no other
part.

A request with memory on a decode worker is a resident. Residents that a step leaves out keep their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from alignedserve.cost.model import Kind
from alignedserve.policies.kinds import PolicyKind
from alignedserve.schedulers.custom import CustomChoice
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView, all_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

NO_LIMIT = 1 << 30  # requests in a step


class Scheduler(ABC):
    bounds_steps = False  # whether promises bound the time of a step
    seats_by_arrival = False  # whether prompts are seated as they come; else `plan` gives seats

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        """`most` requests run in a step; on a prefill worker there is no limit."""
        self.policy, self.most = policy, most
        guard = policy.own.guard(PolicyKind.PACKING) if most < NO_LIMIT else None
        self._choice = None if guard is None else CustomChoice(guard)
        self._runs_whole = policy.chunking is Chunking.NONE and not self.seats_by_arrival

    def next_step(self, view: StepView) -> PlannedStep:
        """Return what the next step runs: what `plan` says of the requests that a custom policy chooses."""
        plan = self._plan_whole if self._runs_whole else self.plan
        return plan(view) if self._choice is None else self._choice.plan(view, plan)

    @abstractmethod
    def plan(self, view: StepView) -> PlannedStep:
        """Return a step of these requests."""

    def _plan_whole(self, view: StepView) -> PlannedStep:
        """Return a step of prompts that are not cut; one of decodes where no prompt can run.

        This is an ablation of the schedulers that fill steps."""
        is_full = len(view.decodes) > self.batch
        if not is_full:
            self.forget_order()
        if view.prompts or view.waiting:
            found = self.plan(view._replace(decodes=()))
            if not found.is_empty:
                return found
        if is_full:
            return self.plan(view._replace(prompts=(), waiting=WaitingPrompts(self.policy)))
        return all_of(view.decodes[: view.at.room], (), view.at)

    def bounds(self, view: StepView) -> StepBounds:
        """Return the most time that the next step may take."""
        return UNBOUNDED

    def all_decodes(self, view: StepView) -> PlannedStep | None:
        """Return a step of all decodes where no prompt waits and all fit, else None."""
        at, decodes = view.at, view.decodes
        if view.prompts or view.waiting or len(decodes) > min(at.room, self.batch):
            return None
        found = all_of(decodes, (), at)
        return found if found.predicted_s <= self.bounds(view).careful_s(at, Kind.DECODE) else None

    @property
    def batch(self) -> int:
        """Return the largest number of requests for the next step."""
        return self.most

    @property
    def runs_all_again(self) -> bool:
        """Return whether the next step has the decodes of the last step, but for decodes that end."""
        return True

    def planned(self, selection: PlannedStep) -> None:
        """Note what runs next on a decode worker."""
        if self._choice is not None:
            self._choice.planned(selection)

    def goes_on(
        self,
        decodes: Sequence[WorkerRequest],
        paused: Sequence[WorkerRequest],
        steps_s: tuple[float, float],
        at: StepContext,
    ) -> bool:
        """Return whether exactly these decodes may be planned now as the step after the running step.

        `paused` decodes sit out that step; `steps_s` are the times of the running step and of that step. No gap may be
        longer than promised, and no arriving chat may wait for two steps instead of one.
        """
        if not self.runs_all_again or not 0 < len(decodes) <= min(at.room, self.batch):
            return False
        if not self.bounds_steps:
            return True
        gaps = [(running, steps_s[1]) for running in decodes] + [(running, sum(steps_s)) for running in paused]
        of_rt = [(gap_s, running.request.slo.tbt_s) for running, gap_s in gaps if running.promise.is_rt]
        is_kept = all(gap_s <= at.careful_s(tbt_s, Kind.DECODE) for gap_s, tbt_s in of_rt)
        return sum(steps_s) <= at.calm_s and is_kept

    # --- The order

    def in_order(self, requests: Iterable[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
        """Return requests that are here, in the order of service."""
        return in_order(requests, at)

    def moved(self, running: WorkerRequest) -> None:  # noqa: B027  (most schedulers keep no order)
        """Note that the place of a request in the order may have changed."""

    def forget_order(self) -> None:  # noqa: B027
        """Forget the kept order: a step runs that was planned without this order."""

    # --- Seats and memory

    def has_seat(self, num_seated: int) -> bool:
        """Return whether a prompt may be seated beside `num_seated` requests, where `plan` gives no seats."""
        return num_seated < self.most

    def seating_order(self, waiting: WaitingPrompts) -> Iterable[WorkerRequest]:
        """Return the waiting prompts in the order of seating, where `plan` gives no seats."""
        return waiting

    def first_waiting(self, waiting: WaitingPrompts, at: StepContext) -> WorkerRequest | None:
        """Return the waiting prompt that is served first."""
        if not self.seats_by_arrival:
            waiting.refresh(at.now, at.times, at.chunk)
        return next(iter(self.seating_order(waiting)), None)

    def takes_prompts(self, prompts_s: float, decodes_s: float) -> bool:
        """Return whether prompts may get memory for the next step, where memory is given by worth.

        `prompts_s` and `decodes_s` are the times that these have been pending in all."""
        return True

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        """Return the request that leaves for lack of memory; prompts and decodes come in the order of seating."""
        return (prompts or decodes)[-1]

    def level(self, running: WorkerRequest, at: StepContext) -> int:
        """Return the level of a request, where requests take memory from others of lower levels (Policy.swaps)."""
        return 0

    def gives_way(self, seated: Sequence[WorkerRequest], to: WorkerRequest, at: StepContext) -> list[WorkerRequest]:
        """Return the seated requests that may leave for this request, the first to leave last."""
        return []
