"""Round robin, which BROS compares with (§7.1): two queues that take turns, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from alignedserve.schedulers.fcfs import FirstCome
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, RanStep, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class RoundRobin(FirstCome):
    """Chats and documents run in alternate steps, each by arrival; a class without requests passes its turn on."""

    def plan(self, view: StepView) -> PlannedStep:
        chats_turn = is_turn_of_chats(view.ran)
        for is_rt in (chats_turn, not chats_turn):
            decodes = [running for running in view.decodes if running.promise.is_rt is is_rt]
            prompts = [running for running in view.prompts if running.promise.is_rt is is_rt]
            if decodes or prompts:
                return super().plan(view._replace(decodes=decodes, prompts=prompts))
        return super().plan(view)

    def seating_order(self, waiting: WaitingPrompts, ran: RanStep) -> Iterable[WorkerRequest]:
        chats, documents = waiting.real_time, waiting.best_effort
        return chain(chats, documents) if is_turn_of_chats(ran) else chain(documents, chats)


def is_turn_of_chats(ran: RanStep) -> bool:
    return not any(running.promise.is_rt for running in chain(ran.decodes, ran.prompts))
