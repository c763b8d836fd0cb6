"""The interface of a scheduler: an object that plans the steps of one worker.

A worker asks for its next step, which `plan` returns for a view: the requests that may run, the prompts that wait, and
the memory that a step may take. Little comes beside it: which prompt gets a seat where `plan` gives no seats, which
request leaves where memory is short, whether a step may be planned while another runs. By default these are first come,
first served. A method is given all that it needs to know of the worker: a scheduler asks no other part.

A request with memory on a decode worker is a resident. Residents that a step leaves out keep their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, RanStep, StepAhead, StepContext, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

NO_LIMIT = 1 << 30  # requests in a step


class Scheduler(ABC):
    levels: Levels | None = None  # where requests take memory from others of lower levels (Policy.swaps)

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        """`most` requests run in a step; on a prefill worker there is no limit."""
        self.policy, self.most = policy, most
        self.most_seated = most  # requests, where prompts are seated as they come and `plan` gives no seats (is_plain)

    @abstractmethod
    def plan(self, view: StepView) -> PlannedStep:
        """Return a step of these requests."""

    def goes_on(self, ahead: StepAhead, at: StepContext) -> bool:
        """Return whether exactly these decodes may be planned now as the step after the running step."""
        return 0 < len(ahead.decodes) <= min(at.room, self.most)

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
