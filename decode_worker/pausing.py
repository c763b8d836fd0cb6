"""Pauses of a step with documents, in which chats' prompts run that would wait for the end of the step.

    step N  documents, and chats' decodes ───▶ │ pause            │ ──▶ ends
                    a chat comes ──────────────▶ step M: its prompt ──▶ its first token

A CPU's engine can stop between two layers, and go on (engine/in_order.py). So the chat waits for one layer, and runs
without the documents (ConServe, FlowPrefill). The pause must not make a token of the chats here late: the pause and
the rest of the step, by the cost model and with a margin, fit in the time that the tightest of these chats has.
"""

from __future__ import annotations

from math import inf

from alignedserve.core import StepPlan
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep

LEAST_LAYERS = 2  # that are left of a step: else it ends before a pause has begun
MOST_PAUSES = 4  # of one step: documents go on, however many chats come


class Pauses(WorkerPart):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._ends_at = 0.0  # the running step, as predicted
        self._num_left = 0  # pauses that it may still make

    def begins(self, selection: PlannedStep, now: float) -> None:
        """Note what runs now. A step pauses if it has work of documents, and no prompts of chats."""
        if not self._pace.layers:
            return
        self._ends_at = now + selection.predicted_s
        prompts = [prompt.promise.is_rt for prompt in map(self._here.running_of, selection.chunks)]
        has_documents = bool(prompts) or not all(running.promise.is_rt for running in selection.decodes)
        if has_documents and not any(prompts):
            self._steps.open_to_pauses()
        self._num_left = MOST_PAUSES

    def pauses_for(self, seconds: float) -> None:
        self._ends_at += seconds
        self._num_left -= 1

    @property
    def chats(self) -> list[WorkerRequest]:
        """Return the chats with a seat whose prompts have begun in an earlier pause."""
        return [prompt for prompt in self._here.prompts.values() if prompt.promise.is_rt]

    def most_s(self, step: StepPlan, now: float) -> float:
        """Return how long the step may pause now; 0 or less where it may not, or need not."""
        steps, left_s = self._steps, self._ends_at - now
        if not (steps.takes_amid and self._num_left) or steps.amid is not None:
            return 0.0
        if not (self._queue.waiting.real_time or self.chats):
            return 0.0
        if left_s < LEAST_LAYERS * step.predicted_s / self._pace.layers:
            return 0.0
        in_step = {decode.request for decode in step.decodes}
        next_s, most_s, at = self._pace.times.mean_s, inf, self._memory.context(now)
        for chat in self._here.residents.values() if self._memory.decodes else ():
            if chat.promise.is_rt:
                needs_s = left_s + (0.0 if chat.request.id in in_step else next_s)
                if now + needs_s <= chat.promise.next_due_at:  # else the chat is late in any case
                    most_s = min(most_s, at.surely_s(chat.promise.next_due_at - now) - needs_s)
        return most_s
