"""Steps that are planned while the step before runs: which requests they contain, and what happens when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import (
    Decode,
    FinishReason,
    KvForm,
    Pooling,
    Request,
    Sampling,
    ServiceClass,
    Slo,
    StepFailure,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import Coefficients, CostModel
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import CopiedIn, MemberJoined, StepDone, TimerFired
from alignedserve.protocol.messages import ROUTER, Acknowledge, Batch, Cancel, Output, Prefill, Tokens
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.steps import IDLE_S
from tests.samples import POOL_MEMBER, STOP, entry, request, said
from tests.worker.test_idle_trials import Machine

LIMITS = WorkerLimits(num_blocks=8, block_size=4, page_size=8, max_step_tokens=8, max_batch=4)
PLAIN = Policy(reuse=False)
PENALISED = Sampling(frequency_penalty=0.5)
A, B = request("a"), request("b")  # three prompt tokens and one output token: at most five


class Bench:
    """Run a decode worker whose steps the test ends, one after the other."""

    def __init__(self, limits: WorkerLimits = LIMITS, policy: Policy = PLAIN) -> None:
        self.worker = decode_core(WorkerSetup(limits, policy, look_ahead=1))
        self.plans: list[StepPlan] = []  # plans that were ordered, in their order
        self.outputs: list[Output] = []
        self.num_ended = self._num_copies = 0
        self.worker.handle(MemberJoined(POOL_MEMBER), 0.0)

    def _take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case RunStep(plan):
                    self.plans.append(plan)
                case Send(message=Tokens(outputs)):
                    self.outputs += outputs

    def joins(self, *some: Request) -> None:
        self._take(
            self.worker.handle(
                said("pool-0", Batch(tuple(entry(request, (n,)) for n, request in enumerate(some)))), 0.0
            )
        )
        for _ in some:
            self._num_copies += 1
            self._take(self.worker.handle(CopiedIn(self._num_copies, intact=True), 0.0))

    def hears(self, message: Prefill | Cancel) -> None:
        self._take(self.worker.handle(said(ROUTER, message), 0.0))

    def ends(
        self, *sampled: tuple[str, int], unsampled: tuple[str, ...] = (), failure: StepFailure | None = None
    ) -> None:
        """End the running step with these sampled tokens, or with a failure."""
        number = self.plans[self.num_ended].number
        self.num_ended += 1
        self._take(self.worker.handle(StepDone(StepResult(number, sampled, unsampled, failure=failure)), 0.0))

    @property
    def running(self) -> list[str]:
        return names(self.plans[self.num_ended])

    @property
    def ahead(self) -> StepPlan | None:
        """Return the plan that waits behind the running step, if there is one."""
        left = self.plans[self.num_ended :]
        return left[1] if len(left) > 1 else None

    @property
    def last(self) -> StepPlan:
        return self.plans[-1]

    @property
    def blocks(self) -> int:
        return self.worker.held["blocks"]


def names(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [decode.request for decode in plan.decodes]


def test_the_next_step_names_the_token_that_the_step_before_samples() -> None:
    bench = Bench(policy=Policy(reuse=False, room=Room.WHOLE))
    bench.joins(A)
    [blocks] = {decode.kv.blocks for plan in bench.plans for decode in plan.decodes}
    assert [plan.decodes for plan in bench.plans] == [
        (Decode("a", 7, 3, KvForm(blocks), Sampling(), 1),),
        (Decode("a", None, 4, KvForm(blocks), Sampling(), 2),),
    ]
    bench.ends(("a", 9))
    assert bench.last.decodes == (Decode("a", None, 5, KvForm(blocks), Sampling(), 3),)
    bench.ends(("a", 8))
    assert [(output.index, output.tokens) for output in bench.outputs] == [(1, (9,)), (2, (8,))]


def test_nobody_goes_on_beyond_the_limit() -> None:
    bench = Bench()
    bench.joins(request("a", max_tokens=3))
    assert names(bench.ahead) == ["a"], "the third token"
    bench.ends(("a", 9))
    assert bench.ahead is None
    bench.ends(("a", 9))
    assert bench.outputs[-1].finish is FinishReason.LENGTH
    assert bench.blocks == 0


def test_a_step_begun_for_an_ended_request_is_dropped_and_its_blocks_wait_for_that() -> None:
    bench = Bench()
    bench.joins(A)
    bench.ends(("a", STOP))
    assert bench.outputs[-1].finish is FinishReason.STOP
    assert bench.blocks == 2, "a step that runs writes there"
    bench.ends(("a", 5))
    assert len(bench.outputs) == 1
    assert bench.blocks == 0
    assert len(bench.plans) == 2, "and there is no third step"
    bench.worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert not any(bench.worker.held.values())


def test_a_request_that_is_cancelled_keeps_its_blocks_until_both_steps_have_ended() -> None:
    bench = Bench()
    bench.joins(A)
    bench.hears(Cancel("a", 0))
    bench.ends(("a", 9))
    assert (bench.outputs, bench.blocks) == ([], 2)
    bench.ends(("a", 9))
    assert (bench.outputs, bench.blocks) == ([], 0)


def test_its_next_attempt_is_not_taken_for_it() -> None:
    bench = Bench()
    bench.joins(A)
    bench.hears(Prefill(replace(A, attempt=1, emitted=(7,), emitted_at=0.0)))
    bench.ends(("a", 9))
    bench.ends(("a", 9))
    assert not bench.outputs
    assert [part.request for part in bench.plans[-2].chunks] == ["a"]
    assert [(decode.request, decode.token, decode.index) for decode in bench.last.decodes] == [("a", None, 2)]


def test_a_request_with_penalties_sits_out_a_step() -> None:
    bench = Bench(replace(LIMITS, num_blocks=16))
    bench.joins(request("a", max_tokens=9), replace(B, sampling=PENALISED))
    for _ in range(4):
        bench.ends(*((name, 9) for name in bench.running))
    assert [names(plan) for plan in bench.plans] == [["a", "b"], ["a"], ["a", "b"], ["a"], ["a", "b"], ["a"]]
    of_b = [plan.decodes[1] for plan in bench.plans if len(plan.decodes) > 1]
    assert [output.token for output in of_b] == [7, 9, 9]
    assert all(output.history is not None for output in of_b)


@pytest.mark.parametrize("first", [request("a", max_tokens=2), replace(request("a", max_tokens=9), sampling=PENALISED)])
def test_the_requests_behind_a_request_that_is_left_out_go_on(first: Request) -> None:
    bench = Bench(replace(LIMITS, num_blocks=16))
    bench.joins(first, request("b", max_tokens=9))
    assert (bench.running, names(bench.ahead)) == (["a", "b"], ["b"])


def test_a_request_that_joins_meanwhile_is_in_the_next_step() -> None:
    bench = Bench(replace(LIMITS, num_blocks=16))
    bench.joins(request("a", max_tokens=8))
    bench.joins(B)
    bench.ends(("a", 9))
    assert [(decode.request, decode.token) for decode in bench.last.decodes] == [("a", None), ("b", 7)]


def test_while_a_prompt_waits_nothing_is_planned_ahead() -> None:
    bench = Bench()
    bench.joins(A)
    bench.hears(Prefill(B))
    bench.ends(("a", 9))
    assert bench.ahead is None
    bench.ends(("a", 9))
    assert [part.request for part in bench.plans[-2].parts] == ["b", "a"]
    assert [(decode.request, decode.token, decode.start) for decode in bench.last.decodes] == [
        ("a", None, 6),
        ("b", None, 3),
    ], "the first token of b is there by then"


ROOMY = replace(LIMITS, num_blocks=64)


@pytest.mark.parametrize(
    ("seated", "waits", "is_ahead"),
    [
        (ServiceClass.RT, ServiceClass.RT, True),
        (ServiceClass.BE, ServiceClass.BE, True),
        (ServiceClass.RT, ServiceClass.BE, True),
        (ServiceClass.BE, ServiceClass.RT, False),  # a document leaves for a chat
    ],
)
def test_a_prompt_that_waits_for_the_end_of_a_request_does_not_hold_up_the_steps_of_others(
    seated: ServiceClass, waits: ServiceClass, is_ahead: bool
) -> None:
    bench = Bench(ROOMY)
    all_seats = [replace(request(name, max_tokens=9), service=seated) for name in "abcd"]
    bench.joins(*all_seats)
    bench.ends(("a", 9))
    bench.hears(Prefill(replace(request("e"), service=waits)))
    while len(names(bench.plans[bench.num_ended])) < 4:
        bench.ends(*((name, 9) for name in bench.running))
    bench.ends(*((name, 9) for name in bench.running))
    assert (bench.ahead is not None) == is_ahead
    if not is_ahead:
        return
    bench.ends(("a", STOP), ("b", 9), ("c", 9), ("d", 9))
    assert bench.ahead is None, "a seat is free, which the next plan gives away"
    bench.ends(*((name, 9) for name in bench.running))
    assert {part.request for part in bench.plans[bench.num_ended].parts} == {*"bcde"}


def prompts_of(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    """Return the chunks of a plan: where each begins and ends, and whether it is the last."""
    chunks = () if plan is None else plan.chunks
    return [(chunk.request, chunk.start, chunk.start + len(chunk.tokens), chunk.is_last) for chunk in chunks]


def long(name: str, tokens: int, **changed: Any) -> Request:
    return replace(request(name, max_tokens=9), prompt=tuple(range(10, 10 + tokens)), **changed)


def test_a_prompt_goes_on_in_the_next_step_in_as_many_tokens_and_then_decodes() -> None:
    bench = Bench(ROOMY)
    bench.joins(request("a", max_tokens=20))
    bench.hears(Prefill(long("p", 20)))
    for _ in range(2):
        bench.ends(("a", 9))
    for _ in range(3):
        plan = bench.plans[bench.num_ended]
        bench.ends(*((part.request, 9) for part in plan.parts if part.sampling is not None))
    mixed = bench.plans[2:]
    assert [prompts_of(plan) for plan in mixed[:4]] == [
        [("p", 0, 7, False)],
        [("p", 7, 14, False)],
        [("p", 14, 20, True)],
        [],
    ]
    assert [names(plan) for plan in mixed[:4]] == [["a"]] * 3 + [["a", "p"]]
    p = mixed[3].decodes[1]
    assert (p.token, p.start, p.index) == (None, 20, 1)
    assert [decode.token for plan in mixed[1:4] for decode in plan.decodes] == [None] * 4


@pytest.mark.parametrize("token", [STOP, 9])
def test_a_first_token_may_be_the_last(token: int) -> None:
    bench = Bench(ROOMY)
    bench.hears(Prefill(request("p", max_tokens=9 if token == STOP else 1)))
    assert names(bench.ahead) == (["p"] if token == STOP else [])
    bench.ends(("p", token))
    assert bench.outputs[-1].finish is (FinishReason.STOP if token == STOP else FinishReason.LENGTH)
    if token == STOP:
        bench.ends(("p", 5))
    assert len(bench.outputs) == 1
    assert bench.blocks == 0


def test_a_prompt_that_is_cancelled_keeps_its_blocks_until_both_steps_have_ended() -> None:
    bench = Bench(ROOMY)
    bench.hears(Prefill(long("p", 20)))
    assert prompts_of(bench.ahead) == [("p", 8, 16, False)]
    bench.hears(Cancel("p", 0))
    bench.ends()
    assert bench.blocks > 0
    bench.ends()
    assert bench.blocks == 0
    assert not bench.worker.held["requests"]


def test_a_chunk_that_failed_takes_the_next_chunk_with_it() -> None:
    bench = Bench(ROOMY)
    bench.hears(Prefill(long("p", 20)))
    first, ahead = bench.plans
    assert ahead.continues(first)
    assert not first.continues(ahead)
    bench.ends(failure=StepFailure("no memory"))
    assert len(bench.plans) == 2
    bench.ends()
    assert prompts_of(bench.plans[2])[0][:2] == ("p", 0), "from where it was, in a smaller step"
    assert len(bench.plans[2].chunks[0].tokens) < 8
    assert not bench.plans[2].continues(first)


@pytest.mark.parametrize(
    "prompt",
    [
        long("p", 20, sampling=Sampling(prompt_logprobs=1)),
        long("p", 6, pooling=Pooling()),
    ],
    ids=["scored", "a vector"],
)
def test_what_brings_more_than_a_token_is_not_followed(prompt: Request) -> None:
    bench = Bench(ROOMY)
    bench.hears(Prefill(prompt))
    assert prompts_of(bench.last)
    assert bench.ahead is None


def test_a_prompt_with_penalties_sits_out_the_step_behind_its_first_token() -> None:
    bench = Bench(ROOMY)
    bench.joins(request("a", max_tokens=20))
    bench.hears(Prefill(replace(long("p", 4), sampling=PENALISED)))
    for _ in range(2):
        bench.ends(("a", 9))
    assert prompts_of(bench.plans[2]) == [("p", 0, 4, True)]
    assert names(bench.ahead) == ["a"]
    bench.ends(("a", 9), ("p", 9))
    bench.ends(("a", 9))
    assert [(decode.request, decode.token) for decode in bench.plans[4].decodes][1] == ("p", 9)


@pytest.mark.parametrize(
    ("scheduler", "is_ahead"),
    [(SchedulerName.ALIGNED, True), (SchedulerName.SARATHI, False), (SchedulerName.VLLM_V1, False)],
)
def test_other_schedulers_are_asked_for_each_step_with_a_prompt(scheduler: SchedulerName, is_ahead: bool) -> None:
    bench = Bench(ROOMY, replace(PLAIN, scheduler=scheduler, chunking=Chunking.FIXED, room=Room.WHOLE))
    bench.hears(Prefill(long("p", 20)))
    assert prompts_of(bench.plans[0])[0][3] is False
    assert (bench.ahead is not None) is is_ahead


def test_where_no_block_is_free_nothing_is_planned_ahead() -> None:
    bench = Bench(replace(LIMITS, num_blocks=2), Policy(reuse=False, room=Room.GROWING))
    bench.joins(request("a", max_tokens=5))
    seen = [bench.last.decodes[0].start]
    while bench.worker.held["requests"]:
        bench.ends(("a", 9))
        seen.append(bench.last.decodes[0].start)
    assert max(seen) == 6
    assert bench.blocks == 0


def test_a_request_gets_a_block_more_for_a_step_ahead_and_its_token_counts_all_the_same() -> None:
    """The step ahead is planned with one block more than the step before it."""
    bench = Bench()
    bench.joins(A)
    first, second = (plan.decodes[0].kv.blocks for plan in bench.plans)
    assert second[: len(first)] == first
    assert len(second) == len(first) + 1
    bench.ends(("a", 9))
    assert bench.outputs[-1].tokens == (9,)


def test_a_step_that_failed_takes_the_next_step_with_it() -> None:
    bench = Bench(replace(LIMITS, num_blocks=16))
    bench.joins(request("a", max_tokens=9), request("b", max_tokens=9))
    for _ in range(2):
        bench.ends(*((name, 9) for name in bench.running))
    failing, ahead = bench.plans[-2:]
    assert names(failing) == names(ahead) == ["a", "b"]
    bench.ends(failure=StepFailure("no memory"))
    num_outputs = len(bench.outputs)
    bench.ends(("a", 5), ("b", 5))
    assert len(bench.outputs) == num_outputs, "whatever came of it"
    [again] = bench.plans[4].decodes
    assert (again.token, again.start) == (9, failing.decodes[0].start), "a smaller step, from where it was"


def test_a_request_that_cannot_run_at_all_is_lost_when_both_steps_have_ended() -> None:
    bench = Bench()
    bench.joins(A)
    bench.ends(failure=StepFailure("no memory"))
    assert bench.blocks == 2
    bench.ends(failure=StepFailure("the step before it has failed"))
    assert not bench.worker.held["requests"]
    assert bench.blocks == 0


def test_an_output_that_cannot_go_on_ends_there() -> None:
    bench = Bench()
    bench.joins(A)
    bench.ends(unsampled=("a",))
    assert bench.outputs[-1].finish is FinishReason.DOUBT
    bench.ends(("a", 4))
    assert len(bench.outputs) == 1
    assert bench.blocks == 0


class Slow(OnlineCost):
    """Cost model in which a decode takes a tenth of a second and the rest of a step takes no time."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def model(self) -> CostModel:
        return _TENTHS

    def learn(self, shape: object, seconds: float) -> None: ...


_TENTHS = CostModel({kind: Coefficients(decode=0.1) for kind in OnlineCost(()).model.coefficients})


@pytest.mark.parametrize(("tbt_s", "is_ahead"), [(0.05, False), (0.15, True)])
def test_no_gap_becomes_longer_than_was_promised(tbt_s: float, is_ahead: bool) -> None:
    worker = decode_core(WorkerSetup(LIMITS, Policy(reuse=False), Slow(), look_ahead=1))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    request = replace(A, slo=Slo(tbt_s=tbt_s), service=ServiceClass.RT)
    worker.handle(said("pool-0", Batch((entry(request, (0,)),))), 0.0)
    commands = worker.handle(CopiedIn(1, intact=True), 0.0)
    assert sum(isinstance(command, RunStep) for command in commands) == 1 + is_ahead


@pytest.mark.parametrize(
    ("policy", "why"),
    [(Policy(memory="two_ended"), "slots"), (Policy(memory="hybrid"), "what is kept"), (Policy(), None)],
)
def test_where_memory_changes_hands_before_each_step_nothing_can_be_planned_ahead(
    policy: Policy, why: str | None
) -> None:
    if why is None:
        assert policy.block_use.why_not_ahead is None
    else:
        assert why in (policy.block_use.why_not_ahead or "")


def test_a_request_that_joins_in_a_trial_of_an_idle_worker_runs_behind_that() -> None:
    machine = Machine(look_ahead=1)
    machine.do(machine.core.handle(MemberJoined(POOL_MEMBER), 0.0))
    machine.now = IDLE_S
    machine.do(machine.core.handle(TimerFired("idle trials"), machine.now))
    machine.end_step()
    (trial,) = machine.steps
    assert trial.decodes
    assert not trial.chunks
    machine.do(machine.core.handle(said("pool-0", Batch((entry(request("a"), (7,)),))), machine.now))
    machine.do(machine.core.handle(CopiedIn(1, intact=True), machine.now))
    assert machine.steps == [trial]
    machine.end_step()
    assert [decode.request for decode in machine.steps[0].decodes] == ["a"]
