"""Levels of service: the requests that were served least run first, and nothing is predicted.

A request that has used up the bound of a level goes on in the next lower level. An example: the first level reaches to
32 tokens of output, the second to 96; a request with 40 tokens runs after all that have fewer than 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.papers.fcfs import FirstCome
from alignedserve.scheduling.levels import FIRST_BOUND, LEVELS, STEP_PROMPT
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.scheduler import NO_LIMIT, Levels
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, RanStep, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


def level_served(tokens: int) -> int:
    """Return the level of a request that got `tokens`: a level ends when its bound is used up."""
    return sum(tokens >= (FIRST_BOUND << bound + 1) - FIRST_BOUND for bound in range(LEVELS - 1))


class Mlfq(FirstCome):
    """A multi-level feedback queue (ALISE §4.1): within a level by arrival; the most served request leaves."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self.most_seated = NO_LIMIT  # a new prompt is in the highest level, and pauses other requests

    def plan(self, view: StepView) -> PlannedStep:
        if len(view.decodes) + len(view.prompts) <= self.most:
            decodes, prompts = sorted(view.decodes, key=self._level), sorted(view.prompts, key=self._level)
        else:
            first = sorted((*view.decodes, *view.prompts), key=self._rank)[: self.most]
            decodes = [running for running in first if running.decodes]
            prompts = [running for running in first if not running.decodes]
        return super().plan(view._replace(decodes=decodes, prompts=prompts))

    def seating_order(self, waiting: WaitingPrompts, ran: RanStep) -> Iterable[WorkerRequest]:
        return sorted(waiting, key=self._level)

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return max((*prompts, *decodes), key=self._rank)

    def _level(self, running: WorkerRequest) -> int:
        return level_served(len(running.output))

    def _rank(self, running: WorkerRequest) -> tuple[int, float, str]:
        return self._level(running), running.request.arrival_at, running.request.id


class FastServe(Mlfq, Levels):
    """FastServe: a prompt that would use up a level's bound with the first token alone starts below (§4.1), and
    requests of lower levels are swapped out for requests of higher levels (§4.2)."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self.levels = self

    def level(self, running: WorkerRequest, at: StepContext) -> int:
        return self._level(running)

    def first_waiting(self, waiting: WaitingPrompts, at: StepContext) -> WorkerRequest | None:
        return min(waiting, key=self._level, default=None)

    def as_they_leave(self, seated: Sequence[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
        return sorted(seated, key=self._rank)

    def _level(self, running: WorkerRequest) -> int:
        return level_served(len(running.output) + len(running.request.prompt) // STEP_PROMPT)
