"""Begin and end a step: pairs come free, the worker learns its time, and its requests get their tokens.

A step that finds too little memory has changed nothing: smaller ones follow (pace.py). Where even a single token
finds too little, its request is lost, and its owner starts the next attempt.
"""

from __future__ import annotations

from typing import Protocol

from alignedserve.core import Chunk, Decode, StepPlan, StepResult
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, RunStep
from alignedserve.protocol.events import Event, StepDone
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.view import Selection


class Runs(Protocol):
    """The requests of a worker that may be in a step."""

    def find(self, request: str) -> Running | None:
        """Return the request of this name that may be in a step."""

    def lose(self, ran: Chunk | Decode) -> list[Command]:
        """Give up the attempt that this was to run a part of, if it is still here."""

    def end_step(self, plan: StepPlan, result: StepResult, began_at: float, now: float) -> list[Command]:
        """Give the requests of a step that went well their tokens."""


class StepEnd(CorePart):
    def __init__(self, common: Common, queue: PromptQueue, runs: Runs) -> None:
        self._steps, self._pace, self._memory = common.steps, common.pace, common.memory
        self._counts = common.counts
        self._queue, self._runs, self._decisions = queue, runs, common.decisions

    def hear(self, event: Event, now: float) -> list[Command]:
        return self._end(event.result, event.seconds, now) if isinstance(event, StepDone) else []

    def _end(self, result: StepResult, seconds: float, now: float) -> list[Command]:
        self._memory.reconsider()  # time has passed, so another prompt may be the first
        ended, runs = self._steps.end(), self._runs
        self._queue.hold_up(ended.plan, seconds, runs.find, now)
        for pairs in ended.free:
            self._memory.give(pairs)
        if not ended.counts:
            return []
        if result.failure is not None:
            return self._fail(ended.plan)
        self._pace.learn(ended.plan, ended.shape, seconds, runs.find)
        self._counts.count_step(ended.plan, seconds)
        self._note(ended.plan, seconds)
        return runs.end_step(ended.plan, result, now - seconds, now)

    def _note(self, plan: StepPlan, seconds: float) -> None:
        """Note the step, and each chunk in it; which decodes are in a step follows from where they are."""
        self._decisions.note_step(plan, seconds)
        for chunk in plan.chunks:
            if (running := self._runs.find(chunk.request)) is not None:
                step, tokens, predicted_s = plan.number, len(chunk.tokens), plan.predicted_s
                self._decisions.note(Kind.CHUNK, running.request, "", tokens, step, seconds, predicted_s)

    def _fail(self, plan: StepPlan) -> list[Command]:
        self._steps.fail()
        if not self._cannot_shrink(plan) and self._pace.room.shrink(plan.num_tokens):
            return []
        return [command for ran in plan.parts for command in self._runs.lose(ran)]

    def _cannot_shrink(self, plan: StepPlan) -> bool:
        """Return whether the step had nothing but a prompt that runs whole."""
        running = self._runs.find(plan.parts[0].request) if len(plan.parts) == 1 else None
        return running is not None and running.request.runs_whole


def begin_step(steps: StepsInFlight, selection: Selection, decodes: tuple[Decode, ...] = ()) -> list[Command]:
    """Order the step that was chosen, if anything runs in it."""
    if not selection.chunks and not decodes:
        return []
    return [RunStep(steps.begin(selection.chunks, decodes, selection.shape, selection.predicted_s))]
