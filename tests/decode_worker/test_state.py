"""The decode worker: batches in the order of the pool, one token a step, and room that is always given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import (
    Chunk,
    Decode,
    FinishReason,
    History,
    KvForm,
    Logprob,
    Opening,
    Request,
    Sampling,
    StepFailure,
    StepPlan,
    StepResult,
)
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import Coefficients, CostModel, Kind
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyIn, RunStep, Send, SetTimer
from alignedserve.protocol.events import CopiedIn, LinkGap, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AskBatch,
    Batch,
    Cancel,
    Holding,
    Inquire,
    Missed,
    Output,
    Prefill,
    Progress,
    Release,
    Report,
    Resend,
    Spoiled,
    Tokens,
)
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.candidates import LEAST_WIDTH
from alignedserve.worker.pace import JOINS
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from tests.samples import (
    GATEWAY_MEMBER,
    LIMITS,
    POOL_MEMBER,
    ROUTER_MEMBER,
    but_reports,
    entry,
    member,
    next_attempt,
    request,
    said,
)

A, B, C = request("a"), request("b"), request("c")  # each request takes two blocks
NOTHING_HELD = {"requests": 0, "blocks": 0, "pages": 0, "outputs": 0}
IN_A, IN_B, IN_C = entry(A, (5,)), entry(B, (6,)), entry(C, (7,))
REFRESHES = SetTimer("refresh", REFRESH_S)


@pytest.fixture
def worker() -> DecodeCore:
    core = decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE)))
    assert core.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(8, 2), REFRESHES]
    return core


def copy_in(number: int, page: int, blocks: tuple[int, int]) -> Command:
    return CopyIn(number, "pool-0.1", (page,), blocks, (1, 2, 3))


COPY_A = copy_in(1, 5, (0, 1))


def asks(blocks: int, requests: int) -> Command:
    """Return the ask for a batch of this room; requests in these tests have three tokens when they join."""
    band = (3, 3 + LEAST_WIDTH) if requests < LIMITS.max_batch else None
    ahead = 1 if band else 0
    return Send("pool-0", AskBatch(blocks, requests, all_blocks=8, most_requests=2, band=band, ahead=ahead))


def tokens(index: int, value: int, finish: FinishReason | None = None, attempt: int = 0) -> Command:
    return Send("gateway-0", Tokens((Output("a", attempt, index, (value,), finish),)))


def decodes(number: int, token: int, start: int, index: int) -> Command:
    return RunStep(StepPlan(number, decodes=(Decode("a", token, start, KvForm((0, 1)), Sampling(), index),)))


def stepped(worker: DecodeCore, number: int, *sampled: tuple[str, int]) -> list[Command]:
    return but_reports(worker.handle(StepDone(StepResult(number, sampled)), 0.0))


def joins(worker: DecodeCore) -> list[Command]:
    joined = Send(ROUTER, Progress(joined=(("a", 0),), free_blocks=6))
    assert worker.handle(said("pool-0", Batch((IN_A,))), 0.0) == [COPY_A, asks(6, 1), joined]
    return worker.handle(CopiedIn(1, intact=True), 0.0)


def test_an_entry_joins_decodes_and_releases_its_pages(worker: DecodeCore) -> None:
    assert joins(worker) == [decodes(1, 7, start=3, index=1)]
    assert stepped(worker, 1, ("a", 9)) == [tokens(1, 9), decodes(2, 9, start=4, index=2)]
    assert stepped(worker, 2, ("a", 0)) == [
        Send("pool-0", Release("a", 0)),
        tokens(2, 0, FinishReason.STOP),
        asks(8, 2),
        Send(ROUTER, Progress(ended=(("a", 0),), lengths=(3,), free_blocks=8)),
    ]
    worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert worker.held == NOTHING_HELD


def test_the_router_hears_of_a_request_before_its_kv_is_here(worker: DecodeCore) -> None:
    """Its copy or its first step may end the process at once. A frame that is sent just before would be lost with it,
    and the router would charge the death to others, or to nobody."""
    commands = worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
    assert Send(ROUTER, Progress(joined=(("a", 0),), free_blocks=6)) in commands


def test_a_step_is_chosen_when_the_copies_before_it_have_ended(worker: DecodeCore) -> None:
    """The request that joins is in it: its second token would be late by a step."""
    joins(worker)
    worker.handle(said("pool-0", Batch((IN_B,))), 0.0)
    assert not any(isinstance(command, RunStep) for command in stepped(worker, 1, ("a", 9)))
    (step,) = [command for command in worker.handle(CopiedIn(2, intact=True), 0.0) if isinstance(command, RunStep)]
    assert [decode.request for decode in step.plan.decodes] == ["a", "b"]


class Known(OnlineCost):
    """Cost model in which a step takes 20 ms, and a millisecond more for each prompt token."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def model(self) -> CostModel:
        return CostModel({kind: Coefficients(fixed=0.02, token=(0.001,)) for kind in Kind})

    def learn(self, shape: object, seconds: float) -> None: ...


def test_prompts_leave_time_for_requests_that_are_handed_on() -> None:
    """Such a request is heard of only when a step ends, and its second token is due soon."""

    def beside_a(is_handed_on: bool) -> StepPlan:
        limits = replace(LIMITS, num_blocks=1000, max_step_tokens=256)
        worker = decode_core(WorkerSetup(limits, Policy(reuse=False), Known()))
        worker.handle(MemberJoined(POOL_MEMBER), 0.0)
        if is_handed_on:
            worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
            worker.handle(CopiedIn(1, intact=True), 0.0)
        else:
            worker.handle(said(ROUTER, Prefill(A)), 0.0)
        worker.handle(said(ROUTER, Prefill(request("long", prompt=400))), 0.0)
        (step,) = [command for command in stepped(worker, 1, ("a", 9)) if isinstance(command, RunStep)]
        assert [chunk.request for chunk in step.plan.chunks] == ["long"]
        return step.plan

    assert beside_a(True).predicted_s == pytest.approx(JOINS * beside_a(False).predicted_s, rel=0.05)


def test_the_output_ends_at_its_limit(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((entry(request("a", max_tokens=2), (5,)),))), 0.0)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    assert tokens(1, 9, FinishReason.LENGTH) in stepped(worker, 1, ("a", 9))


def test_a_copy_that_is_not_intact_is_a_lost_attempt(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
    assert worker.handle(CopiedIn(1, intact=False), 0.0) == [
        Send("pool-0", Release("a", 0)),
        asks(8, 2),
        Send(ROUTER, Progress(lost=(("a", 0),), free_blocks=8)),
    ]
    assert worker.held == NOTHING_HELD


def fails(worker: DecodeCore, number: int) -> list[Command]:
    return but_reports(worker.handle(StepDone(StepResult(number, (), failure=StepFailure("no memory"))), 0.0))


def test_a_decode_that_finds_no_memory_is_a_lost_attempt_and_its_pages_are_free(worker: DecodeCore) -> None:
    joins(worker)
    stepped(worker, 1, ("a", 9))
    assert fails(worker, 2) == [
        Send("pool-0", Release("a", 0)),
        asks(8, 2),
        Send(ROUTER, Progress(lost=(("a", 0),), free_blocks=8)),
    ]
    assert worker.held == NOTHING_HELD


@pytest.mark.parametrize("scheduler", SchedulerName)
def test_a_single_decode_runs_where_two_are_too_many(scheduler: SchedulerName) -> None:
    worker = decode_core(WorkerSetup(LIMITS, Policy(scheduler, room=Room.WHOLE)))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    worker.handle(said("pool-0", Batch((IN_A, IN_B))), 0.0)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    worker.handle(CopiedIn(2, intact=True), 0.0)
    plans = [command.plan for command in stepped(worker, 1, ("a", 9)) if isinstance(command, RunStep)]
    assert [part.request for plan in plans for part in plan.parts] == ["a", "b"]
    smaller = [command.plan for command in fails(worker, 2) if isinstance(command, RunStep)]
    assert [part.request for plan in smaller for part in plan.parts] == ["a"]
    assert worker.held["requests"] == 2


def test_what_has_left_before_its_step_failed_is_not_lost(worker: DecodeCore) -> None:
    """The next attempt of the cancelled request has arrived by then, and stays."""
    joins(worker)
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    worker.handle(said("pool-0", Batch((entry(next_attempt(A, (7,)), (6,)),))), 0.0)
    worker.handle(CopiedIn(2, intact=True), 0.0)
    told = [command.message for command in fails(worker, 1) if isinstance(command, Send)]
    assert not any(message.lost for message in told if isinstance(message, Progress))
    assert worker.held["requests"] == 1


def test_an_entry_brings_its_history_and_its_log_probabilities(worker: DecodeCore) -> None:
    sampling, of_prompt = Sampling(frequency_penalty=1.0, logprobs=0, prompt_logprobs=0), (Logprob(-9.0),)
    moved = replace(entry(replace(A, sampling=sampling), (5,)), logprobs=(Logprob(-1.0),))
    moved = replace(moved, opening=Opening(of_prompt, num_cached=2))
    worker.handle(said("pool-0", Batch((moved,))), 0.0)
    (running,) = worker.handle(CopiedIn(1, intact=True), 0.0)
    decode = Decode("a", 7, 3, KvForm((0, 1)), sampling, 1, History((1, 2, 3), [7], (0,)))
    assert running == RunStep(StepPlan(1, decodes=(decode,)))
    result = StepResult(1, (("a", 9),), logprobs=(("a", Logprob(-2.0)),))
    emitted = Tokens((Output("a", 0, 1, (9,), None, (Logprob(-2.0),)),))
    assert Send("gateway-0", emitted) in worker.handle(StepDone(result), 0.0)
    again = Tokens((Output("a", 0, 0, (7, 9), None, (Logprob(-1.0), Logprob(-2.0)), moved.opening),))
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [Send("gateway-0", again)]


def test_a_token_that_cannot_be_sampled_ends_the_output_in_doubt_and_frees_its_room(worker: DecodeCore) -> None:
    """Its KV was copied to the device, and may be spoiled."""
    joins(worker)
    failed = worker.handle(StepDone(StepResult(1, (), unsampled=("a",))), 0.0)
    assert Send("gateway-0", Tokens((Output("a", 0, 1, (), FinishReason.DOUBT),))) in failed
    assert Send("pool-0", Release("a", 0)) in failed
    worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert worker.held == NOTHING_HELD


def test_no_other_request_gets_pages_after_which_no_token_could_be_sampled(worker: DecodeCore) -> None:
    long = request("a", prompt=10)  # a full page and two tokens
    worker.handle(said("pool-0", Batch((entry(long, (5, 6)),))), 0.0)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    failed = worker.handle(StepDone(StepResult(1, (), unsampled=("a",))), 0.0)
    spoiled, released = Send("pool-0", Spoiled((5,))), Send("pool-0", Release("a", 0))
    assert [command for command in failed if command in (spoiled, released)] == [spoiled, released]


def test_an_entry_without_room_waits_and_nobody_overtakes_it(worker: DecodeCore) -> None:
    arrived = Batch((IN_A, IN_B, IN_C))
    assert worker.handle(said("pool-0", arrived), 0.0)[:2] == [COPY_A, copy_in(2, 6, (2, 3))]
    assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)[:2] == [
        Send("pool-0", Release("a", 0)),
        copy_in(3, 7, (4, 5)),
    ]


def test_colocated_a_prompt_becomes_a_resident() -> None:
    worker = decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE)))
    assert worker.handle(said(ROUTER, Prefill(A)), 0.0) == [
        RunStep(StepPlan(1, chunks=(Chunk("a", (1, 2, 3), 0, KvForm((0, 1)), Sampling()),))),
        Send(ROUTER, Progress(joined=(("a", 0),), free_blocks=6)),
    ]
    assert stepped(worker, 1, ("a", 7)) == [tokens(0, 7), decodes(2, 7, start=3, index=1), REFRESHES]


def test_what_was_emitted_can_be_sent_again(worker: DecodeCore) -> None:
    joins(worker)
    stepped(worker, 1, ("a", 9))
    again = Tokens((Output("a", 0, 0, (7, 9), None),))
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [Send("gateway-0", again)]
    assert worker.handle(said("gateway-0", Resend("a", 1, 0)), 0.0) == []
    assert worker.handle(said("gateway-0", Resend("a", 0, 2)), 0.0) == []


class TestCancel:
    def test_before_there_was_room(self, worker: DecodeCore) -> None:
        worker.handle(said("pool-0", Batch((IN_A, IN_B, IN_C))), 0.0)
        assert worker.handle(said(ROUTER, Cancel("c", 0)), 0.0)[0] == Send("pool-0", Release("c", 0))

    def test_while_it_is_copied_its_blocks_wait_for_the_end_of_the_copy(self, worker: DecodeCore) -> None:
        worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [Send("pool-0", Release("a", 0)), asks(6, 2)]
        assert worker.handle(CopiedIn(1, intact=True), 0.0) == [asks(8, 2)]
        assert worker.held == NOTHING_HELD

    def test_while_its_step_runs_its_blocks_wait_for_the_end_of_the_step(self, worker: DecodeCore) -> None:
        joins(worker)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [Send("pool-0", Release("a", 0)), asks(6, 2)]
        assert stepped(worker, 1, ("a", 9)) == [asks(8, 2)]
        assert worker.held == NOTHING_HELD

    def test_of_a_waiting_prompt(self) -> None:
        worker = decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE)))
        for new_request in (A, B, C):
            worker.handle(said(ROUTER, Prefill(new_request)), 0.0)
        worker.handle(said(ROUTER, Cancel("c", 0)), 0.0)
        assert worker.held["requests"] == 2

    def test_a_token_of_the_attempt_before_is_not_of_the_next_attempt(self) -> None:
        """The next attempt may be seated while the last step of the earlier attempt still runs."""
        worker = decode_core(WorkerSetup(LIMITS, Policy(SchedulerName.FCFS, Chunking.FIXED, Room.WHOLE)))
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
        chunk = Chunk("a", (1, 2, 3), 0, KvForm((2, 3)), Sampling())
        assert stepped(worker, 1, ("a", 7)) == [RunStep(StepPlan(2, chunks=(chunk,)))]
        assert tokens(0, 8, attempt=1) in stepped(worker, 2, ("a", 8))


class TestAbandonedCopies:
    """An abandoned copy may still be under way; its end is not taken for the end of the next copy."""

    def test_of_an_attempt_before(self, worker: DecodeCore) -> None:
        again = next_attempt(A, (7,))
        worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
        copy = CopyIn(2, "pool-0.1", (6,), (2, 3), (1, 2, 3, 7))
        assert copy in worker.handle(said("pool-0", Batch((entry(again, (6,), (7, 8)),))), 0.0)
        worker.handle(CopiedIn(1, intact=True), 0.0)
        assert worker.held["blocks"] == 2
        (step,) = worker.handle(CopiedIn(2, intact=True), 0.0)
        assert isinstance(step, RunStep)

    def test_that_failed(self, worker: DecodeCore) -> None:
        """The next attempt is not lost when the abandoned copy fails."""
        worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
        worker.handle(said("pool-0", Batch((entry(next_attempt(A), (6,)),))), 0.0)
        assert worker.handle(CopiedIn(1, intact=False), 0.0) == [asks(6, 1)]
        assert worker.held["requests"] == 1

    def test_from_a_pool_that_is_gone(self, worker: DecodeCore) -> None:
        """The copy may or may not have read intact pages before the pool was lost: its end says which."""
        worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        worker.handle(MemberJoined(member("pool-0", 2)), 0.0)
        lost = Send(ROUTER, Progress(lost=(("a", 0),), free_blocks=8))
        assert worker.handle(CopiedIn(1, intact=False), 0.0) == [asks(8, 2), lost]
        assert worker.held == NOTHING_HELD


class TestLostFrames:
    """Frames from or to the pool are lost: an ask without answer, a batch, a release that was not heard."""

    def test_an_ask_without_an_answer_is_said_again(self, worker: DecodeCore) -> None:
        for now in (5.0, 10.0):
            again = but_reports(worker.handle(TimerFired("refresh"), now))
            assert again == [asks(8, 2), SetTimer("refresh", now + REFRESH_S)]

    def test_nobody_is_asked_again_when_the_pool_has_gone(self, worker: DecodeCore) -> None:
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert but_reports(worker.handle(TimerFired("refresh"), 5.0)) == []

    def test_between_the_pool_and_us_have_us_ask_again(self, worker: DecodeCore) -> None:
        assert worker.handle(said("pool-0", Missed()), 0.0) == [asks(8, 2)]
        assert worker.handle(LinkGap("pool-0"), 0.0) == [Send("pool-0", Missed()), asks(8, 2)]

    def test_the_pool_hears_a_release_of_what_is_not_here(self, worker: DecodeCore) -> None:
        """The pool inquires after requests that it takes to be here: the batch, or the worker's release, was lost."""
        worker.handle(said("pool-0", Batch((IN_A, IN_B, IN_C))), 0.0)
        worker.handle(CopiedIn(1, intact=True), 0.0)
        asked = Inquire((("a", 0), ("b", 0), ("c", 0), ("d", 0), ("a", 1)))
        released = [Send("pool-0", Release("d", 0)), Send("pool-0", Release("a", 1))]
        assert worker.handle(said("pool-0", asked), 0.0) == released

    def test_the_router_is_told_instead(self, worker: DecodeCore) -> None:
        unknown = Send(ROUTER, Progress(unknown=(("d", 0),), free_blocks=8))
        assert worker.handle(said(ROUTER, Inquire((("d", 0),))), 0.0) == [unknown]


def test_what_is_here_already_is_not_taken_twice(worker: DecodeCore) -> None:
    """A pool that took this worker for dead, as a lost router told it, hands out again what the worker already has."""
    joins(worker)
    worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
    worker.handle(CopiedIn(2, intact=True), 0.0)
    stepped(worker, 1, ("a", 9))
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    stepped(worker, 2, ("a", 9))
    assert worker.held == NOTHING_HELD


def test_an_attempt_is_given_back_when_the_next_attempt_is_here(worker: DecodeCore) -> None:
    """A pool that others took for dead may still hand it out; two attempts of one request would replace each other."""
    worker.handle(said("pool-0", Batch((entry(next_attempt(A), (6,)),))), 0.0)
    assert Send("pool-0", Release("a", 0)) in worker.handle(said("pool-0", Batch((IN_A,))), 0.0)
    assert worker.held["requests"] == 1


def test_with_the_pool_go_the_entries_that_were_not_copied_yet(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((IN_A, IN_B, IN_C))), 0.0)
    for number in (1, 2):
        worker.handle(CopiedIn(number, intact=True), 0.0)
    lost = Send(ROUTER, Progress(lost=(("c", 0),), free_blocks=4))
    assert worker.handle(MemberLost(POOL_MEMBER), 0.0) == [lost]
    assert stepped(worker, 1, ("a", 0))[0] == tokens(1, 0, FinishReason.STOP)


def test_a_new_pool_is_asked_anew(worker: DecodeCore) -> None:
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(8, 2)]


def test_a_new_pool_gets_no_release_of_what_the_pool_before_had(worker: DecodeCore) -> None:
    """The new pool may have given the request, after a new prefill, to another worker."""
    joins(worker)
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    worker.handle(MemberJoined(member("pool-0", 2)), 0.0)
    ended = Send(ROUTER, Progress(ended=(("a", 0),), lengths=(2,), free_blocks=8))
    assert stepped(worker, 1, ("a", 0)) == [tokens(1, 0, FinishReason.STOP), asks(8, 2), ended]


def test_a_new_router_hears_what_is_held(worker: DecodeCore) -> None:
    joins(worker)
    worker.handle(said("pool-0", Batch((IN_B, IN_C))), 0.0)
    holding = Holding((("a", 0), ("b", 0), ("c", 0)), free_blocks=4)
    assert worker.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]


def test_nothing_is_kept_for_a_lost_owner(worker: DecodeCore) -> None:
    joins(worker)
    stepped(worker, 1, ("a", 0))
    worker.handle(MemberLost(GATEWAY_MEMBER), 0.0)
    assert worker.held == NOTHING_HELD


class TestGrowingRoom:
    """Four blocks of four tokens; a decode that has no place for its next token makes the newest request leave.

    The requests say the same, and share nothing: each is to take memory of its own.
    """

    TIGHT = replace(LIMITS, num_blocks=4)

    def worker(self) -> DecodeCore:
        return decode_core(
            WorkerSetup(self.TIGHT, Policy(SchedulerName.FCFS, Chunking.FIXED, Room.GROWING, reuse=False))
        )

    def run(self, worker: DecodeCore, prompts: Sequence[Request]) -> dict[str, list[int]]:
        """Run all prompts to their ends, on an engine that always samples token 7."""
        said_tokens: dict[str, list[int]] = {}
        work = [command for prompt in prompts for command in worker.handle(said(ROUTER, Prefill(prompt)), 0.0)]
        while work:
            command = work.pop(0)
            match command:
                case RunStep(plan):
                    slots = [block for ran in plan.parts for block in ran.kv.blocks]
                    assert len(set(slots)) == len(slots)
                    assert all(decode.start < len(decode.kv.blocks) * LIMITS.block_size for decode in plan.decodes)
                    sampling = [chunk.request for chunk in plan.chunks if chunk.sampling is not None]
                    sampled = [*sampling, *(decode.request for decode in plan.decodes)]
                    result = StepResult(plan.number, tuple((name, 7) for name in sampled))
                    work += worker.handle(StepDone(result), 0.0)
                case Send(_, Tokens(outputs)):
                    for output in outputs:
                        assert output.index == len(said_tokens.setdefault(output.request, []))
                        said_tokens[output.request] += output.tokens
        return said_tokens

    def test_more_are_seated_than_would_be_for_their_longest_outputs(self) -> None:
        prompts = [request(name, prompt=3, max_tokens=9) for name in "ab"]  # twelve tokens each, in sixteen places
        worker = self.worker()
        assert self.run(worker, prompts) == {"a": [7] * 9, "b": [7] * 9}
        assert num_preemptions(worker) > 0
        assert worker.held == {"requests": 0, "blocks": 0, "pages": 0, "outputs": 2}

    def test_a_request_that_fits_alone_always_ends(self) -> None:
        prompts = [request(name, prompt=5, max_tokens=11) for name in "abcd"]
        assert self.run(self.worker(), prompts) == {name: [7] * 11 for name in "abcd"}

    def test_a_request_that_left_and_is_cancelled_leaves_nothing(self) -> None:
        worker = self.worker()
        self.run(worker, [])
        for name in "ab":
            worker.handle(said(ROUTER, Prefill(request(name, prompt=7, max_tokens=9))), 0.0)
        step = 0
        while not num_preemptions(worker):
            step += 1
            sampled = tuple((name, 7) for name in ("a", "b"))
            worker.handle(StepDone(StepResult(step, sampled)), 0.0)
        for name in "ab":
            worker.handle(said(ROUTER, Cancel(name, 0)), 0.0)
        worker.handle(StepDone(StepResult(step + 1, (("a", 7),))), 0.0)
        assert worker.held == {"requests": 0, "blocks": 0, "pages": 0, "outputs": 0}


def test_whole_prompts_run_alone_and_first() -> None:
    worker = decode_core(WorkerSetup(LIMITS, Policy(SchedulerName.FCFS, Chunking.NONE, Room.WHOLE)))
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(request("b", prompt=6))), 0.0)
    [second] = [c.plan for c in stepped(worker, 1, ("a", 7)) if isinstance(c, RunStep)]
    assert [(chunk.request, len(chunk.tokens)) for chunk in second.chunks] == [("b", 6)]
    assert second.decodes == ()
    [third] = [c.plan for c in stepped(worker, 2, ("b", 7)) if isinstance(c, RunStep)]
    assert {decode.request for decode in third.decodes} == {"a", "b"}


def test_the_router_gets_a_report_every_few_steps_and_when_there_are_none(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((entry(request("a", max_tokens=29), (5,)),))), 0.0)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    reports = []
    for number in range(1, 20):
        token = 0 if number == 19 else 9
        reports += [
            (number, command.message)
            for command in worker.handle(StepDone(StepResult(number, (("a", token),)), seconds=0.5), 0.0)
            if isinstance(command, Send) and isinstance(command.message, Report)
        ]
    assert [number for number, _ in reports] == [7, 15, 19]
    while_it_runs, when_it_has_ended = reports[1][1], reports[2][1]
    assert (while_it_runs.band, while_it_runs.free_blocks) == ((18, 18 + LEAST_WIDTH), 0)
    assert (when_it_has_ended.band, when_it_has_ended.free_blocks) == (None, 8)
    assert when_it_has_ended.step_s > 0
