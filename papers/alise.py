"""ALISE (Algorithm 2): a request takes memory from requests of lower levels, which are swapped out.

The device holds as many requests as have memory and seats there: the paper's limit M. Others are in the pool. The
request with the longest expected wait goes there first (EWT, ALISE §3.2), and comes back when its turn is before the
turn of a request on the device. Requests of the same level take nothing from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.papers.in_order import InOrder
from alignedserve.scheduling.levels import InLine, level_of, shortest_wait_first
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Standing
from alignedserve.worker.scheduler import NO_LIMIT, Levels
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class Alise(InOrder, Levels):
    """Requests run by level; the request with the longest expected wait leaves."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self.levels = self if policy.swaps else None

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return self.as_they_leave((*prompts, *decodes), at)[-1]

    def level(self, running: WorkerRequest, at: StepContext) -> int:
        return self._standing(running, at).level

    def first_waiting(self, waiting: WaitingPrompts, at: StepContext) -> WorkerRequest | None:
        waiting.refresh(at.now, at.times, at.chunk)
        return next((prompt for _, prompt in waiting.in_order(0.0, 0.0)), None)

    def as_they_leave(self, seated: Sequence[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
        """Return seated requests by the wait for the next step that each would have in line."""
        policy, times = self.policy, at.times
        line = list(policy.ordering.sort(seated, lambda seat: self._standing(seat, at), times, policy.late))

        def in_line(seat: WorkerRequest) -> InLine:
            steps = int(self._standing(seat, at).remaining)
            return InLine(steps * times.mean_s, at.now - seat.request.arrival_at, level_of(steps))

        return shortest_wait_first(line, in_line, max(1, len(line)), policy.age_s)

    def _standing(self, running: WorkerRequest, at: StepContext) -> Standing:
        return running.promise.standing(at.now, running.work(1), at.times)
