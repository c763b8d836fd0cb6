"""An order is a class that a scheduler's row names: the pool, the router and both workers follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import ServiceClass, Slo
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.orders import BY_ACCELGEN, BY_LEVELS, BY_REMAINING
from alignedserve.papers.rules import RULES
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.levels import TOP
from alignedserve.scheduling.orders import BY_ARRIVAL, BY_DUE, BY_SLACK, ByKey, Ordering
from alignedserve.scheduling.policy import Policy, SchedulerRules
from alignedserve.scheduling.slo import Late, Standing, StepTimes
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.samples import request

TIMES = StepTimes(0.01, 0.02)
STANDINGS = [
    Standing("long", ServiceClass.RT, slack_s=5.0, arrival_at=1.0, remaining=100),
    Standing("urgent", ServiceClass.RT, slack_s=0.0, arrival_at=2.0, remaining=50),
    Standing("short", ServiceClass.RT, slack_s=9.0, arrival_at=3.0, remaining=10),
]


class ByLongest(ByKey):
    def key(self, standing: Standing) -> tuple[float, ...]:
        return (-standing.remaining,)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (BY_ARRIVAL, ["long", "urgent", "short"]),
        (BY_DUE, ["urgent", "long", "short"]),
        (BY_SLACK, ["urgent", "long", "short"]),
        (BY_REMAINING, ["short", "urgent", "long"]),
        (BY_LEVELS, ["short", "urgent", "long"]),
    ],
)
def test_requests_are_sorted(order: Ordering, names: list[str]) -> None:
    ordered = order.sort(STANDINGS, lambda standing: standing, TIMES, Late.DECAY)
    assert [standing.id for standing in ordered] == names


def test_a_level_goes_before_what_is_left_and_above_all_levels_the_first_that_came() -> None:
    kinds = {"short": (0, 1, 1.0), "first": (TOP, 900, 2.0), "second": (TOP, 5, 3.0), "long": (1, 40, 0.0)}
    standings = [
        Standing(name, ServiceClass.BE, 0.0, at, level=level, remaining=left)
        for name, (level, left, at) in kinds.items()
    ]
    ordered = BY_LEVELS.sort(standings, lambda standing: standing, TIMES, Late.KEEP)
    assert [standing.id for standing in ordered] == ["first", "second", "short", "long"]


def test_only_promises_put_a_class_first() -> None:
    orders = (BY_ARRIVAL, BY_DUE, BY_SLACK, BY_ACCELGEN, BY_REMAINING, BY_LEVELS)
    first = {(order, service) for order in orders for service in ServiceClass if order.puts_first(service)}
    assert first == {(order, ServiceClass.RT) for order in (BY_DUE, BY_SLACK, BY_ACCELGEN)}


@pytest.mark.parametrize(
    ("scheduler", "names"), [(SchedulerName.ALIGNED, ["short", "long"]), (SchedulerName.BROS, ["long", "short"])]
)
def test_a_prompt_that_is_due_first_goes_first_however_long_another_is(
    scheduler: SchedulerName, names: list[str]
) -> None:
    """The order by slack let a long prompt take the steps of a short one that was nearly through: both were late."""
    policy = Policy(scheduler)
    waiting = WaitingPrompts(policy)
    for name, tokens, arrival_at in (("short", 4, 0.0), ("long", 40, 0.1)):
        asked = replace(request(name, prompt=tokens), arrival_at=arrival_at, slo=Slo(ttft_s=2.0))
        waiting.add(WorkerRequest(asked, promise(asked, policy), []))
    waiting.refresh(0.2, TIMES, chunk=4)
    assert [running.request.id for _, running in waiting.in_order(0.2, TIMES.most_s)] == names


def test_a_new_order_needs_a_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, SchedulerName.SHORTEST, SchedulerRules(ByLongest()))
    policy = Policy(SchedulerName.SHORTEST)
    waiting = WaitingPrompts(policy)
    for name, tokens in (("short", 2), ("long", 9), ("middle", 5)):
        asked = request(name, prompt=tokens)
        waiting.add(WorkerRequest(asked, promise(asked, policy), []))
    waiting.refresh(0.0, TIMES, chunk=4)
    assert [running.request.id for _, running in waiting.in_order(0.0, TIMES.most_s)] == [
        "long",
        "middle",
        "short",
    ]
