"""Behaviour of both kinds of workers: messages to owners and router, repeated wherever a frame was lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import (
    Chunk,
    FinishReason,
    History,
    KvForm,
    Logprob,
    Opening,
    Request,
    Sampling,
    Scoring,
    Spent,
    StepFailure,
    StepPlan,
    StepResult,
)
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.running import MOST_ALIKE
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.explain.decisions import Kind
from alignedserve.explain.sentences import said as told_as
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, End, RunStep, Send, SetTimer
from alignedserve.protocol.events import CopiedIn, LinkGap, MemberJoined, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AskDecisions,
    Batch,
    Cancel,
    Decisions,
    Figures,
    Holding,
    Inquire,
    Missed,
    Output,
    Prefill,
    Prefix,
    Progress,
    Resend,
    Retire,
    Tokens,
    Used,
)
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import MOST_SCORED, WorkerRequest
from tests.machine.test_energy import REST_W, STEP_W, Device
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, STOP, but_reports, entry, next_attempt, request, said
from tests.worker.cores import MakeCore

A, B = request("a"), request("b", owner="gateway-1")


def made_like(worker: DecodeCore) -> MakeCore:
    return PrefillCore if isinstance(worker, PrefillCore) else decode_core


REFRESH = TimerFired("refresh")
REFRESHES = SetTimer("refresh", REFRESH_S)


@pytest.fixture(params=[PrefillCore, decode_core])
def worker(request: pytest.FixtureRequest) -> DecodeCore:
    """Return each kind of worker without a pool, so that the decode worker is colocated."""
    core: DecodeCore = request.param(WorkerSetup(LIMITS))
    assert core.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, Holding((), free_blocks=8))]
    return core


def last_token(name: str = "a", attempt: int = 0, owner: str = "gateway-0") -> Command:
    return Send(owner, Tokens((Output(name, attempt, 0, (0,), FinishReason.STOP),)))


def run_both(worker: DecodeCore) -> list[Command]:
    """Run the prompts of two owners, whose first token is the last."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    return worker.handle(StepDone(StepResult(2, (("b", 0),))), 0.0)


def test_a_last_token_is_said_again_until_it_is_acknowledged(worker: DecodeCore) -> None:
    """No later frame would show that the last token was lost."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    ended = Send(ROUTER, Progress(ended=(("a", 0),), lengths=(1,), free_blocks=8))
    assert but_reports(worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)) == [last_token(), REFRESHES, ended]
    for now in (5.0, 10.0):
        assert but_reports(worker.handle(REFRESH, now)) == [last_token(), SetTimer("refresh", now + REFRESH_S)]
    assert worker.handle(said("gateway-0", Acknowledge(("a",))), 11.0) == []
    assert worker.handle(REFRESH, 15.0) == []


def test_there_is_one_refresh_at_a_time(worker: DecodeCore) -> None:
    """A timer that each event set again would never fire."""
    assert REFRESHES not in run_both(worker)
    assert but_reports(worker.handle(REFRESH, 5.0)) == [
        last_token(),
        last_token("b", owner="gateway-1"),
        SetTimer("refresh", 5.0 + REFRESH_S),
    ]


def test_after_lost_frames_an_owner_hears_again_what_has_ended(worker: DecodeCore) -> None:
    run_both(worker)
    again = last_token("b", owner="gateway-1")
    assert worker.handle(said("gateway-1", Missed()), 0.0) == [again]
    assert worker.handle(LinkGap("gateway-1"), 0.0) == [Send("gateway-1", Missed()), again]
    worker.handle(said("gateway-1", Acknowledge(("b",))), 0.0)
    assert worker.handle(said("gateway-1", Missed()), 0.0) == []


def test_after_lost_frames_the_router_hears_again_what_is_held(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    holding = Send(ROUTER, Holding((("a", 0),), free_blocks=7))
    assert worker.handle(said(ROUTER, Missed()), 0.0) == [holding]
    assert worker.handle(LinkGap(ROUTER), 0.0) == [Send(ROUTER, Missed()), holding]


def test_the_router_inquires_after_what_is_not_here(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    assert worker.handle(said(ROUTER, Inquire((("a", 1), ("b", 0)))), 0.0) == []
    asked = Inquire((("a", 0), ("a", 1), ("a", 2), ("never", 0)))
    [answer] = worker.handle(said(ROUTER, asked), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Progress)
    assert replace(answer.message, free_blocks=0) == Progress(unknown=(("a", 0), ("a", 2), ("never", 0)))


def test_what_has_ended_is_not_here_any_more(worker: DecodeCore) -> None:
    """The output is kept for its owner only; a router that missed the end must hear that the request is not here."""
    run_both(worker)
    unknown = Progress(unknown=(("a", 0),), free_blocks=8)
    assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == [Send(ROUTER, unknown)]


def test_a_cancel_of_an_older_attempt_leaves_the_output_of_the_next(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    worker.handle(said("gateway-0", Cancel("a", 0)), 0.0)
    assert worker.handle(said("gateway-0", Resend("a", 1, 0)), 0.0) == [last_token(attempt=1)]


def test_a_request_that_waited_is_seated_as_soon_as_there_is_room_again(worker: DecodeCore) -> None:
    """The numbers of free blocks and of waiting requests may equal those at the seating before."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    after = worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    assert any(isinstance(command, RunStep) for command in after)


# --- Too little memory


def planned(commands: list[Command]) -> StepPlan:
    return next(command.plan for command in commands if isinstance(command, RunStep))


def fails(worker: DecodeCore, plan: StepPlan) -> list[Command]:
    return worker.handle(StepDone(StepResult(plan.number, (), failure=StepFailure("no memory")), 0.1), 0.0)


def test_a_step_without_memory_is_followed_by_smaller_steps(worker: DecodeCore) -> None:
    """Tokens of the failed step do not count as run, and all of the prompt runs in the end."""
    plan = planned(worker.handle(said(ROUTER, Prefill(request("a", prompt=8))), 0.0))
    sizes, ran = [plan.num_tokens], list[int]()
    for _ in range(2):
        plan = planned(fails(worker, plan))
        sizes.append(plan.num_tokens)
        assert plan.chunks[0].start == 0
    assert sizes == [8, 4, 2]
    while not plan.chunks[0].sampling:
        ran += plan.chunks[0].tokens
        plan = planned(worker.handle(StepDone(StepResult(plan.number, ())), 0.0))
    assert [*ran, *plan.chunks[0].tokens] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_where_one_token_is_too_much_the_attempt_is_lost(worker: DecodeCore) -> None:
    """The owner hears of the loss from the router, and who asks hears why; the worker goes on with other requests."""
    plan = planned(worker.handle(said(ROUTER, Prefill(A)), 0.0))
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    while plan.num_tokens > 1:
        plan = planned(fails(worker, plan))
    commands, (lost,) = fails(worker, plan), plan.parts
    assert [message.lost for message in progress_in(commands)] == [((lost.request, 0),)]
    assert [part.request for part in planned(commands).parts] == ["b" if lost.request == "a" else "a"]
    assert sorted(blocks_of(worker)) == list(range(8)), "no block has gone, none is there twice"
    [told] = worker.handle(said("gateway-0", AskDecisions(1, lost.request)), 0.0)
    assert isinstance(told, Send)
    assert isinstance(told.message, Decisions)
    last = told.message.findings.decisions[-1]
    assert (last.kind, last.why) == (Kind.LOST, "the device has too little memory for a single token")


def progress_in(commands: list[Command]) -> list[Progress]:
    sent = (command.message for command in commands if isinstance(command, Send))
    return [message for message in sent if isinstance(message, Progress)]


def test_steps_grow_again_once_they_go_well(worker: DecodeCore) -> None:
    plan = planned(worker.handle(said(ROUTER, Prefill(request("a", prompt=8))), 0.0))
    while plan.num_tokens > 1:
        plan = planned(fails(worker, plan))
    sizes = []
    for number in range(20):
        while True:
            sizes.append(plan.num_tokens)
            done = ((plan.chunks[0].request, 0),) if plan.chunks[0].sampling else ()
            commands = worker.handle(StepDone(StepResult(plan.number, done)), 0.0)
            if done:
                break
            plan = planned(commands)
        unlike = replace(request(f"b{number}"), prompt=tuple(range(10 * number + 10, 10 * number + 18)))
        plan = planned(worker.handle(said(ROUTER, Prefill(unlike)), 0.0))
    assert sizes == sorted(sizes), "they only grow, as long as none fails"
    assert {1, 2, 4, 8} <= set(sizes)


# --- Log-probabilities, histories, and tokens that cannot be sampled

SCORED = Sampling(logprobs=1, prompt_logprobs=1)
MINE = Logprob(-0.5, ((7, -0.5),))


def asks_for(sampling: Sampling, prompt: int = 3) -> Request:
    return replace(request("a", prompt=prompt), sampling=sampling)


def plan_of(commands: list[Command]) -> StepPlan:
    (plan,) = [command.plan for command in commands if isinstance(command, RunStep)]
    return plan


def outputs_of(commands: list[Command]) -> list[Output]:
    frames = [command.message for command in commands if isinstance(command, Send)]
    return [output for frame in frames if isinstance(frame, Tokens) for output in frame.outputs]


def test_a_prompt_is_scored_chunk_by_chunk_and_told_with_the_first_token(worker: DecodeCore) -> None:
    first = plan_of(worker.handle(said(ROUTER, Prefill(asks_for(SCORED, prompt=10))), 0.0))
    blocks = first.chunks[0].kv.blocks
    assert first.chunks == (
        Chunk("a", tuple(range(1, 9)), 0, KvForm(blocks), None, scoring=Scoring(tuple(range(2, 10)), 1)),
    )
    of_prompt = tuple(Logprob(-float(place)) for place in range(1, 10))
    second = plan_of(worker.handle(StepDone(StepResult(1, (), prompt_logprobs=(("a", of_prompt[:8]),))), 0.0))
    assert second.chunks == (Chunk("a", (9, 10), 8, KvForm(blocks), SCORED, scoring=Scoring((10,), 1)),)
    result = StepResult(2, (("a", 7),), logprobs=(("a", MINE),), prompt_logprobs=(("a", of_prompt[8:]),))
    told = Output("a", 0, 0, (7,), None, (MINE,), Opening(of_prompt))
    assert outputs_of(worker.handle(StepDone(result), 0.0)) == [told]
    assert outputs_of(worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0)) == [told], "a lost frame held it all"


def test_scores_stay_of_tokens_whose_kv_came_back_from_the_pool() -> None:
    asked, of_prompt = asks_for(SCORED, prompt=10), tuple(Logprob(-float(place)) for place in range(1, 10))
    prompt = WorkerRequest(asked, promise(asked, Policy()), [])
    for start, end in ((0, 8), (0, 4), (6, 10)):  # it had to leave twice; the pool had six tokens then
        prompt.prefix = start
        scoring = Scoring(asked.prompt[start + 1 : end + 1], 1)
        prompt.end_chunk(
            Chunk("a", asked.prompt[start:end], start, KvForm((1,)), None, scoring=scoring), 0.0, of_prompt[start:end]
        )
    assert tuple(prompt.prompt_logprobs) == of_prompt


def test_the_owner_hears_how_long_a_prompt_waited(worker: DecodeCore) -> None:
    asked = replace(asks_for(Sampling(), prompt=10), arrival_at=1.0)
    worker.handle(said(ROUTER, Prefill(asked)), 2.0)
    worker.handle(StepDone(StepResult(1, ()), seconds=1.5), 4.0)  # the first of two chunks
    (told,) = outputs_of(worker.handle(StepDone(StepResult(2, (("a", 7),)), seconds=1.0), 5.0))
    assert told.opening == Opening(waited_s=1.5)


def test_a_scored_chunk_is_short(worker: DecodeCore) -> None:
    """All logits of a scored chunk are in memory at the same time."""
    roomy = made_like(worker)(WorkerSetup(replace(LIMITS, num_blocks=400, max_step_tokens=2000)))
    plan = plan_of(roomy.handle(said(ROUTER, Prefill(asks_for(SCORED, prompt=MOST_SCORED + 9))), 0.0))
    assert len(plan.chunks[0].tokens) == MOST_SCORED
    assert plan.chunks[0].sampling is None


def test_a_next_attempt_scores_no_prompt_and_tells_only_its_own(worker: DecodeCore) -> None:
    """The owner already has the log-probabilities of the prompt and of the emitted tokens."""
    plan = plan_of(worker.handle(said(ROUTER, Prefill(next_attempt(asks_for(SCORED), (7, 8)))), 0.0))
    assert plan.chunks[0].scoring is None
    stepped = worker.handle(StepDone(StepResult(1, (("a", 9),), logprobs=(("a", MINE),))), 0.0)
    assert outputs_of(stepped) == [Output("a", 1, 2, (9,), None, (MINE,))]
    assert outputs_of(worker.handle(said("gateway-0", Resend("a", 1, 2)), 0.0)) == [
        Output("a", 1, 2, (9,), None, (MINE,))
    ]


def test_a_history_goes_with_what_is_sampled_where_it_is_needed(worker: DecodeCore) -> None:
    plain = plan_of(worker.handle(said(ROUTER, Prefill(asks_for(SCORED))), 0.0))
    assert plain.chunks[0].history is None
    second = made_like(worker)(WorkerSetup(LIMITS))
    again = next_attempt(asks_for(Sampling(presence_penalty=1.0), prompt=7), (7, 8))
    cut = plan_of(second.handle(said(ROUTER, Prefill(again)), 0.0))
    assert cut.chunks[0].history is None, "nothing is sampled yet"
    whole = plan_of(second.handle(StepDone(StepResult(1, ())), 0.0))
    assert whole.chunks[0].history == History((1, 2, 3, 4, 5, 6, 7), [7, 8], (0,))


def test_a_token_that_cannot_be_sampled_ends_the_output_before_it(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    failed = worker.handle(StepDone(StepResult(1, (), unsampled=("a",))), 0.0)
    end = Output("a", 0, 0, (), FinishReason.ERROR)
    assert outputs_of(failed) == [end]
    assert Send(ROUTER, Progress(ended=(("a", 0),), lengths=(0,), free_blocks=8)) in failed
    assert outputs_of(worker.handle(REFRESH, REFRESH_S)) == [end], "until it is acknowledged"
    assert outputs_of(worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0)) == [end]
    worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert worker.handle(REFRESH, 2 * REFRESH_S) == []


class TestRetiring:
    RETIRE = said(ROUTER, Retire("me", 1))

    def test_where_nothing_is_open_it_ends_at_once(self, worker: DecodeCore) -> None:
        assert End() in worker.handle(self.RETIRE, 0.0)

    def test_first_what_is_open_ends_and_is_with_its_owners(self, worker: DecodeCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        assert End() not in worker.handle(self.RETIRE, 0.0)
        done = worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
        assert last_token() in done
        assert End() not in done
        assert End() in worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)

    def test_gateways_hear_that_it_is_to_go_before_it_has_gone(self, worker: DecodeCore) -> None:
        *_, told, end = worker.handle(self.RETIRE, 0.0)
        (figures,) = figures_in([told])
        assert figures.worker is not None
        assert figures.worker.is_retiring
        assert end == End()


def figures_in(commands: list[Command]) -> list[Figures]:
    sent = [command.message for command in commands if isinstance(command, Send)]
    return [message for message in sent if isinstance(message, Figures)]


def test_a_new_router_hears_what_was_counted_though_nothing_is_new(worker: DecodeCore) -> None:
    told = figures_in(worker.handle(REFRESH, 1.0))
    assert len(told) == 1
    assert figures_in(worker.handle(REFRESH, 3.0)) == []
    assert figures_in(worker.handle(MemberJoined(ROUTER_MEMBER), 3.5)) == told


# --- What requests use


def metered(name: str, owner: str = "gateway-0", **fields: Any) -> Request:
    return replace(request(name, owner=owner), is_metered=True, **fields)


def uses(commands: list[Command]) -> dict[str, Spent]:
    """Return what is said of use, by request; an owner hears it before the tokens."""
    found, kinds = dict[str, Spent](), defaultdict[str, list[type]](list)
    for command in commands:
        if isinstance(command, Send):
            kinds[command.to].append(type(command.message))
            if isinstance(command.message, Used):
                found |= {use.request: use.spent for use in command.message.uses}
    assert all(order in ([Used, Tokens], [Tokens], [Used]) for to, order in kinds.items() if to.startswith("gateway"))
    return found


@pytest.mark.parametrize("make", [PrefillCore, decode_core])
def test_an_owner_is_told_what_its_requests_have_used_at_their_end(make: MakeCore) -> None:
    worker = make(WorkerSetup(LIMITS, energy_source="rapl"))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a"))), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("b", owner="gateway-1"))), 0.0)
    first = worker.handle(StepDone(StepResult(1, (("a", 0),)), 0.2, 6.0), 0.2)
    second = worker.handle(StepDone(StepResult(2, (("b", 0),)), 0.1, 3.0), 0.3)
    told = uses(first) | uses(second)
    assert told["a"] == (pytest.approx(0.2), pytest.approx(6.0), "rapl")
    assert told["b"] == (pytest.approx(0.1), pytest.approx(3.0), "rapl")


def test_what_a_request_has_used_is_explained_with_how_it_is_known() -> None:
    worker = decode_core(WorkerSetup(LIMITS, energy_source="modelled"))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a"))), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),)), 0.2, 6.0), 0.2)
    (answer,) = worker.handle(said("gateway-0", AskDecisions(1, "a")), 0.3)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Decisions)
    ended = told_as(answer.message.findings.decisions[-1])
    assert ended == "ended with 1 token: stop; it used 200.0 ms of workers' time, 6 J (modelled)"


def test_all_requests_together_are_charged_with_what_the_meter_counts() -> None:
    """They come, overlap and rest; the device takes one power in steps and another between them."""
    device, limits = Device(), replace(LIMITS, num_blocks=64)
    worker, meter, told = decode_core(WorkerSetup(limits, energy_source="nvml")), device.meter(), dict[str, Spent]()
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    for number in range(20):
        device.passes(0.3, REST_W)
        commands = worker.handle(said(ROUTER, Prefill(metered(f"r{number}", max_tokens=9 + number))), device.now)
        commands += worker.handle(said(ROUTER, Prefill(metered(f"s{number}", max_tokens=9))), device.now)
        while plans := [command.plan for command in commands if isinstance(command, RunStep)]:
            step_s = 0.02 * plans[0].num_tokens
            device.passes(step_s, STEP_W)
            tokens = tuple((part.request, 7) for part in plans[0].parts if part.sampling)
            done = StepDone(StepResult(plans[0].number, tokens), step_s, meter.step(step_s))
            commands = worker.handle(done, device.now)
            told |= uses(commands)
    assert len(told) == 40
    assert sum(spent.joules for spent in told.values()) == pytest.approx(meter.joules - meter.rest_joules, rel=0.05)


def test_an_owner_is_told_at_the_first_token_and_meanwhile_what_a_request_has_used() -> None:
    """A client that leaves, or whose stop string is found, has used no more than a fiftieth of a second unseen."""
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a", max_tokens=9))), 0.0)
    told = [uses(worker.handle(StepDone(StepResult(step, (("a", 7),)), 0.008), step / 10)) for step in range(1, 9)]
    assert [said["a"].seconds for said in told if said] == pytest.approx([0.008, 0.032, 0.056])


def test_before_the_first_token_an_owner_is_told_of_more_than_a_fiftieth_of_a_second() -> None:
    worker = decode_core(WorkerSetup(replace(LIMITS, num_blocks=64)))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a", prompt=tuple(range(40))))), 0.0)
    told = [uses(worker.handle(StepDone(StepResult(step, ()), 0.02), step / 10)) for step in range(1, 5)]
    assert [said["a"].seconds if said else 0 for said in told] == pytest.approx([0, 0.04, 0, 0.08])


def test_steps_of_the_same_decodes_are_charged_whole() -> None:
    """Many are charged like the step before; with who comes and goes that changes."""
    worker, told, step = decode_core(WorkerSetup(replace(LIMITS, num_blocks=64))), dict[str, Spent](), 0
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a", max_tokens=40))), 0.0)
    commands = worker.handle(said(ROUTER, Prefill(metered("b", max_tokens=25))), 0.0)
    commands = worker.handle(StepDone(StepResult(1, (("a", 7),)), 0.03), 0.03)
    while plans := [command.plan for command in commands if isinstance(command, RunStep)]:
        step += 1
        tokens = tuple((part.request, 7) for part in plans[0].parts if part.sampling)
        commands = worker.handle(StepDone(StepResult(plans[0].number, tokens), 0.03), 0.03 * step)
        told |= uses(commands)
    assert step > 2 * MOST_ALIKE
    assert told["a"].seconds + told["b"].seconds == pytest.approx(0.03 * (step + 1))
    assert told["b"].seconds == pytest.approx(0.03 * 25 / 2, rel=0.1), "half of each step that it was in"


def test_nobody_is_told_what_requests_use_that_are_not_metered() -> None:
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    assert not uses(worker.handle(StepDone(StepResult(1, (("a", 0),)), 5.0, 5.0), 5.0))


def test_nobody_is_charged_for_a_request_that_left_before_it_was_in_a_step() -> None:
    worker = decode_core(WorkerSetup(LIMITS, copies_beside=True))
    for neighbour in (ROUTER_MEMBER, POOL_MEMBER):
        worker.handle(MemberJoined(neighbour), 0.0)
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said("pool-0", Prefix("a", 0, ())), 0.0)
    worker.handle(said("pool-0", Batch((entry(metered("joins"), (1,)),))), 0.0)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    worker.handle(said(ROUTER, Cancel("joins", 0)), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", STOP),)), 0.1), 0.1)
    worker.handle(said(ROUTER, Prefill(request("next"))), 0.2)
    worker.handle(said("pool-0", Prefix("next", 0, ())), 0.2)
    worker.handle(StepDone(StepResult(2, (("next", STOP),)), 0.1), 0.3)
    (answer,) = worker.handle(said("gateway-0", AskDecisions(1, "next")), 0.4)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Decisions)
    assert told_as(answer.message.findings.decisions[-1]) == "ended with 1 token: stop"


def test_a_step_is_charged_though_its_first_request_has_left() -> None:
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a", max_tokens=9))), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("b", max_tokens=2))), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 7),)), 0.1), 0.1)
    worker.handle(StepDone(StepResult(2, (("a", 7), ("b", 7))), 0.1), 0.2)
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.25)
    ended = uses(worker.handle(StepDone(StepResult(3, (("a", 7), ("b", 0))), 0.2), 0.4))
    assert ended["b"].seconds > 0.1, "its half of the last step"
    assert ended["a"].seconds > 0.2, "all of the first step, and its parts of the others, though it has left"


@pytest.mark.parametrize("make", [PrefillCore, decode_core])
@pytest.mark.parametrize("leaves_after", [0, 1])
def test_a_prompt_is_charged_whose_client_leaves_before_its_first_token(make: MakeCore, leaves_after: int) -> None:
    """Else long prompts that are cancelled again and again would be free."""
    worker = make(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(metered("a", prompt=tuple(range(24))))), 0.0)
    told = [uses(worker.handle(StepDone(StepResult(step + 1, ()), 0.1), 0.1)) for step in range(leaves_after)]
    assert told == [{"a": Spent(0.1, 0.0)}][:leaves_after]
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.15)
    last = uses(worker.handle(StepDone(StepResult(leaves_after + 1, ()), 0.2), 0.3))
    assert last["a"].seconds == pytest.approx(0.2 + 0.1 * leaves_after)
    assert not any(worker.held.values())


@pytest.mark.parametrize("first", [A, metered("a")])
def test_a_gateway_of_the_version_before_is_not_told_what_it_cannot_read(first: Request) -> None:
    """It shares the worker with one of this version, whatever the order of their requests."""
    second = request("b", owner="gateway-1") if first.is_metered else metered("b", owner="gateway-1")
    worker, told = decode_core(WorkerSetup(LIMITS)), dict[str, Spent]()
    worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    for asked in (first, second):
        worker.handle(said(ROUTER, Prefill(replace(asked, max_tokens=2))), 0.0)
    told |= uses(worker.handle(StepDone(StepResult(1, (("a", 7),)), 0.1), 0.1))
    told |= uses(worker.handle(StepDone(StepResult(2, (("a", 0), ("b", 7))), 0.1), 0.2))
    told |= uses(worker.handle(StepDone(StepResult(3, (("b", 0),)), 0.1), 0.3))
    assert list(told) == ["a" if first.is_metered else "b"]
    assert min(used.seconds for used in told.values()) > 0.1
