"""What both workers do alike: their word to owners and router, said again wherever a frame of it was lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import FinishReason, StepResult
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.messages import (
    ROUTER,
    Acknowledge,
    Cancel,
    Command,
    Holding,
    Inquire,
    LinkGap,
    MemberJoined,
    Missed,
    Output,
    Prefill,
    Progress,
    Resend,
    RunStep,
    Send,
    SetTimer,
    StepDone,
    TimerFired,
    Tokens,
)
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.worker import REFRESH_S, WorkerCore
from tests.samples import LIMITS, ROUTER_MEMBER, next_attempt, request, said

A, B = request("a"), request("b", owner="gateway-1")
REFRESH = TimerFired("refresh")
REFRESHES = SetTimer("refresh", REFRESH_S)


@pytest.fixture(params=[PrefillCore, DecodeCore])
def worker(request: pytest.FixtureRequest) -> WorkerCore:
    """Without a pool, so that the decode worker is colocated."""
    core: WorkerCore = request.param(LIMITS)
    assert core.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, Holding((), free_pairs=8))]
    return core


def last_token(name: str = "a", attempt: int = 0, owner: str = "gateway-0") -> Command:
    return Send(owner, Tokens((Output(name, attempt, 0, (0,), FinishReason.STOP),)))


def run_both(worker: WorkerCore) -> list[Command]:
    """Prompts of two owners, whose first token is the last."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    return worker.handle(StepDone(StepResult(2, (("b", 0),))), 0.0)


def test_a_last_token_is_said_again_until_it_is_acknowledged(worker: WorkerCore) -> None:
    """No later frame would tell that it was lost."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    ended = Send(ROUTER, Progress(ended=(("a", 0),), free_pairs=8))
    assert worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0) == [last_token(), REFRESHES, ended]
    for now in (5.0, 10.0):
        assert worker.handle(REFRESH, now) == [last_token(), SetTimer("refresh", now + REFRESH_S)]
    assert worker.handle(said("gateway-0", Acknowledge(("a",))), 11.0) == []
    assert worker.handle(REFRESH, 15.0) == []


def test_there_is_one_refresh_at_a_time(worker: WorkerCore) -> None:
    """A timer that each event set anew would never fire."""
    assert REFRESHES not in run_both(worker)
    assert worker.handle(REFRESH, 5.0) == [
        last_token(),
        last_token("b", owner="gateway-1"),
        SetTimer("refresh", 5.0 + REFRESH_S),
    ]


def test_after_lost_frames_an_owner_hears_again_what_has_ended(worker: WorkerCore) -> None:
    run_both(worker)
    again = last_token("b", owner="gateway-1")
    assert worker.handle(said("gateway-1", Missed()), 0.0) == [again]
    assert worker.handle(LinkGap("gateway-1"), 0.0) == [Send("gateway-1", Missed()), again]
    worker.handle(said("gateway-1", Acknowledge(("b",))), 0.0)
    assert worker.handle(said("gateway-1", Missed()), 0.0) == []


def test_after_lost_frames_the_router_hears_again_what_is_held(worker: WorkerCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    holding = Send(ROUTER, Holding((("a", 0),), free_pairs=7 if isinstance(worker, PrefillCore) else 6))
    assert worker.handle(said(ROUTER, Missed()), 0.0) == [holding]
    assert worker.handle(LinkGap(ROUTER), 0.0) == [Send(ROUTER, Missed()), holding]


def test_the_router_inquires_after_what_is_not_here(worker: WorkerCore) -> None:
    worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    assert worker.handle(said(ROUTER, Inquire((("a", 1), ("b", 0)))), 0.0) == []
    asked = Inquire((("a", 0), ("a", 1), ("a", 2), ("never", 0)))
    [answer] = worker.handle(said(ROUTER, asked), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Progress)
    assert replace(answer.message, free_pairs=0) == Progress(unknown=(("a", 0), ("a", 2), ("never", 0)))


def test_what_has_ended_is_not_here_any_more(worker: WorkerCore) -> None:
    """It is kept for its owner only: where the router did not hear of the end, it must hear that."""
    run_both(worker)
    unknown = Progress(unknown=(("a", 0),), free_pairs=8)
    assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == [Send(ROUTER, unknown)]


def test_a_cancel_of_an_older_attempt_leaves_the_output_of_the_next(worker: WorkerCore) -> None:
    worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    worker.handle(said("gateway-0", Cancel("a", 0)), 0.0)
    assert worker.handle(said("gateway-0", Resend("a", 1, 0)), 0.0) == [last_token(attempt=1)]


def test_who_waited_is_seated_as_soon_as_there_is_room_again(worker: WorkerCore) -> None:
    """Also where as many pairs are free, and as many wait, as when the one before was seated."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    after = worker.handle(StepDone(StepResult(1, (("a", 0),))), 0.0)
    assert any(isinstance(command, RunStep) for command in after)
