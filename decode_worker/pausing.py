"""Pauses of a step, in which chats' prompts run that would wait for the end of the step.

    step N  documents, and chats' decodes ───▶ │ pause            │ ──▶ ends
                    a chat comes ──────────────▶ step M: its prompt ──▶ its first token

A CPU's engine can stop between two layers, and go on (engine/in_order.py). So the chat waits for one layer, and runs
without the documents (ConServe, FlowPrefill). The pause must not make a token late of the chats that decode here, or
whose prompts are in the step: the pause and the rest of the step, by the cost model and with a margin, fit in the time
that the tightest of these chats has.

A step without documents, or with prompts of chats, pauses for guests alone: where nearly all requests here are of one
caller, the host, or of a few, the guests are the chats of all others. A guest would wait for the rest of the running
step; so a pause comes unless that is a quarter of the prompt's own time at most. It may be ordered until the very end,
as a step may take longer than predicted: behind the last layer the guest's prompt runs by itself. For example, a prompt
of 11 ms gets a pause if more than 2.7 ms of the step are left. A guest's first token is worth late tokens of two of the
host's chats. Pauses take no longer than the host's steps: the host has half of the time, however many guests come.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from math import inf

from alignedserve.core import StepPlan
from alignedserve.cost.model import Kind
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import NOBODY, PlannedStep, hosts_of

LEAST_LAYERS = 2  # that are left of a step: else it ends before a pause has begun
MOST_PAUSES = 4  # of one step: documents go on, however many chats come
GAPS_FOR_GUEST = 2  # chats of the host that a pause for a guest may make late
OF_OWN = 0.25  # of its own time, which a guest's prompt waits for the end of the step at most


class Pauses(WorkerPart):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._ends_at = 0.0  # the running step, as predicted
        self._num_left = 0  # pauses that it may still make
        self._are_for_guests = False  # whether the running step pauses for guests alone
        self._hosts = NOBODY  # the callers whose step it is, where the chats of others are guests
        self._guests_s = 0.0  # that pauses may still take for guests; less than 0 where one took more

    def begins(self, selection: PlannedStep, now: float) -> None:
        """Note what runs now, and for whom it pauses: for all chats if it has documents and no prompts of chats."""
        if not self._pace.layers:
            return
        self._ends_at = now + selection.predicted_s
        prompts = [*map(self._here.running_of, selection.chunks)]
        are_chats = [prompt.promise.is_rt for prompt in prompts]
        has_documents = bool(prompts) or not all(running.promise.is_rt for running in selection.decodes)
        self._are_for_guests = not has_documents or any(are_chats)
        hosts = hosts_of(self._here.seated, self._queue.waiting, self._pace.coming.firsts(now), self._limits.block_size)
        if hosts and not any(running.request.caller in hosts for running in (*selection.decodes, *prompts)):
            hosts = NOBODY  # guests do not wait for guests
        else:
            self._guests_s = min(0.0, self._guests_s) + selection.predicted_s
        self._hosts, self._num_left = hosts, MOST_PAUSES
        if hosts or not self._are_for_guests:
            self._steps.open_to_pauses()

    def pauses_for(self, seconds: float, hosts: frozenset[str]) -> None:
        """Count a pause; `hosts` as `room` said."""
        self._ends_at += seconds
        self._num_left -= 1
        if hosts:
            self._guests_s -= seconds

    def room(self, step: StepPlan, now: float) -> tuple[float, frozenset[str]]:
        """Return how long the step may pause now, 0 or less where it may not, or need not; and, in a pause for guests
        alone, the hosts."""
        steps, waiting, left_s, hosts = self._steps, self._queue.waiting, self._ends_at - now, NOBODY
        if not (steps.takes_amid and self._num_left) or steps.amid is not None:
            return 0.0, NOBODY
        if self._are_for_guests or left_s < LEAST_LAYERS * step.predicted_s / self._pace.layers:
            hosts = self._hosts
            if not hosts or self._guests_s <= 0.0 or not any(caller not in hosts for caller in waiting.callers):
                return 0.0, NOBODY
        elif not (waiting.real_time or self.chats):
            return 0.0, NOBODY
        next_s, at = self._pace.times.mean_s, self._memory.context(now)
        # A step with documents leaves room for a pause. Another may take longer than predicted, until it ends.
        longer_s = at.cost.uncertainty[Kind.MIXED].p90 * step.predicted_s if hosts else 0.0
        most_s, of_hosts = (left_s + longer_s) / OF_OWN if hosts else inf, list[float]()
        for chat, is_next in self._due_soon(step):
            needs_s = left_s + (0.0 if is_next else next_s)
            if now + needs_s <= chat.promise.next_due_at:  # else the chat is late in any case
                leaves_s = at.surely_s(chat.promise.next_due_at - now) - needs_s - longer_s
                if chat.request.caller in hosts:
                    of_hosts.append(leaves_s)
                else:
                    most_s = min(most_s, leaves_s)
        if len(of_hosts) > GAPS_FOR_GUEST:
            most_s = min(most_s, nsmallest(GAPS_FOR_GUEST + 1, of_hosts)[-1])
        return most_s, hosts

    @property
    def chats(self) -> list[WorkerRequest]:
        """Return the chats with a seat whose prompts have begun in an earlier pause. A guest's goes on in a step."""
        if self._are_for_guests:
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
