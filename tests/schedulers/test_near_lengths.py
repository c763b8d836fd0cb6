"""Decodes of near lengths share a step where that is faster, and no document pays more for it than its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import KvForm
from alignedserve.cost.model import Coefficients, CostModel, Kind, Shape
from alignedserve.schedulers.near_lengths import OF_IN_ORDER, split_by_length
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Grouping, Policy
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, StepAhead, StepView, all_of
from tests.conftest import examples
from tests.worker.step.test_selection import NOW, TIMES, chat, document, seating, waits

GPU = Coefficients(fixed=0.0112, token=(0.0,), decode=2e-5, prefix=8.7e-8)  # an RTX PRO 6000 with Llama-3.1-8B
NOT_SPLIT = replace(GPU, bubble=5e-8)  # kernels that wait for the longest prefix
PROMPT = 1e-4  # seconds of a prompt token
SHORT, LONG = [f"short{number}" for number in range(100)], [f"long{number}" for number in range(20)]


def jobs(names: Sequence[str], prefix: int, arrived_s: float) -> list[WorkerRequest]:
    """Return decodes that arrived so many seconds ago."""
    found = [document(name, prompt=prefix, output=1) for name in names]
    for running in found:
        running.request = running.promise.request = replace(running.request, arrival_at=NOW - arrived_s)
    return found


def of(*lengths: int) -> list[WorkerRequest]:
    """Return decodes of these lengths; the shortest came last."""
    ordered = sorted(lengths)
    return [jobs([f"r{number}"], length, 1.0 + number)[0] for number, length in enumerate(ordered)]


def mixed() -> list[WorkerRequest]:
    return [*jobs(SHORT, 250, 1.0), *jobs(LONG, 10_000, 30.0)]


def view(
    decodes: Sequence[WorkerRequest],
    cost: Coefficients = GPU,
    free: int = 20_000,
    seats: int = 0,
    prompts: Sequence[WorkerRequest] = (),
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    num_waiting: int = 0,  # prompts
) -> StepView:
    model = CostModel({kind: replace(cost, token=(PROMPT if kind is Kind.MIXED else 0.0,)) for kind in Kind})
    at = StepContext(NOW, model, TIMES, 4096, 16, 256, policy, 512)
    waiting = waits([document(f"prompt{number}") for number in range(num_waiting)], at)
    return StepView(decodes, prompts, waiting, at, seating(free, at, seats))


def ran(selection: PlannedStep) -> set[str]:
    return {running.request.id for running in selection.decodes}


def steps(seen: StepView, number: int, scheduler: Scheduler | None = None) -> list[PlannedStep]:
    scheduler = scheduler or scheduler_of(seen.at.policy, 1000)
    return [scheduler.plan(seen) for _ in range(number)]


@pytest.mark.parametrize("prompts", [0, 1])
def test_long_documents_are_left_out_of_some_steps_and_keep_their_share(prompts: int) -> None:
    share, found = 1 / OF_IN_ORDER, steps(view(mixed(), num_waiting=prompts), 300)
    seconds = sum(step.predicted_s for step in found)
    tokens = Counter(name for step in found for name in ran(step))
    (in_order,) = steps(view(mixed(), policy=Policy(grouping=Grouping.FCFS)), 1)
    assert ran(in_order) == {*SHORT, *LONG}
    assert {tokens[name] for name in SHORT} == {300}
    paces = {tokens[name] * in_order.predicted_s / seconds for name in LONG}
    assert all(share <= pace < 1.1 * share for pace in paces)
    assert tokens.total() / seconds > 1.1 * 120 / in_order.predicted_s
    assert all(step.is_grouped is (len(step.decodes) < 120) for step in (in_order, *found))


@pytest.mark.parametrize(
    ("why", "seen"),
    [
        ("nobody waits for a seat", view(mixed(), seats=1)),
        ("less memory is free than the long ones hold", view(mixed(), free=12_000)),
        ("all came at once", view([*jobs(SHORT, 250, 30.0), *jobs(LONG, 10_000, 30.0)])),
        ("a chat decodes", view([chat("chat", 5.0, output=3), *mixed()])),
        ("few are short", view([*jobs(SHORT[:3], 250, 1.0), *jobs(LONG, 10_000, 30.0)])),
        ("lengths differ by little", view([*jobs(SHORT, 250, 1.0), *jobs(LONG, 300, 30.0)])),
        ("the policy serves in order", view(mixed(), policy=Policy(grouping=Grouping.FCFS))),
    ],
)
def test_all_run_in_every_step_where(why: str, seen: StepView) -> None:
    assert all(len(step.decodes) == len(seen.decodes) for step in steps(seen, 5)), why


def test_a_document_that_has_to_hurry_is_not_left_out() -> None:
    hurried = [*jobs(SHORT, 250, 1.0), document("hurried", prompt=20_000, output=1, jct_s=0.11)]
    hurried[-1].request = replace(hurried[-1].request, arrival_at=NOW - 30.0)
    assert all("hurried" in ran(step) for step in steps(view(hurried), 5))


@pytest.mark.parametrize(("seats", "goes_on"), [(0, False), (1, True)])
def test_no_step_of_all_is_planned_ahead_where_the_next_one_leaves_some_out(seats: int, goes_on: bool) -> None:
    seen = view(mixed(), seats=seats)
    scheduler = scheduler_of(seen.at.policy, 1000)
    (step,) = steps(seen, 1, scheduler)
    assert len(step.decodes) == 120
    ahead = StepAhead(seen.decodes, (), step.predicted_s, step.predicted_s)
    assert scheduler.goes_on(ahead, seen.at) is goes_on


def test_beside_a_large_chunk_of_a_prompt_decodes_are_cheap() -> None:
    prompt = document("prompt", prompt=2000)
    prompt.kv = KvForm(tuple(range(125)))
    (step, *_) = found = steps(view(mixed(), prompts=[prompt]), 3)
    assert step.chunks
    assert all(ran(step) == {*SHORT, *LONG} for step in found)


def test_where_kernels_wait_for_the_longest_prefix_two_steps_take_the_place_of_one_for_everybody() -> None:
    whole = sum(step.predicted_s for step in steps(view(mixed(), NOT_SPLIT, policy=Policy(grouping=Grouping.FCFS)), 1))
    first, second = steps(view(mixed(), NOT_SPLIT, seats=1), 2)
    assert (ran(first), ran(second)) == ({*SHORT}, {*LONG})
    assert first.predicted_s + second.predicted_s < whole


def test_one_that_joins_between_the_two_halves_runs_in_the_second() -> None:
    scheduler, seen = scheduler_of(Policy(), 1000), view(mixed(), NOT_SPLIT)
    steps(seen, 1, scheduler)
    more = seen._replace(decodes=[*seen.decodes, *jobs(["new"], 300, 0.0)])
    assert ran(scheduler.plan(more)) == {*LONG, "new"}


@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=30),
    fixed=st.floats(1e-3, 0.05),
    decode=st.floats(0.0, 1e-4),
    prefix=st.floats(0.0, 2e-7),
    bubble=st.floats(0.0, 2e-7),
    seats=st.integers(0, 1),
    number=st.integers(1, 40),
)
@settings(max_examples=examples(60), deadline=None)
def test_tokens_are_never_predicted_slower_than_in_order_and_each_request_keeps_its_share_of_pace(
    lengths: list[int], fixed: float, decode: float, prefix: float, bubble: float, seats: int, number: int
) -> None:
    decodes, cost = of(*lengths), Coefficients(fixed=fixed, token=(0.0,), decode=decode, prefix=prefix, bubble=bubble)
    (whole,) = steps(view(decodes, cost, policy=Policy(grouping=Grouping.FCFS)), 1)
    whole_s, tokens, seconds = whole.predicted_s, Counter[str](), 0.0
    for step in steps(view(decodes, cost, seats=seats), number):
        tokens.update(ran(step))
        seconds += step.predicted_s
        assert seconds * len(decodes) <= whole_s * tokens.total() * (1 + 1e-9)
        least = min(tokens[running.request.id] for running in decodes)
        assert seconds <= (least + 1) * OF_IN_ORDER * whole_s * (1 + 1e-9)


def test_few_splits_are_looked_at_behind_the_best() -> None:
    """Each takes time in which the device may wait for the next step."""

    class Counting(CostModel):
        def seconds(self, shape: Shape) -> float:
            asked.append(shape.decodes)
            return super().seconds(shape)

    seen, asked = view(mixed()), list[int]()
    found = all_of(seen.decodes, (), seen.at)
    near, far = split_by_length(found, Counting(seen.at.cost.coefficients))
    assert (len(near), len(far)) == (len(SHORT), len(LONG))
    assert min(asked) >= len(SHORT) - 2
