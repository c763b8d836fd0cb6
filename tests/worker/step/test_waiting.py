"""Prompts that wait: which of them come before best-effort requests that have their KV in the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import ServiceClass
from alignedserve.scheduling.policy import Policy, SchedulerName
from alignedserve.scheduling.promise import promise
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.samples import request

BY_ARRIVAL = Policy(SchedulerName.FCFS)


@pytest.mark.parametrize(
    ("policy", "output", "comes_first"),
    [(Policy(), [], False), (Policy(), [7], True), (BY_ARRIVAL, [], True), (BY_ARRIVAL, [7], True)],
)
def test_a_document_that_lost_its_seat_comes_first_where_it_gets_the_next_one(
    policy: Policy, output: list[int], comes_first: bool
) -> None:
    """Where promises decide, a prompt without output waits for all shorter ones. A document that could have gone on
    waited for such a prompt, and stood still for 38 s."""
    asked = replace(request("document", prompt=40), service=ServiceClass.BE)
    waiting = WaitingPrompts(policy)
    waiting.add_first(WorkerRequest(asked, promise(asked, policy, len(output)), output))
    assert waiting.come_first is comes_first
