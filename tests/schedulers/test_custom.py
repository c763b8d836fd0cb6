"""What is wrong with a plan of a user's scheduler: all that a worker could not run, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from alignedserve.core import KvForm, Pooling
from alignedserve.policies.guard import Failures, Guard
from alignedserve.schedulers.custom import MOST_LEFT_OUT, Guarded, problem
from alignedserve.schedulers.scheduler import NO_LIMIT, Scheduler
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, RanStep, StepView, all_of
from tests.worker.step.test_choice import crowds, policies, some
from tests.worker.step.test_selection import chat, document, moment, seating, waits

AT = moment(Policy(), 64)


def view_of(decodes: list[WorkerRequest], prompts: list[WorkerRequest]) -> StepView:
    for running in (*decodes, *prompts):
        running.kv = KvForm(tuple(range(5)))  # of 16 tokens each
    return StepView(decodes, prompts, waits((), AT), AT, seating(0, AT), [*decodes, *prompts])


@given(policies, crowds())
@some
def test_nothing_is_wrong_with_plans_of_ours(policy: Policy, crowd: tuple[list[WorkerRequest], ...]) -> None:
    decodes, prompts, waiting = crowd
    for running in decodes:
        running.kv = KvForm(tuple(range(running.num_tokens // 16 + 1)))
    at = moment(policy, 64)
    view = StepView(decodes, prompts, waits(waiting, at), at, seating(20, at), [*decodes, *prompts])
    assert problem(scheduler_of(policy, 8).plan(view), view, 8) is None


def cut(plan: PlannedStep, **changes: Any) -> PlannedStep:
    return replace(plan, chunks=tuple(replace(chunk, **changes) for chunk in plan.chunks))


@pytest.mark.parametrize(
    ("why", "of"),
    [
        ("is no PlannedStep", lambda plan: [*plan.decodes]),
        ("it names a request twice", lambda plan: replace(plan, decodes=[*plan.decodes, *plan.decodes])),
        ("it names a request twice", lambda plan: replace(plan, chunks=plan.chunks * 2)),
        ("'x' is no request here that has memory", lambda plan: replace(plan, decodes=[document("x", output=3)])),
        ("'x' is no request here that has memory", lambda plan: cut(plan, request="x")),
        ("'d' does not decode yet", lambda plan: replace(plan, decodes=[document("d", output=3)])),
        ("the chunk of 'p' is not its next tokens", lambda plan: cut(plan, tokens=())),
        ("the chunk of 'p' is not its next tokens", lambda plan: cut(plan, start=1)),
        ("the chunk of 'p' is not its next tokens", lambda plan: cut(plan, tokens=(9,) * 5)),
        ("the chunk of 'p' is not its next tokens", lambda plan: cut(plan, kv=KvForm((9,)))),
    ],
)
def test_what_a_worker_cannot_run_is_named(why: str, of: Any) -> None:
    decode, prompt = document("d", output=3), document("p", 40)
    view = view_of([decode], [prompt])
    plan = all_of([decode], (chunk_of(prompt, 40),), AT)
    assert problem(plan, view, 2) is None
    assert why in (problem(of(plan), view, NO_LIMIT) or "")


def test_a_plan_takes_no_more_than_a_step_has() -> None:
    decode, prompt = document("d", output=3), document("p", 64)
    view = view_of([decode], [prompt])
    for size, most, fits in ((63, 2, True), (64, 2, False), (20, 1, False)):
        assert (problem(all_of([decode], (chunk_of(prompt, size),), AT), view, most) is None) is fits


def test_a_plan_needs_memory() -> None:
    decode, prompt, whole = document("d", output=3), document("p", 40), document("w", 40)
    view = view_of([decode], [prompt, whole])
    decode.kv, prompt.kv = KvForm(()), KvForm((0,))
    assert "'d' has no memory" in (problem(all_of([decode], (), AT), view, 2) or "")
    assert problem(all_of((), (chunk_of(prompt, 16),), AT), view, 2) is None
    assert "'p' has no memory" in (problem(all_of((), (chunk_of(prompt, 17),), AT), view, 2) or "")
    view.seating.displaced.append(whole)
    assert "'w' is no request here" in (problem(all_of((), (chunk_of(whole, 4),), AT), view, 2) or "")


def test_what_is_never_cut_is_not_cut_but_alone_longer_than_a_step() -> None:
    prompt, other = document("p", 70), document("o", 4)
    view, part = view_of([], [prompt, other]), chunk_of(prompt, 8)
    prompt.request = replace(prompt.request, pooling=Pooling(is_whole=True))
    whole = chunk_of(prompt, 70)
    assert "never cut" in (problem(all_of((), (part,), AT), view, 2) or "")
    assert problem(all_of((), (whole,), AT), view, 2) is None
    assert "fit in a step" in (problem(all_of((), (whole, chunk_of(other, 4)), AT), view, 2) or "")


def test_a_step_of_requests_that_are_not_here_is_not_filled() -> None:
    scheduler, view = scheduler_of(Policy(), 8), view_of([document("d", output=3)], [])
    assert [running.request.id for running in scheduler.step_of(view, [*view.decodes, *view.decodes]).decodes] == ["d"]
    with pytest.raises(ValueError, match="x is not in the view"):
        scheduler.step_of(view, [document("x")])


class ChatsAlone(Scheduler):
    """A scheduler of a user's, under which documents starve."""

    def plan(self, view: StepView) -> PlannedStep:
        return self.step_of(view, [running for running in view.decodes if running.promise.is_rt])


def steps_of(view: StepView, number: int) -> list[PlannedStep]:
    """Plan steps of the same view with ChatsAlone, each after the one before it has run."""
    policy, failures, steps = Policy(), Failures(), list[PlannedStep]()
    guarded = Guarded(scheduler_of(policy, 8), Guard("mine", ChatsAlone(policy, 8), lambda: 0.0, failures))
    known = {running.request.id: running for running in (*view.here, *view.waiting)}
    for at in range(1, number + 1):
        guarded.plan(view)  # and again, as where prompts are fetched first: a step counts once
        steps.append(guarded.plan(view))
        prompts = [known[chunk.request] for chunk in steps[-1].chunks]
        view = view._replace(ran=RanStep(at, steps[-1].decodes, prompts))
    assert not failures.counts
    return steps


def test_who_was_left_out_of_many_steps_runs_beside_the_chats() -> None:
    decoding, left_out, waiting = chat("c", 0.1, output=3), document("d", output=3), document("w", 200)
    view = view_of([decoding, left_out], [])._replace(waiting=waits([waiting], AT), seating=seating(20, AT))
    *before, overdue = steps_of(view, MOST_LEFT_OUT + 1)
    assert all(list(step.decodes) == [decoding] for step in before)
    assert (set(overdue.decodes), overdue.chunks, overdue.admitted) == ({decoding, left_out}, (), [])


def test_who_cannot_run_stops_nobody() -> None:
    """A request that misses slots (BROS §5) is here, and not among the decodes."""
    decoding, lacking, waiting = chat("c", 0.1, output=3), document("d", output=3), document("w", 200)
    view = view_of([decoding], [])._replace(waiting=waits([waiting], AT), seating=seating(20, AT))
    steps = steps_of(view._replace(here=[decoding, lacking]), MOST_LEFT_OUT + 8)
    assert all(decoding in step.decodes for step in steps)
