"""Pauses of a step, in which chats' prompts run that would wait for the end of the step.

    step N  documents, and chats' decodes ───▶ │ pause            │ ──▶ ends
                    a chat comes ──────────────▶ step M: its prompt ──▶ its first token

A CPU's engine can stop between two layers, and go on (engine/in_order.py). So the chat waits for one layer, and runs
without the documents (ConServe, FlowPrefill). The pause must not make a token late of the chats that decode here, or
whose prompts are in the step: the pause and the rest of the step, by the cost model and with a margin, fit in the time
that the tightest of these chats has.

A step without documents, or with prompts of chats, pauses only where one caller or a few dominate: nearly all requests
here are theirs. Then it pauses for the chats of all other callers. Such a chat would wait for the rest of the running
step; so a pause comes unless that is a quarter of the prompt's own time at most. It may be ordered until the very end,
as a step may take longer than predicted: behind the last layer the prompt runs by itself. For example, a prompt of
11 ms gets a pause if more than 2.7 ms of the step are left. Its first token is worth late tokens of two of the dominant
callers' chats. Pauses take no longer than the dominant callers' steps, which have half of the time, whoever comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from math import inf

from alignedserve.core import StepPlan
from alignedserve.cost.model import Kind
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import NOBODY, PlannedStep, dominant_callers

LEAST_LAYERS = 2  # that are left of a step: else it ends before a pause has begun
MOST_PAUSES = 4  # of one step: documents go on, however many chats come
MOST_LATE_PER_PAUSE = 2  # chats of dominant callers that a pause for another caller may make late
MAX_WAIT_PER_PREFILL = 0.25  # a chat of another caller may wait this share of its own prefill time


class Pauses(WorkerPart):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._ends_at = 0.0  # the running step, as predicted
        self._num_left = 0  # pauses that it may still make
        self._are_for_others = False  # whether the running step pauses for chats of other callers alone
        self._dominant = NOBODY  # the dominant callers, whose step it is
        self._others_s = 0.0  # that pauses may still take for others; less than 0 where one took more

    def begins(self, selection: PlannedStep, now: float) -> None:
        """Note what runs now, and for whom it pauses: for all chats if it has documents and no prompts of chats."""
        if not self._pace.layers:
            return
        self._ends_at = now + selection.predicted_s
        prompts = [*map(self._here.running_of, selection.chunks)]
        are_chats = [prompt.promise.is_rt for prompt in prompts]
        has_documents = bool(prompts) or not all(running.promise.is_rt for running in selection.decodes)
        self._are_for_others = not has_documents or any(are_chats)
        dominant = dominant_callers(
            self._here.seated, self._queue.waiting, self._pace.coming.expected_chats(now), self._limits.block_size
        )
        if dominant and not any(running.request.caller in dominant for running in (*selection.decodes, *prompts)):
            dominant = NOBODY  # the others do not wait for each other
        else:
            self._others_s = min(0.0, self._others_s) + selection.predicted_s
        self._dominant, self._num_left = dominant, MOST_PAUSES
        if dominant or not self._are_for_others:
            self._steps.open_to_pauses()

    def pauses_for(self, seconds: float, dominant: frozenset[str]) -> None:
        """Count a pause; `dominant` as `room` said."""
        self._ends_at += seconds
        self._num_left -= 1
        if dominant:
            self._others_s -= seconds

    def room(self, step: StepPlan, now: float) -> tuple[float, frozenset[str]]:
        """Return how long the step may pause now, 0 or less where it may not, or need not; and, in a pause for others
        alone, the dominant callers."""
        steps, waiting, left_s, dominant = self._steps, self._queue.waiting, self._ends_at - now, NOBODY
        if not (steps.takes_amid and self._num_left) or steps.paused_step is not None:
            return 0.0, NOBODY
        if self._are_for_others or left_s < LEAST_LAYERS * step.predicted_s / self._pace.layers:
            dominant = self._dominant
            if not dominant or self._others_s <= 0.0 or not any(caller not in dominant for caller in waiting.callers):
                return 0.0, NOBODY
        elif not (waiting.real_time or self.chats):
            return 0.0, NOBODY
        next_s, at = self._pace.times.mean_s, self._memory.context(now)
        # A step with documents leaves room for a pause. Another may take longer than predicted, until it ends.
        longer_s = at.cost.uncertainty[Kind.MIXED].p90 * step.predicted_s if dominant else 0.0
        most_s, of_dominant = (left_s + longer_s) / MAX_WAIT_PER_PREFILL if dominant else inf, list[float]()
        for chat, is_next in self._due_soon(step):
            needs_s = left_s + (0.0 if is_next else next_s)
            if now + needs_s <= chat.promise.next_due_at:  # else the chat is late in any case
                leaves_s = at.surely_s(chat.promise.next_due_at - now) - needs_s - longer_s
                if chat.request.caller in dominant:
                    of_dominant.append(leaves_s)
                else:
                    most_s = min(most_s, leaves_s)
        if len(of_dominant) > MOST_LATE_PER_PAUSE:
            most_s = min(most_s, nsmallest(MOST_LATE_PER_PAUSE + 1, of_dominant)[-1])
        return most_s, dominant

    @property
    def chats(self) -> list[WorkerRequest]:
        """Return the chats with a seat whose prompts have begun in an earlier pause; those of
        other callers go on in a step."""
        if self._are_for_others:
            return []
        return [prompt for prompt in self._here.prompts.values() if prompt.promise.is_rt]

    def _due_soon(self, step: StepPlan) -> Iterator[tuple[WorkerRequest, bool]]:
        """Yield the chats that have decoded, or are prompts of the running step, and whether it brings their token."""
        in_step = {decode.request for decode in step.decodes}
        for chat in self._here.residents.values() if self._memory.decodes else ():
            if chat.promise.is_rt:
                yield chat, chat.request.id in in_step
        for chunk in step.chunks:
            prompt = self._here.find(chunk.request)
            if prompt is not None and prompt.promise.is_rt:
                yield prompt, chunk.is_last
