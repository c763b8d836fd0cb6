"""The prefill worker: prompts in chunks, first tokens, and pages that never stay behind."""

from __future__ import annotations

import pytest

from alignedserve.core import Chunk, Entry, FinishReason, Sampling, StepPlan, StepResult
from alignedserve.messages import (
    ROUTER,
    Acknowledge,
    AskPages,
    Cancel,
    Command,
    Commit,
    CopiedOut,
    CopyOut,
    Holding,
    LeasePages,
    MemberJoined,
    MemberLost,
    Output,
    Prefill,
    Progress,
    Resend,
    ReturnPages,
    RunStep,
    Send,
    StepDone,
    Tokens,
)
from alignedserve.prefill_worker.state import PrefillCore
from tests.samples import GATEWAY_MEMBER, LIMITS, POOL_MEMBER, ROUTER_MEMBER, next_attempt, request, said

A, B = request("a"), request("b", prompt=6)
NOTHING_HELD = {"requests": 0, "pairs": 0, "outputs": 0}


@pytest.fixture
def worker() -> PrefillCore:
    core = PrefillCore(LIMITS)
    assert core.handle(MemberJoined(POOL_MEMBER), 0.0) == []
    return core


def step(number: int, *chunks: Chunk) -> Command:
    return RunStep(StepPlan(number, chunks=chunks))


def stepped(worker: PrefillCore, number: int, *tokens: tuple[str, int]) -> list[Command]:
    return worker.handle(StepDone(StepResult(number, tokens)), 0.0)


def token(name: str, value: int, finish: FinishReason | None = None) -> Command:
    return Send("gateway-0", Tokens((Output(name, 0, 0, (value,), finish),)))


def test_a_prompt_runs_is_copied_and_committed(worker: PrefillCore) -> None:
    assert worker.handle(said(ROUTER, Prefill(A)), 0.0) == [step(1, Chunk("a", (1, 2, 3), 0, (0,), Sampling()))]
    assert stepped(worker, 1, ("a", 7)) == [token("a", 7), Send("pool-0", AskPages(1))]
    assert worker.handle(said("pool-0", LeasePages((5,))), 0.0) == [CopyOut("a", (0,), (5,), (1, 2, 3))]
    assert worker.handle(CopiedOut("a"), 0.0) == [Send("pool-0", Commit(Entry(A, (7,), (5,))))]
    assert worker.held == NOTHING_HELD


def test_prompts_run_in_their_order_and_only_the_last_is_cut(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(request("z", prompt=1))), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    first_b = Chunk("b", (1, 2, 3, 4, 5, 6), 0, (1, 2), Sampling())
    assert step(2, first_b, Chunk("a", (1, 2), 0, (3,), None)) in stepped(worker, 1, ("z", 7))
    assert step(3, Chunk("a", (3,), 2, (3,), Sampling())) in stepped(worker, 2, ("b", 7))


def test_a_next_attempt_runs_what_was_emitted_and_goes_on_after_it(worker: PrefillCore) -> None:
    again = next_attempt(A, (7, 8))
    chunk = Chunk("a", (1, 2, 3, 7, 8), 0, (0, 1), Sampling(), index=2)
    assert worker.handle(said(ROUTER, Prefill(again)), 0.0) == [step(1, chunk)]


def test_one_token_may_be_enough(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    assert stepped(worker, 1, ("a", 0)) == [
        token("a", 0, FinishReason.STOP),
        Send(ROUTER, Progress(ended=(("a", 0),), free_pairs=8)),
    ]
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [token("a", 0, FinishReason.STOP)]
    assert worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0) == []
    assert worker.held == NOTHING_HELD


def test_pages_are_asked_for_one_request_at_a_time(worker: PrefillCore) -> None:
    """What all of them want together may be more than the pool will ever have free."""
    worker.handle(said(ROUTER, Prefill(request("z", prompt=2))), 0.0)
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(request("c", prompt=5))), 0.0)
    assert Send("pool-0", AskPages(1)) in stepped(worker, 1, ("z", 7))
    assert not any(isinstance(one, Send) and isinstance(one.message, AskPages) for one in stepped(worker, 2, ("a", 7)))
    assert worker.handle(said("pool-0", LeasePages((5,))), 0.0)[:2] == [
        CopyOut("z", (0,), (5,), (1, 2)),
        Send("pool-0", AskPages(1)),
    ]


def test_pages_that_came_too_late_go_back(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    stepped(worker, 1, ("a", 7))
    assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
    assert worker.handle(said("pool-0", LeasePages((5,))), 0.0) == [Send("pool-0", ReturnPages((5,)))]
    assert worker.held == NOTHING_HELD


def test_too_few_pages_go_back_before_more_are_asked_for(worker: PrefillCore) -> None:
    """Two workers that each kept a few and waited for more would wait for ever."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(request("long", prompt=9))), 0.0)
    stepped(worker, 1, ("a", 7))
    stepped(worker, 2)
    stepped(worker, 3, ("long", 7))
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    assert worker.handle(said("pool-0", LeasePages((5,))), 0.0) == [
        Send("pool-0", ReturnPages((5,))),
        Send("pool-0", AskPages(2)),
    ]


class TestCancel:
    def test_while_it_waits(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        worker.handle(said(ROUTER, Prefill(B)), 0.0)
        worker.handle(said(ROUTER, Cancel("b", 0)), 0.0)
        assert stepped(worker, 1, ("a", 0))[-1] == Send(ROUTER, Progress(ended=(("a", 0),), free_pairs=8))

    def test_while_its_step_runs_its_pairs_wait_for_the_end_of_the_step(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        assert worker.held["pairs"] == 1
        assert stepped(worker, 1, ("a", 7)) == []
        assert worker.held == NOTHING_HELD

    def test_while_it_is_copied_its_pages_wait_for_the_end_of_the_copy(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        stepped(worker, 1, ("a", 7))
        worker.handle(said("pool-0", LeasePages((5,))), 0.0)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        assert (worker.held["pairs"], worker.num_leased_pages) == (1, 1)
        assert worker.handle(CopiedOut("a"), 0.0) == [Send("pool-0", ReturnPages((5,)))]
        assert (worker.held, worker.num_leased_pages) == (NOTHING_HELD, 0)

    def test_of_an_older_attempt_does_not_touch_the_next(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert worker.held["requests"] == 1


def test_a_lost_pool_takes_its_pages_along_and_the_next_gets_the_copies(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    stepped(worker, 1, ("a", 7))
    worker.handle(said("pool-0", LeasePages((5,))), 0.0)
    assert worker.handle(MemberLost(POOL_MEMBER), 0.0) == []
    assert worker.num_leased_pages == 0
    assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == [Send("pool-0", AskPages(1))]


def test_a_new_router_hears_what_is_held(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    holding = Holding((("a", 0), ("b", 0)), free_pairs=7)
    assert worker.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]


def test_nothing_is_kept_for_a_lost_owner(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    stepped(worker, 1, ("a", 0))
    assert worker.held["outputs"] == 1
    worker.handle(MemberLost(GATEWAY_MEMBER), 0.0)
    assert worker.held == NOTHING_HELD
