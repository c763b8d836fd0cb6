"""Prompts that begin alike share pages of a worker's device, and only what lies there is not computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import FinishReason, Opening, Request, Sampling, ServiceClass, StepPlan, StepResult
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, RunStep, Send
from alignedserve.protocol.events import CopiedIn, Event, MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, Cancel, Output, Prefill, Prefix, Tokens
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, STOP, request, said
from tests.worker.cores import MakeCore

FIRST = request("first", prompt=19)  # two pages of 8 tokens, and three tokens
SAME = replace(FIRST, id="same")
LONGER = replace(FIRST, id="longer", prompt=(*FIRST.prompt[:16], *range(50, 60)))


class Worker:
    """A worker whose requests end with their first token, without a pool."""

    def __init__(self, core: MakeCore = PrefillCore, policy: Policy = DEFAULT_POLICY) -> None:
        self.core = core(WorkerSetup(LIMITS, policy))
        self.now = 0.0

    def hear(self, event: Event) -> list[Command]:
        return self.core.handle(event, self.now)

    def run(self, *requests: Request) -> dict[str, int]:
        """Let these requests come and end; return with how many tokens in place the first chunk of each began."""
        commands, starts = list[Command](), dict[str, int]()
        for asked in requests:
            commands += self.hear(said(ROUTER, Prefill(asked)))
        while plans := plans_of(commands):
            for chunk in plans[0].chunks:
                starts.setdefault(chunk.request, chunk.start)
            commands = self.end(plans[0])
        return starts

    def end(self, plan: StepPlan) -> list[Command]:
        tokens = tuple((part.request, STOP) for part in plan.parts if part.sampling is not None)
        return self.hear(StepDone(StepResult(plan.number, tokens)))


def plans_of(commands: list[Command]) -> list[StepPlan]:
    return [command.plan for command in commands if isinstance(command, RunStep)]


@pytest.fixture(params=[PrefillCore, decode_core])
def worker(request: pytest.FixtureRequest) -> Worker:
    return Worker(request.param)


@pytest.fixture
def prefill() -> Worker:
    return Worker()


def test_what_a_request_left_is_not_computed_again(worker: Worker) -> None:
    assert worker.run(FIRST) == {"first": 0}
    assert worker.run(SAME) == {"same": 16}
    assert worker.run(LONGER) == {"longer": 16}
    assert worker.core.memory.pages.num_shared_tokens == 32
    assert worker.core.held["blocks"] == 0


def test_its_owner_hears_how_many_tokens_were_not_computed(worker: Worker) -> None:
    worker.run(FIRST)
    (plan,) = plans_of(worker.hear(said(ROUTER, Prefill(SAME))))
    output = Output("same", 0, 0, (STOP,), FinishReason.STOP, opening=Opening(num_cached=16))
    assert Send("gateway-0", Tokens((output,))) in worker.end(plan)


def test_the_last_token_is_computed_in_any_case(worker: Worker) -> None:
    whole = replace(FIRST, prompt=FIRST.prompt[:16])
    worker.run(whole)
    assert worker.run(replace(whole, id="again")) == {"again": 12}


@pytest.mark.parametrize(
    "other",
    [
        replace(SAME, salt="another tenant"),
        replace(SAME, prompt=(99, *FIRST.prompt[1:])),
        replace(SAME, sampling=Sampling(prompt_logprobs=0)),
    ],
    ids=["another tenant", "another first token", "logits of all tokens"],
)
def test_what_is_not_the_same_is_computed(worker: Worker, other: Request) -> None:
    worker.run(FIRST)
    assert worker.run(other) == {"same": 0}


@pytest.mark.parametrize(
    ("core", "policy"),
    [
        (PrefillCore, replace(DEFAULT_POLICY, reuse=False)),
        (decode_core, replace(DEFAULT_POLICY, reuse=False)),
        (decode_core, replace(DEFAULT_POLICY, memory="two_ended")),
        (decode_core, replace(DEFAULT_POLICY, memory="hybrid")),
    ],
    ids=["prefill, off", "decode, off", "shared blocks", "hidden vectors"],
)
def test_nothing_is_shared_where_it_is_off_or_cannot_be(core: MakeCore, policy: Policy) -> None:
    worker = Worker(core, policy)
    worker.run(FIRST)
    assert worker.run(SAME) == {"same": 0}


@pytest.mark.parametrize("core", [PrefillCore, decode_core])
def test_a_tenant_cannot_tell_from_its_steps_what_another_has_asked(
    core: MakeCore,
) -> None:
    """The steps of a tenant's request are the same, whether or not its prompt was run for another tenant."""

    def steps(before: Request) -> list[tuple[int, int, float]]:
        worker = Worker(core)
        worker.run(before)
        commands, steps = worker.hear(said(ROUTER, Prefill(replace(FIRST, salt="another tenant")))), []
        while plans := plans_of(commands):
            steps += [(chunk.start, len(chunk.tokens), plans[0].predicted_s) for chunk in plans[0].chunks]
            commands = worker.end(plans[0])
        return steps

    assert steps(before=SAME) == steps(before=replace(SAME, prompt=tuple(range(50, 69))))


def test_kv_of_which_no_token_could_be_sampled_is_never_shared(worker: Worker) -> None:
    worker.run(FIRST)
    (plan,) = plans_of(worker.hear(said(ROUTER, Prefill(SAME))))
    doubtful = Output("same", 0, 0, (), FinishReason.DOUBT, opening=Opening(num_cached=16))
    ended = worker.hear(StepDone(StepResult(plan.number, (), unsampled=("same",))))
    assert Send("gateway-0", Tokens((doubtful,))) in ended
    assert worker.run(LONGER) == {"longer": 0}


class TestTogether:
    """Prompts that begin alike and come together: what they share is computed once."""

    def coming(self, worker: Worker, *requests: Request) -> list[dict[str, int]]:
        """Let requests come at once, and return for each step the chunks that run: request -> first token."""
        commands, steps = list[Command](), list[dict[str, int]]()
        for asked in (request("busy", prompt=1), *requests):
            commands += worker.hear(said(ROUTER, Prefill(asked)))
        while plans := plans_of(commands):
            steps.append({chunk.request: chunk.start for chunk in plans[0].chunks})
            commands = worker.end(plans[0])
        return steps

    def test_the_second_waits_for_each_page_of_the_first(self, worker: Worker) -> None:
        steps = self.coming(worker, FIRST, SAME)
        assert [start for step in steps for name, start in step.items() if name == "same"] == [16]
        assert worker.core.memory.pages.num_shared_tokens == 16

    def test_what_only_begins_alike_goes_on_as_soon_as_that_is_there(self, worker: Worker) -> None:
        other = replace(FIRST, id="other", prompt=(*FIRST.prompt[:8], *range(50, 63)))
        starts = [step["other"] for step in self.coming(worker, FIRST, other) if "other" in step]
        assert starts[0] == 8

    def test_others_behind_it_do_not_wait(self, worker: Worker) -> None:
        steps = self.coming(worker, replace(FIRST, prompt=FIRST.prompt[:10]), SAME, request("short", prompt=2))
        order = [name for step in steps for name in step]
        assert order.index("short") < order.index("same")

    def test_a_chat_waits_for_no_document(self) -> None:
        worker = Worker(decode_core)
        (plan,) = plans_of(worker.hear(said(ROUTER, Prefill(replace(FIRST, service=ServiceClass.BE)))))
        worker.hear(said(ROUTER, Prefill(SAME)))
        (plan,) = plans_of(worker.end(plan))
        assert "same" in [chunk.request for chunk in plan.chunks]

    def test_it_goes_on_when_the_first_leaves(self, worker: Worker) -> None:
        (plan,) = plans_of(worker.hear(said(ROUTER, Prefill(FIRST))))
        worker.hear(said(ROUTER, Prefill(SAME)))
        worker.hear(said(ROUTER, Cancel("first", 0)))
        (plan,) = plans_of(worker.end(plan))
        assert [chunk.request for chunk in plan.chunks] == ["same"]


def test_only_pages_whose_step_has_ended_are_shared(worker: Worker) -> None:
    """A prompt that is cancelled while its second step runs leaves the pages of its first."""
    (first,) = plans_of(worker.hear(said(ROUTER, Prefill(FIRST))))
    (second,) = plans_of(worker.end(first))
    worker.hear(said("gateway-0", Cancel("first", 0)))
    worker.hear(said(ROUTER, Prefill(SAME)))
    (plan,) = plans_of(worker.end(second))
    assert [(chunk.request, chunk.start) for chunk in plan.chunks] == [("same", 8)]


def test_pages_of_the_pool_are_copied_behind_those_that_are_here(prefill: Worker) -> None:
    prefill.run(replace(FIRST, prompt=FIRST.prompt[:9]))
    prefill.hear(MemberJoined(POOL_MEMBER))
    prefill.hear(said(ROUTER, Prefill(SAME)))
    commands = prefill.hear(said("pool-0", Prefix("same", 0, (4, 5))))
    (copy,) = [command for command in commands if isinstance(command, CopyIn)]
    assert (copy.pages, copy.tokens, copy.start) == ((5,), SAME.prompt[:16], 8)
    (plan,) = plans_of(prefill.hear(CopiedIn(copy.number, intact=True)))
    assert (plan.chunks[0].start, plan.chunks[0].kv.blocks[:4]) == (16, copy.blocks)


def test_a_copy_that_is_not_intact_leaves_what_was_here(prefill: Worker) -> None:
    prefill.run(replace(FIRST, prompt=FIRST.prompt[:9]))
    prefill.hear(MemberJoined(POOL_MEMBER))
    prefill.hear(said(ROUTER, Prefill(SAME)))
    prefill.hear(said("pool-0", Prefix("same", 0, (4, 5))))
    (plan,) = plans_of(prefill.hear(CopiedIn(1, intact=False)))
    assert plan.chunks[0].start == 8
