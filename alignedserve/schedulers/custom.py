"""A user's own scheduler plans the steps; the scheduler of the policy, the default, looks after it.

    the plan can run                          it runs, as the user's scheduler says
    it cannot: see `problem`; or it raised    the default plans until the next step has run
    it runs nothing, but the default would    the same
    requests with memory were left out of     a step of these requests beside the chats' decodes, or of these
    MOST_LEFT_OUT steps in a row              alone where no time is left for them
    the first that waits was                  the default plans one step

So whatever the user's scheduler says, each request runs sooner or later, and every step runs something that can run.
Memory that a plan took before it failed stays taken: the prompts that got it are seated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from alignedserve.cost.model import EMPTY
from alignedserve.policies.guard import Guard, PolicyFailure
from alignedserve.schedulers.aligned import step_bounds
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.schedulers.wrapping import Wrapping
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView, shape_of

MOST_LEFT_OUT = 64  # steps in a row that a request with memory, or the first that waits, is left out of
NOTHING_RUNS = PlannedStep((), (), EMPTY, 0.0)


class Guarded(Wrapping):
    def __init__(self, default: Scheduler, guard: Guard) -> None:
        super().__init__(default)
        own = guard.policy
        assert isinstance(own, Scheduler)
        self._guard, self._own = guard, own
        self._left_out: dict[WorkerRequest, int] = {}  # steps in a row without the request
        self._counted = 0  # the number of the newest step that is counted
        self._default_after: int | None = None  # the number of the step after which the default plans

    def plan(self, view: StepView) -> PlannedStep:
        """Return the plan of the user's scheduler if it can run, else the default's."""
        self._count(view)
        has_work = view.decodes or view.prompts or view.waiting
        if has_work and self._default_after != view.ran.number:
            overdue = {running for running, steps in self._left_out.items() if steps >= MOST_LEFT_OUT}
            if overdue and not (found := self._plan_of(overdue, view)).is_empty:
                return found
            if (asked := self._asked(view)) is not None:
                return asked
            self._default_after = view.ran.number
        return self._default(view)

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        def not_here(answer: Any, *_facts: Any) -> str | None:
            is_here = any(answer is running for running in (*prompts, *decodes))
            return None if is_here else f"{answer!r:.60} leaves, which is not here"

        answer: WorkerRequest | None = self._guard.call(self._own.leaving, not_here, prompts, decodes, at)
        return self.wrapped.leaving(prompts, decodes, at) if answer is None else answer

    def _asked(self, view: StepView) -> PlannedStep | None:
        """Return the plan of the user's scheduler, or None where the default plans."""
        found: PlannedStep | None = self._guard.call(self._own.plan, self._problem, view)
        if found is None:
            return None
        if found.runs or view.seating.admitted:
            shape = shape_of(found.chunks, found.decodes)
            taken = view.seating.admitted, view.seating.displaced
            return PlannedStep(found.decodes, found.chunks, shape, view.at.cost.seconds(shape), *taken)
        usual = self._default(view)
        runs = {*(running.request.id for running in usual.decodes), *(chunk.request for chunk in usual.chunks)}
        seated = [running.request.id for running in (*view.decodes, *view.prompts)]
        if could := next((name for name in seated if name in runs), None):
            self._guard.fail(PolicyFailure.NONSENSE, f"it runs nothing, though {could!r:.60} could run")
        return usual

    def _problem(self, answer: Any, view: StepView) -> str | None:
        return problem(answer, view, self.most)

    def _default(self, view: StepView) -> PlannedStep:
        admitted, displaced = view.seating.admitted, view.seating.displaced
        if admitted:  # by a plan that failed: these are seated before the default plans
            return PlannedStep((), (), EMPTY, 0.0, admitted, displaced)
        if not displaced:
            return self.wrapped.plan(view)
        decodes, prompts = (
            [running for running in seated if running not in displaced] for seated in (view.decodes, view.prompts)
        )
        found = self.wrapped.plan(view._replace(decodes=decodes, prompts=prompts))
        return replace(found, displaced=displaced)

    def _plan_of(self, overdue: set[WorkerRequest], view: StepView) -> PlannedStep:
        """Return a step with some of these requests that can run, or the default's step where the first that waits is
        overdue; an empty one where none can run."""
        if can_run := [running for running in (*view.decodes, *view.prompts) if running in overdue]:
            bounds = step_bounds(view)
            chats = [running for running in view.decodes if running.promise.is_rt]
            found = self.wrapped.step_of(view, [*chats, *can_run], bounds)
            has_run = found.chunks or not overdue.isdisjoint(found.decodes)  # of prompts only overdue ones are offered
            if not (found := found if has_run else self.wrapped.step_of(view, can_run, bounds)).is_empty:
                return found
        waiting = [running for running in overdue if running in view.waiting]
        for running in waiting:
            self._left_out[running] = 0  # one step for each: the default may find no memory for a prompt
        return self.wrapped.plan(view) if waiting else NOTHING_RUNS

    def _count(self, view: StepView) -> None:
        """Count the steps that requests are left out of."""
        if view.ran.number == self._counted:
            return
        self._counted = view.ran.number
        ran = {*view.ran.decodes, *view.ran.prompts}
        first = () if self.policy.is_plain else islice(view.waiting, 1)  # a plain policy seats prompts as they come
        before = self._left_out
        self._left_out = {running: before.get(running, 0) + 1 for running in (*view.here, *first) if running not in ran}


def problem(plan: Any, view: StepView, most: int) -> str | None:
    """Return why a plan cannot run, or None. `most` requests run in a step."""
    if not isinstance(plan, PlannedStep):
        return f"{plan!r:.60} is no PlannedStep"
    at, seating = view.at, view.seating
    here = {running.request.id: running for running in (*view.decodes, *view.prompts, *seating.admitted)}
    for running in seating.displaced:
        here.pop(running.request.id, None)
    names = [running.request.id for running in plan.decodes] + [chunk.request for chunk in plan.chunks]
    num_tokens = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
    if len({*names}) < len(names):
        return "it names a request twice"
    if unknown := next((name for name in names if name not in here), None):
        return f"{unknown!r:.60} is no request here that has memory"
    has_room = num_tokens <= at.room or (len(plan.chunks) == 1 and here[names[-1]].request.runs_whole)
    if len(names) > most or not has_room:
        return f"{len(names)} requests and {num_tokens} tokens, where {most} and {at.room} fit in a step"
    for running in plan.decodes:
        name = running.request.id
        if here[name] is not running or not running.decodes:
            return f"{name!r:.60} does not decode yet"
        if not running.kv.has_place(running.prefix, at.block_size):
            return f"{name!r:.60} has no memory for the next token"
    for chunk in plan.chunks:
        prompt, size = here[chunk.request], len(chunk.tokens)
        if not size or chunk != chunk_of(prompt, size):
            return f"the chunk of {chunk.request!r:.60} is not its next tokens, or cuts a prompt that is never cut"
        if not prompt.kv.has_place(prompt.prefix + size - 1, at.block_size):
            return f"{chunk.request!r:.60} has no memory for a chunk of {size} tokens"
    return None
