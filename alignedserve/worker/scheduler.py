"""The interface of a scheduler: an object that plans the steps of one worker.

A worker asks for its next step, which `plan` returns for a view: the requests that may run, the prompts that wait, and
the memory that a step may take. Little comes beside it: which prompt gets a seat where `plan` gives no seats, which
request leaves where memory is short, whether a step may be planned while another runs, whether steps pause
(`makes_pauses`) and the prompts that run in a pause (`plan_amid`), and the levels of requests where those of higher
levels take memory. By default these are first come, first served, without pauses. A method is given all that it needs
to know of the worker.

A request with memory on a decode worker is a resident. Residents that a step leaves out keep their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from alignedserve.scheduling.policy import Policy, SchedulerRules
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds, StepBuilder
from alignedserve.worker.step.view import PlannedStep, RanStep, StepAhead, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

NO_LIMIT = 1 << 30  # requests in a step


class Scheduler(ABC):
    """Plans the steps of a worker. An installed package may offer one (scheduling/offered.py)."""

    rules: ClassVar[SchedulerRules] = SchedulerRules()  # what other parts know of it
    weighs_memory = False  # whether requests get memory by worth, before each step
    makes_pauses = False  # whether steps are to pause for prompts of chats
    levels: Levels | None = None  # where requests take memory from others of lower levels (Policy.swaps)

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        """`most` requests run in a step; on a prefill worker there is no limit."""
        self.policy, self.most = policy, most
        self.most_seated = most  # requests, where prompts are seated as they come and `plan` gives no seats (is_plain)

    @abstractmethod
    def plan(self, view: StepView) -> PlannedStep:
        """Return a step of these requests."""

    def step_of(self, view: StepView, requests: Iterable[WorkerRequest], bounds: StepBounds = UNBOUNDED) -> PlannedStep:
        """Return a step of these requests of the view, each once, in this order, as they fit in time and memory.

        Waiting prompts among them get seats. Where nothing fits, the first that can runs alone."""
        order = [((-1,), running) for running in dict.fromkeys(requests)]
        seated = {*view.decodes, *view.prompts}
        for _, running in order:
            if running not in seated and running not in view.waiting:
                raise ValueError(f"{running.request.id} is not in the view")
        step = StepBuilder(view, bounds, view.at.room, self.most)
        step.add(found for found in order if found[1].blocks or not step.must_wait(found[1]))
        if step.is_empty:
            step.add_one_alone(order, ())
        return step.selection

    def plan_amid(self, view: StepView, most_s: float) -> PlannedStep:
        """Return the step that runs while the running step pauses: prompts of chats, from `view.prompts` and
        `view.waiting`, `most_s` seconds at most. Called only if `makes_pauses`."""
        raise NotImplementedError

    def goes_on(self, ahead: StepAhead, at: StepContext) -> bool:
        """Return whether exactly these requests may be planned now as the step after the running step.

        A scheduler may do something else with prompts that have begun, so it is asked by `plan`."""
        return not ahead.chunks and 0 < len(ahead.decodes) <= min(at.room, self.most)

    def seating_order(self, waiting: WaitingPrompts, ran: RanStep) -> Iterable[WorkerRequest]:
        """Return the waiting prompts in the order of seating, where `plan` gives no seats."""
        return waiting

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        """Return the request that leaves for lack of memory; prompts and decodes come in the order of seating.

        The newest gives up all its memory first (PagedAttention §4.5)."""
        return (prompts or decodes)[-1]


class Levels(ABC):
    """Requests with levels: each takes memory and seats from requests of lower levels."""

    @abstractmethod
    def level(self, running: WorkerRequest, at: StepContext) -> int:
        """Return the level of a request, the highest first."""

    @abstractmethod
    def first_waiting(self, waiting: WaitingPrompts, at: StepContext) -> WorkerRequest | None:
        """Return the waiting prompt that is served first."""

    @abstractmethod
    def as_they_leave(self, seated: Sequence[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
        """Return the seated requests, the first to leave last."""

    def giving_way(self, seated: Sequence[WorkerRequest], to: WorkerRequest, at: StepContext) -> list[WorkerRequest]:
        """Return the seated requests that may leave for this request, the first to leave last."""
        level = self.level(to, at)
        return [seat for seat in self.as_they_leave(seated, at) if self.level(seat, at) > level]
