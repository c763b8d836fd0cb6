"""Steps of a worker where nothing decodes that are planned while the step before runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest

from alignedserve.core import (
    Pooling,
    Request,
    Sampling,
    ServiceClass,
    StepFailure,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from alignedserve.papers.names import SchedulerName
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, Event, MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, AskPages, AskPrefix, Cancel, Output, Prefill, Prefix, Tokens
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.setup import WorkerSetup
from tests.prefill_worker.asks import leased
from tests.samples import POOL_MEMBER, request, said

LIMITS = WorkerLimits(num_blocks=64, block_size=4, page_size=8, max_step_tokens=8, max_batch=4)
PLAIN = Policy(reuse=False, helps=False)


class Bench:
    """Runs a prefill worker whose steps the test ends, one after the other."""

    def __init__(self, limits: WorkerLimits = LIMITS, policy: Policy = PLAIN) -> None:
        self.worker = PrefillCore(WorkerSetup(limits, policy, look_ahead=1))
        self.plans, self.outputs, self.num_ended = list[StepPlan](), list[Output](), 0
        self._pages = count()
        self._happens(MemberJoined(POOL_MEMBER))

    def _happens(self, event: Event) -> None:
        """Handle the event, and what the pool and the device answer at once: it has all pages and knows no prompt."""
        for command in self.worker.handle(event, 0.0):
            match command:
                case RunStep(plan):
                    self.plans.append(plan)
                case CopyOut(number):
                    self._happens(CopiedOut(number))
                case Send(message=Tokens(outputs)):
                    self.outputs += outputs
                case Send(message=AskPages(pages, number)):
                    self._happens(said("pool-0", leased(tuple(islice(self._pages, pages)), number)))
                case Send(message=AskPrefix(name, attempt)):
                    self._happens(said("pool-0", Prefix(name, attempt, ())))

    def hears(self, *messages: Prefill | Cancel) -> None:
        for message in messages:
            self._happens(said(ROUTER, message))

    def ends(self, failure: StepFailure | None = None) -> None:
        """End the running step: each prompt that ends with it gets the token 7."""
        plan = self.plans[self.num_ended]
        self.num_ended += 1
        ended = () if failure else tuple((chunk.request, 7) for chunk in plan.chunks if chunk.sampling is not None)
        self._happens(StepDone(StepResult(plan.number, ended, failure=failure)))

    @property
    def steps(self) -> list[list[tuple[str, int, int]]]:
        """Return all steps so far: where each chunk begins and ends."""
        return [[(of.request, of.start, of.start + len(of.tokens)) for of in plan.chunks] for plan in self.plans]

    @property
    def num_in_flight(self) -> int:
        return len(self.plans) - self.num_ended

    @property
    def is_done(self) -> bool:
        return self.num_ended == len(self.plans)


def prompt(name: str, tokens: int, **changed: Any) -> Prefill:
    made: Request = replace(request(name, max_tokens=9), prompt=tuple(range(10, 10 + tokens)), **changed)
    return Prefill(made)


def test_a_cut_prompt_goes_on_and_others_get_seats_beside_it() -> None:
    bench = Bench()
    bench.hears(prompt("a", 5), prompt("b", 9), prompt("c", 4))
    assert bench.steps == [[("a", 0, 5)], [("b", 0, 8)]], "when a comes, nobody else is there; c comes behind the plan"
    bench.ends()
    assert bench.steps[2] == [("b", 8, 9), ("c", 0, 4)]
    assert bench.plans[2].continues(bench.plans[1])
    assert not any(plan.decodes for plan in bench.plans)
    while not bench.is_done:
        bench.ends()
    assert [output.request for output in bench.outputs] == ["a", "b", "c"]
    assert bench.worker.stepping.num_ahead_steps == 2


def test_prompts_that_end_with_the_running_step_do_not_run_again() -> None:
    bench = Bench()
    bench.hears(prompt("a", 5))
    assert bench.num_in_flight == 1
    bench.ends()
    assert bench.is_done
    assert [output.tokens for output in bench.outputs] == [(7,)]


def test_a_step_that_failed_takes_the_next_step_with_it_and_both_run_again() -> None:
    bench = Bench()
    bench.hears(prompt("a", 5), prompt("b", 12))
    bench.ends(StepFailure("no memory"))
    assert bench.num_in_flight == 1, "while a step runs that counts for nothing, none is planned"
    bench.ends()
    assert bench.outputs == []
    assert bench.steps[2][0][:2] == ("a", 0)
    while not bench.is_done:
        bench.ends()
    assert [output.request for output in bench.outputs] == ["a", "b"]


def test_a_prompt_that_is_cancelled_keeps_its_blocks_until_both_steps_have_ended() -> None:
    bench = Bench()
    bench.hears(prompt("a", 20))
    assert bench.steps == [[("a", 0, 8)], [("a", 8, 16)]]
    bench.hears(Cancel("a", 0))
    bench.ends()
    assert bench.worker.held["blocks"] > 0
    bench.ends()
    assert not any(bench.worker.held.values())


@pytest.mark.parametrize(
    "changed", [{"sampling": Sampling(prompt_logprobs=1)}, {"pooling": Pooling()}], ids=["scored", "a vector"]
)
def test_what_brings_more_than_a_token_is_not_followed(changed: dict[str, Any]) -> None:
    bench = Bench()
    bench.hears(prompt("a", 8, **changed), prompt("b", 5))
    assert bench.num_in_flight == 1


def test_a_page_that_the_running_step_computes_is_waited_for() -> None:
    """The prompts begin alike: the second shares the pages of the first, which are there when the step has ended."""
    bench = Bench(policy=replace(PLAIN, reuse=True))
    bench.hears(prompt("a", 30), prompt("b", 30))
    while not bench.is_done:
        bench.ends()
    chunks = [chunk for step in bench.steps for chunk in step]
    assert sum(end - start for name, start, end in chunks if name == "a") == 30
    assert sum(end - start for name, start, end in chunks if name == "b") <= 8


def test_where_a_document_may_have_to_leave_for_a_chat_nothing_is_planned_ahead() -> None:
    bench = Bench(replace(LIMITS, num_blocks=8))
    bench.hears(prompt("document", 24, service=ServiceClass.BE))
    assert bench.num_in_flight == 2
    bench.hears(prompt("chat", 20, service=ServiceClass.RT))
    bench.ends()
    assert bench.num_in_flight == 1
    bench.ends()
    assert bench.steps[2] == [("chat", 0, 8)], "the document has left"


def test_documents_of_several_callers_take_turns_also_in_steps_ahead() -> None:
    """No full plan comes amid a flood: there is always a step ahead."""
    bench = Bench(replace(LIMITS, num_blocks=512))
    bench.hears(*(prompt(f"ann{n}", 8, service=ServiceClass.BE, salt="ann") for n in range(20)))
    bench.ends()
    bench.hears(prompt("bob", 8, service=ServiceClass.BE, salt="bob"))
    for _ in range(3):
        bench.ends()
        assert bench.num_in_flight == 2
    assert ("bob", 0, 8) in [chunk for step in bench.steps for chunk in step]


def test_a_chat_gets_a_seat_in_a_step_ahead_however_many_chats_are_seated() -> None:
    bench = Bench(replace(LIMITS, max_batch=1))
    bench.hears(prompt("long", 24, service=ServiceClass.RT))
    assert bench.steps == [[("long", 0, 8)], [("long", 8, 16)]]
    bench.hears(prompt("short", 3, service=ServiceClass.RT))
    bench.ends()
    assert any(chunk[0] == "short" for step in bench.steps for chunk in step)


@pytest.mark.parametrize("scheduler", [SchedulerName.FCFS, SchedulerName.DISTSERVE, SchedulerName.SARATHI])
def test_whatever_the_scheduler_it_plans_the_step_in_full(scheduler: SchedulerName) -> None:
    bench = Bench(policy=replace(PLAIN, scheduler=scheduler, chunking=Chunking.FIXED))
    bench.hears(prompt("a", 5), *(prompt(name, 6) for name in "bcd"))
    while not bench.is_done:
        bench.ends()
    assert [output.request for output in bench.outputs] == [*"abcd"]
    assert bench.worker.stepping.num_ahead_steps > 0
    ran = [chunk for step in bench.steps for chunk in step]
    assert sum(end - start for _, start, end in ran) == 23, "no token runs twice"
