"""The decode worker: batches in the order of the pool, one token a step, and room that always comes back."""

from __future__ import annotations

import pytest

from alignedserve.core import Chunk, Decode, FinishReason, Sampling, StepPlan, StepResult
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.messages import (
    ROUTER,
    Acknowledge,
    AskBatch,
    Batch,
    Cancel,
    Command,
    CopiedIn,
    CopyIn,
    Holding,
    MemberJoined,
    MemberLost,
    Output,
    Prefill,
    Progress,
    Release,
    Resend,
    RunStep,
    Send,
    StepDone,
    Tokens,
)
from tests.samples import GATEWAY_MEMBER, LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, next_attempt, request, said

A, B, C = request("a"), request("b"), request("c")  # each takes two pairs
NOTHING_HELD = {"requests": 0, "pairs": 0, "pages": 0, "outputs": 0}
COPY_A = CopyIn("a", (5,), (0, 1), (1, 2, 3))


@pytest.fixture
def worker() -> DecodeCore:
    core = DecodeCore(LIMITS)
    assert core.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(8, 2)]
    return core


def asks(pairs: int, requests: int) -> Command:
    return Send("pool-0", AskBatch(pairs, requests))


def tokens(index: int, value: int, finish: FinishReason | None = None, attempt: int = 0) -> Command:
    return Send("gateway-0", Tokens((Output("a", attempt, index, (value,), finish),)))


def decodes(number: int, token: int, start: int, index: int) -> Command:
    return RunStep(StepPlan(number, decodes=(Decode("a", token, start, (0, 1), Sampling(), index),)))


def stepped(worker: DecodeCore, number: int, *sampled: tuple[str, int]) -> list[Command]:
    return worker.handle(StepDone(StepResult(number, sampled)), 0.0)


def joins(worker: DecodeCore) -> list[Command]:
    assert worker.handle(said("pool-0", Batch((entry(A, (5,)),))), 0.0) == [COPY_A, asks(6, 1)]
    return worker.handle(CopiedIn("a", intact=True), 0.0)


def test_an_entry_joins_decodes_and_releases_its_pages(worker: DecodeCore) -> None:
    joined = Send(ROUTER, Progress(joined=(("a", 0),), free_pairs=6))
    assert joins(worker) == [decodes(1, 7, start=3, index=1), joined]
    assert stepped(worker, 1, ("a", 9)) == [tokens(1, 9), decodes(2, 9, start=4, index=2)]
    assert stepped(worker, 2, ("a", 0)) == [
        Send("pool-0", Release("a", 0)),
        tokens(2, 0, FinishReason.STOP),
        asks(8, 2),
        Send(ROUTER, Progress(ended=(("a", 0),), free_pairs=8)),
    ]
    worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert worker.held == NOTHING_HELD


def test_the_output_ends_at_its_limit(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((entry(request("a", max_tokens=2), (5,)),))), 0.0)
    worker.handle(CopiedIn("a", intact=True), 0.0)
    assert tokens(1, 9, FinishReason.LENGTH) in stepped(worker, 1, ("a", 9))


def test_a_copy_that_is_not_intact_is_a_lost_attempt(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((entry(A, (5,)),))), 0.0)
    assert worker.handle(CopiedIn("a", intact=False), 0.0) == [
        Send("pool-0", Release("a", 0)),
        asks(8, 2),
        Send(ROUTER, Progress(lost=(("a", 0),), free_pairs=8)),
    ]
    assert worker.held == NOTHING_HELD


def test_an_entry_without_room_waits_and_nobody_overtakes_it(worker: DecodeCore) -> None:
    arrived = Batch((entry(A, (5,)), entry(B, (6,)), entry(C, (7,))))
    copy_b = CopyIn("b", (6,), (2, 3), (1, 2, 3))
    assert worker.handle(said("pool-0", arrived), 0.0) == [COPY_A, copy_b]
    assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [
        Send("pool-0", Release("a", 0)),
        CopyIn("c", (7,), (1, 0), (1, 2, 3)),
    ]


def test_colocated_a_prompt_becomes_a_resident() -> None:
    worker = DecodeCore(LIMITS)
    assert worker.handle(said(ROUTER, Prefill(A)), 0.0) == [
        RunStep(StepPlan(1, chunks=(Chunk("a", (1, 2, 3), 0, (0, 1), Sampling()),))),
        Send(ROUTER, Progress(joined=(("a", 0),), free_pairs=6)),
    ]
    assert stepped(worker, 1, ("a", 7)) == [tokens(0, 7), decodes(2, 7, start=3, index=1)]


def test_what_was_emitted_can_be_sent_again(worker: DecodeCore) -> None:
    joins(worker)
    stepped(worker, 1, ("a", 9))
    again = Tokens((Output("a", 0, 0, (7, 9), None),))
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [Send("gateway-0", again)]
    assert worker.handle(said("gateway-0", Resend("a", 1, 0)), 0.0) == []
    assert worker.handle(said("gateway-0", Resend("a", 0, 2)), 0.0) == []


class TestCancel:
    def test_before_there_was_room(self, worker: DecodeCore) -> None:
        worker.handle(said("pool-0", Batch((entry(A, (5,)), entry(B, (6,)), entry(C, (7,))))), 0.0)
        assert worker.handle(said(ROUTER, Cancel("c", 0)), 0.0) == [Send("pool-0", Release("c", 0))]

    def test_while_it_is_copied(self, worker: DecodeCore) -> None:
        worker.handle(said("pool-0", Batch((entry(A, (5,)),))), 0.0)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [Send("pool-0", Release("a", 0)), asks(8, 2)]
        assert worker.handle(CopiedIn("a", intact=True), 0.0) == []
        assert worker.held == NOTHING_HELD

    def test_while_its_step_runs_its_pairs_wait_for_the_end_of_the_step(self, worker: DecodeCore) -> None:
        joins(worker)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [Send("pool-0", Release("a", 0)), asks(6, 2)]
        assert stepped(worker, 1, ("a", 9)) == [asks(8, 2)]
        assert worker.held == NOTHING_HELD

    def test_of_a_waiting_prompt(self) -> None:
        worker = DecodeCore(LIMITS)
        for one in (A, B, C):
            worker.handle(said(ROUTER, Prefill(one)), 0.0)
        worker.handle(said(ROUTER, Cancel("c", 0)), 0.0)
        assert worker.held["requests"] == 2

    def test_a_token_of_the_attempt_before_is_not_the_next_ones(self) -> None:
        """The next attempt may be seated while the last step of the one before still runs."""
        worker = DecodeCore(LIMITS)
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
        chunk = Chunk("a", (1, 2, 3), 0, (2, 3), Sampling())
        assert stepped(worker, 1, ("a", 7)) == [RunStep(StepPlan(2, chunks=(chunk,)))]
        assert tokens(0, 8, attempt=1) in stepped(worker, 2, ("a", 8))


def test_with_the_pool_go_the_entries_that_were_not_copied_yet(worker: DecodeCore) -> None:
    worker.handle(said("pool-0", Batch((entry(A, (5,)), entry(B, (6,)), entry(C, (7,))))), 0.0)
    worker.handle(CopiedIn("a", intact=True), 0.0)
    lost = Send(ROUTER, Progress(lost=(("c", 0),), free_pairs=4))
    assert worker.handle(MemberLost(POOL_MEMBER), 0.0) == [lost]
    assert stepped(worker, 1, ("a", 0))[0] == tokens(1, 0, FinishReason.STOP)


def test_a_new_pool_is_asked_anew(worker: DecodeCore) -> None:
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(8, 2)]


def test_a_new_router_hears_what_is_held(worker: DecodeCore) -> None:
    joins(worker)
    worker.handle(said("pool-0", Batch((entry(B, (6,)), entry(C, (7,))))), 0.0)
    holding = Holding((("a", 0), ("b", 0), ("c", 0)), free_pairs=4)
    assert worker.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]


def test_nothing_is_kept_for_a_lost_owner(worker: DecodeCore) -> None:
    joins(worker)
    stepped(worker, 1, ("a", 0))
    worker.handle(MemberLost(GATEWAY_MEMBER), 0.0)
    assert worker.held == NOTHING_HELD
