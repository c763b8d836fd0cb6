"""The prompts that wait for a seat."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from alignedserve.core import units_for
from alignedserve.explain.decisions import DecisionRing, Kind
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class PromptQueue:
    """Prompts that wait for a seat."""

    def __init__(self, here: Requests, memory: PlainMemory, decisions: DecisionRing) -> None:
        here.waiting = self.waiting = WaitingPrompts(memory.pace.policy, memory.pages)
        self._here, self._memory, self._steps, self._pace = here, memory, memory.steps, memory.pace
        self._decisions = decisions
        self._came_in_step: set[WorkerRequest] = set()  # since the step in flight began, and not run in its pauses

    def admit(self, running: WorkerRequest, now: float) -> None:
        """Add a new prompt that is to run."""
        self._add(running)
        self._pace.prompt_came(running, now)
        if self._steps.running is not None:
            self._came_in_step.add(running)
        self._memory.reconsider()

    def add_again(self, prompts: Iterable[WorkerRequest]) -> None:
        """Add prompts that have been here before."""
        for running in prompts:
            self._add(running)
        self._memory.reconsider()

    def _add(self, running: WorkerRequest) -> None:
        self._decisions.note(Kind.QUEUED, running.request, number=len(self.waiting), tokens=running.num_ahead)
        self._here.move(running, State.WAITING)

    def put_back(self, running: WorkerRequest) -> None:
        """Take a request's blocks away. The request waits before all others, and is recomputed."""
        self._memory.lose(running)
        self._here.move(running, State.WAITING, first=True)

    def num_old(self, only_rt: bool, drawing: Collection[str] = ()) -> int:
        """Return how many prompts, all or real-time ones, wait since before the step in flight was chosen, but for
        requests of `drawing`, which get their first tokens with the step."""
        others = self._came_in_step
        if drawing:
            others = others.union(running for running in self.waiting if running.request.id in drawing)
        if only_rt:
            return len(self.waiting.real_time) - sum([running.promise.is_rt for running in others])
        return len(self.waiting) - len(others)

    def run_amid(self, prompts: Iterable[WorkerRequest]) -> None:
        """Note that prompts run in a pause of the step in flight: they wait no more."""
        self._came_in_step.difference_update(prompts)

    def step_ended(self) -> None:
        self._came_in_step.clear()

    @property
    def blocks_for_first(self) -> int:
        """Return the number of blocks that the prompt needs that has waited longest."""
        return self._blocks_for(next(iter(self.waiting), None))

    def lacks_memory(self, only_rt: bool) -> bool:
        """Return whether the longest-waiting prompt, of all or of real-time ones, needs more memory than is free."""
        waiting = iter(self.waiting.real_time if only_rt else self.waiting)
        return self._blocks_for(next(waiting, None)) > self._memory.num_free

    def _blocks_for(self, prompt: WorkerRequest | None) -> int:
        limits = self._memory.limits
        return 0 if prompt is None else units_for(limits.least_held(prompt.num_tokens), limits.block_size)
