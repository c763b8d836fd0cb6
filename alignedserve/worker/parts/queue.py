"""Prompts that wait on a worker for room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.core import StepPlan, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class PromptQueue(CorePart):
    def __init__(self, common: Common, release: Callable[[Running], list[Command]]) -> None:
        """`release` tells the pool that it need not keep the pages of a prompt that leaves."""
        self.waiting = WaitingPrompts(common.policy, common.pages)
        self._pace, self._steps, self._memory, self._release = common.pace, common.steps, common.memory, release
        self._decisions = common.decisions
        self._came_in_step: list[Running] = []  # real-time prompts that came since the step in flight began
        self._num_came_in_step = 0  # prompts of both classes

    def admit(self, running: Running, now: float) -> None:
        """Add a new prompt that is to run."""
        self._note(running)
        self.waiting.add(running)
        self._pace.prompt_came(running, now)
        if self._steps.running is not None:
            self._num_came_in_step += 1
            if running.promise.is_rt:
                self._came_in_step.append(running)
        self._memory.reconsider()

    def add_again(self, prompts: Iterable[Running]) -> None:
        """Add prompts that have been here before."""
        for running in prompts:
            self._note(running)
            self.waiting.add(running)
        self._memory.reconsider()

    def _note(self, running: Running) -> None:
        self._decisions.note(Kind.QUEUED, running.request, number=len(self.waiting), tokens=running.num_ahead)

    def put_back(self, running: Running) -> None:
        """Take a request's pairs away. It waits before all others, and is computed anew."""
        self._memory.release(running)
        running.pairs, running.blocks, running.prefix, running.dropped = (), (), 0, 0
        running.folded = 0
        self.waiting.add_first(running)

    def unseat(self, running: Running) -> None:
        """Let a request wait again whose pairs were given to others."""
        running.prefix = 0
        self.waiting.add(running)

    def crowd_out(self, running: Running) -> None:
        """Put a seated prompt back so that others can go on.

        Prompts that get their pairs chunk by chunk may all have some, and none enough. No prompt is seated before
        memory has come free, else two prompts could take turns for ever.
        """
        self.put_back(running)
        self._memory.is_crowded = True

    @property
    def num_old_rt(self) -> int:
        """Return how many real-time prompts wait that were here when the step in flight was chosen."""
        return self.waiting.num_rt - len(self._came_in_step)

    @property
    def num_old(self) -> int:
        """Return the same of all prompts."""
        return len(self.waiting) - self._num_came_in_step

    def hold_up(self, plan: StepPlan, seconds: float, find: Callable[[str], Running | None], now: float) -> None:
        """Note for the prompts that came during this step how long best-effort work in it held them up."""
        self._num_came_in_step = 0
        if not self._came_in_step:
            return
        in_step = (find(part.request) for part in plan.parts)
        if any(running is not None and not running.promise.is_rt for running in in_step):
            for running in self._came_in_step:
                running.held_up_s = min(seconds, now - running.request.arrival_at)
        self._came_in_step.clear()

    @property
    def pairs_for_first(self) -> int:
        """Return the number of pairs that the prompt needs that has waited longest."""
        return self._pairs_for(next(iter(self.waiting), None))

    def lacks_memory(self, only_rt: bool) -> bool:
        """Return whether the prompt that has waited longest, of all or of real-time ones, needs more than is free."""
        waiting = self.waiting.real_time if only_rt else iter(self.waiting)
        return self._pairs_for(next(waiting, None)) > self._memory.num_free

    def _pairs_for(self, prompt: Running | None) -> int:
        limits = self._memory.limits
        return 0 if prompt is None else units_for(limits.least_held(prompt.num_tokens), limits.block_size)

    def drop(self, request: str, attempt: int) -> list[Command]:
        self._memory.reconsider()
        return [command for running in self.waiting.drop(request, attempt) for command in self._release(running)]

    def attempts(self) -> list[Attempt]:
        return [running.key for running in self.waiting]
