"""Round robin, which BROS compares with (§7.1): two queues that take turns, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from alignedserve.schedulers.fcfs import FirstCome
from alignedserve.schedulers.scheduler import NO_LIMIT
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class RoundRobin(FirstCome):
    """Chats and documents run in alternate steps, each by arrival; a class without requests passes its turn on."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._is_rt = True  # whether chats have the turn
        self._runs_rt = True  # whether chats run in this turn

    def plan(self, view: StepView) -> PlannedStep:
        for is_rt in (self._is_rt, not self._is_rt):
            decodes = [running for running in view.decodes if running.promise.is_rt is is_rt]
            prompts = [running for running in view.prompts if running.promise.is_rt is is_rt]
            if decodes or prompts:
                self._runs_rt = is_rt
                return super().plan(view._replace(decodes=decodes, prompts=prompts))
        return super().plan(view)

    def planned(self, selection: PlannedStep) -> None:
        self._is_rt = not self._runs_rt

    def seating_order(self, waiting: WaitingPrompts) -> Iterable[WorkerRequest]:
        its_turn, others = waiting.real_time, waiting.best_effort
        if not self._is_rt:
            its_turn, others = others, its_turn
        return chain(its_turn, others)
