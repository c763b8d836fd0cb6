"""The prefill worker: prompts in chunks, first tokens, and pages that never stay behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Chunk, Due, Entry, FinishReason, KvForm, Logprob, Opening, Sampling, StepPlan, StepResult
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send, SetTimer
from alignedserve.protocol.events import CopiedOut, LinkGap, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AskPages,
    Cancel,
    Commit,
    Holding,
    Inquire,
    LeasePages,
    Missed,
    Output,
    Prefill,
    Progress,
    Resend,
    Tokens,
)
from alignedserve.scheduling.policy import Chunking, Policy, SchedulerName
from alignedserve.worker.arriving import ANSWER_S
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from tests.samples import (
    GATEWAY_MEMBER,
    LIMITS,
    POOL_MEMBER,
    ROUTER_MEMBER,
    but_reports,
    member,
    next_attempt,
    request,
    said,
)

A, B = request("a"), request("b", prompt=6)
DUE = Due(at=A.slo.tbt_s)  # the due time after a token at 0.0
NOTHING_HELD = {"requests": 0, "blocks": 0, "pages": 0, "outputs": 0, "written parts": 0, "buffers": 0}
REFRESHES = SetTimer("refresh", REFRESH_S)


@pytest.fixture
def worker() -> PrefillCore:
    """Return a worker that asks for no cached beginnings; test_prefixes.py tests workers that do."""
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False)))
    assert core.handle(MemberJoined(POOL_MEMBER), 0.0) == []
    return core


def step(number: int, *chunks: Chunk) -> Command:
    return RunStep(StepPlan(number, chunks=chunks))


def stepped(worker: PrefillCore, number: int, *tokens: tuple[str, int]) -> list[Command]:
    """End a step. The pool is silent: what the next step waits for does not come in time."""
    commands = worker.handle(StepDone(StepResult(number, tokens)), 0.0)
    waits = any(isinstance(command, SetTimer) and command.name == "answer" for command in commands)
    return [*commands, *(worker.handle(TimerFired("answer"), ANSWER_S) if waits else ())]


def token(name: str, value: int, finish: FinishReason | None = None) -> Command:
    return Send("gateway-0", Tokens((Output(name, 0, 0, (value,), finish),)))


def asks(pages: int, number: int, *kept: int) -> Command:
    return Send("pool-0", AskPages(pages, number, kept))


def leased(worker: PrefillCore, number: int, *pages: int) -> list[Command]:
    return worker.handle(said("pool-0", LeasePages(pages, number)), 0.0)


def copy_out(number: int, page: int, pool: str = "pool-0.1", blocks: tuple[int, ...] = (0,)) -> Command:
    return CopyOut(number, pool, blocks, (page,), (1, 2, 3))


def commits(page: int, attempt: int = 0) -> Command:
    return Send("pool-0", Commit(Entry(replace(A, attempt=attempt), (7,), (page,), DUE)))


def prefilled(worker: PrefillCore) -> None:
    """Finish the prompt A, so that the worker asks for one page."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    assert asks(1, 1) in stepped(worker, 1, ("a", 7))


def test_a_prompt_runs_is_copied_and_committed(worker: PrefillCore) -> None:
    assert worker.handle(said(ROUTER, Prefill(A)), 0.0) == [step(1, Chunk("a", (1, 2, 3), 0, KvForm((0,)), Sampling()))]
    assert stepped(worker, 1, ("a", 7)) == [token("a", 7), asks(1, 1), REFRESHES]
    assert leased(worker, 1, 5) == [copy_out(1, page=5)]
    assert worker.handle(CopiedOut(1), 0.0) == [commits(5)]
    assert worker.held == NOTHING_HELD


def test_log_probabilities_go_on_with_the_entry(worker: PrefillCore) -> None:
    """The decode worker may have to send the log-probabilities again."""
    mine, of_prompt = Logprob(-0.5), (Logprob(-1.0), Logprob(-2.0))
    scored = replace(A, sampling=Sampling(logprobs=0, prompt_logprobs=0))
    worker.handle(said(ROUTER, Prefill(scored)), 0.0)
    result = StepResult(1, (("a", 7),), logprobs=(("a", mine),), prompt_logprobs=(("a", of_prompt),))
    worker.handle(StepDone(result), 0.0)
    leased(worker, 1, 5)
    committed = Commit(Entry(scored, (7,), (5,), DUE, (mine,), Opening(of_prompt)))
    assert worker.handle(CopiedOut(1), 0.0) == [Send("pool-0", committed)]


def test_prompts_run_in_their_order_and_only_the_last_is_cut(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(request("z", prompt=1))), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    worker.handle(said(ROUTER, Prefill(replace(A, arrival_at=0.1))), 0.0)
    first_b = Chunk("b", (1, 2, 3, 4, 5, 6), 0, KvForm((1, 2)), Sampling())
    assert step(2, first_b, Chunk("a", (1, 2), 0, KvForm((3,)), None)) in stepped(worker, 1, ("z", 7))
    assert step(3, Chunk("a", (3,), 2, KvForm((3,)), Sampling())) in stepped(worker, 2, ("b", 7))


def test_a_next_attempt_runs_what_was_emitted_and_goes_on_after_it(worker: PrefillCore) -> None:
    again = next_attempt(A, (7, 8))
    chunk = Chunk("a", (1, 2, 3, 7, 8), 0, KvForm((0, 1)), Sampling(), index=2)
    assert worker.handle(said(ROUTER, Prefill(again)), 0.0) == [step(1, chunk)]


def test_one_token_may_be_enough(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    assert stepped(worker, 1, ("a", 0)) == [
        token("a", 0, FinishReason.STOP),
        REFRESHES,
        Send(ROUTER, Progress(ended=(("a", 0),), lengths=(1,), free_blocks=8)),
    ]
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [token("a", 0, FinishReason.STOP)]
    assert worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0) == []
    assert worker.held == NOTHING_HELD


def test_pages_are_asked_for_one_request_at_a_time(worker: PrefillCore) -> None:
    """The requests together may want more than the pool will ever have free."""
    worker.handle(said(ROUTER, Prefill(request("z", prompt=2))), 0.0)
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(request("c", prompt=5))), 0.0)
    assert asks(1, 2) in stepped(worker, 1, ("z", 7))
    assert not any(
        isinstance(command, Send) and isinstance(command.message, AskPages) for command in stepped(worker, 2, ("a", 7))
    )
    assert leased(worker, 2, 5)[:2] == [CopyOut(1, "pool-0.1", (0,), (5,), (1, 2)), asks(1, 3, 5)]


def test_pages_that_came_too_late_go_back(worker: PrefillCore) -> None:
    prefilled(worker)
    assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
    assert leased(worker, 1, 5) == [asks(0, 2)]
    assert worker.held == NOTHING_HELD
    assert len(worker.leased_pages) == 0
    assert leased(worker, 2) == []


def test_an_ask_keeps_the_pages_of_copies_and_gives_back_all_others() -> None:
    """Two workers that each kept a few pages and waited for more would wait for ever."""
    worker = PrefillCore(WorkerSetup(LIMITS, Policy(SchedulerName.FCFS, Chunking.FIXED, reuse=False)))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    for prompt in (request("z", prompt=1), A, request("long", prompt=9)):
        worker.handle(said(ROUTER, Prefill(prompt)), 0.0)
    stepped(worker, 1, ("z", 7))
    stepped(worker, 2, ("a", 7))
    stepped(worker, 3, ("long", 7))
    assert leased(worker, 2, 5) == [CopyOut(1, "pool-0.1", (0,), (5,), (1,)), asks(1, 3, 5)]
    worker.handle(said(ROUTER, Cancel("z", 0)), 0.0)
    assert leased(worker, 3, 6) == [copy_out(2, page=6, blocks=(1,)), asks(2, 4, 5, 6)]
    assert worker.handle(CopiedOut(1), 0.0) == [], "its page is kept for now"
    assert len(worker.leased_pages) == 2
    assert worker.handle(said("pool-0", Missed()), 0.0) == [asks(2, 5, 6)]
    assert len(worker.leased_pages) == 1


def test_a_larger_ask_takes_the_place_of_the_ask_before(worker: PrefillCore) -> None:
    """The answer to the smaller ask comes after the pool has heard the larger ask, which gives those pages back."""
    prefilled(worker)
    worker.handle(said(ROUTER, Prefill(request("long", prompt=9))), ANSWER_S)
    stepped(worker, 2)
    stepped(worker, 3, ("long", 7))
    assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [asks(2, 2)]
    assert leased(worker, 1, 5) == []
    assert len(worker.leased_pages) == 0
    long = CopyOut(1, "pool-0.1", (1, 2, 3), (6, 5), tuple(range(1, 10)))
    assert leased(worker, 2, 5, 6) == [long]


def test_the_next_step_waits_a_moment_for_the_pages_of_a_chat_that_is_through(worker: PrefillCore) -> None:
    """Its KV would wait for the end of that step, and its second token would be late."""
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    prompt = request("b", prompt=1)
    worker.handle(said(ROUTER, Prefill(prompt)), 0.0)
    commands = worker.handle(StepDone(StepResult(1, (("a", 7),))), 0.0)
    assert not any(isinstance(command, RunStep) for command in commands)
    pages = next(command.message for command in reversed(commands) if isinstance(command, Send))
    assert isinstance(pages, AskPages)
    ordered = [type(command) for command in leased(worker, pages.number, 5)]
    assert ordered[:2] == [CopyOut, RunStep], "the copy comes first, and then the step"


class TestLostFrames:
    """Frames from or to the pool are lost: an ask or a lease that did not arrive, a commit that was not heard."""

    def test_an_ask_without_an_answer_is_said_again(self, worker: PrefillCore) -> None:
        prefilled(worker)
        for now, number in ((5.0, 2), (10.0, 3)):
            again = [asks(1, number), SetTimer("refresh", now + REFRESH_S)]
            assert but_reports(worker.handle(TimerFired("refresh"), now)) == again
        assert leased(worker, 2, 5) == [], "the pool has it back by now"
        assert leased(worker, 3, 6) == [copy_out(1, page=6)]

    def test_nobody_is_asked_again_when_the_pool_has_gone(self, worker: PrefillCore) -> None:
        prefilled(worker)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert but_reports(worker.handle(TimerFired("refresh"), 5.0)) == [SetTimer("refresh", 5.0 + REFRESH_S)]

    def test_between_the_pool_and_us_have_us_ask_again(self, worker: PrefillCore) -> None:
        prefilled(worker)
        assert worker.handle(said("pool-0", Missed()), 0.0) == [asks(1, 2)]
        assert worker.handle(LinkGap("pool-0"), 0.0) == [Send("pool-0", Missed()), asks(1, 3)]

    def test_what_is_committed_is_not_here_any_more(self, worker: PrefillCore) -> None:
        """The pool may have died before it told the router, which inquires of the worker: the attempt is nowhere."""
        prefilled(worker)
        leased(worker, 1, 5)
        assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == []
        assert worker.handle(CopiedOut(1), 0.0) == [commits(5)]
        unknown = Send(ROUTER, Progress(unknown=(("a", 0),), free_blocks=8))
        assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == [unknown]

    def test_the_pages_of_a_commit_that_was_lost_go_back(self, worker: PrefillCore) -> None:
        """The pages are still leased to this worker, which may never ask again, while other workers wait for pages."""
        prefilled(worker)
        leased(worker, 1, 5)
        worker.handle(CopiedOut(1), 0.0)
        assert asks(0, 2) in worker.handle(TimerFired("refresh"), 5.0)


class TestAbandonedCopies:
    """An abandoned copy may still be under way; its end is not taken for the end of the next copy."""

    def test_of_an_attempt_before(self, worker: PrefillCore) -> None:
        prefilled(worker)
        leased(worker, 1, 5)
        worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
        stepped(worker, 2, ("a", 7))
        assert leased(worker, 2, 6) == [copy_out(2, page=6, blocks=(1,))]
        assert worker.handle(CopiedOut(1), 0.0) == [asks(0, 3, 6)], "its page goes back"
        assert worker.handle(CopiedOut(2), 0.0) == [commits(6, attempt=1)]
        assert worker.held == NOTHING_HELD

    def test_to_a_pool_that_has_gone(self, worker: PrefillCore) -> None:
        """The copy to the lost pool is worth nothing; the next pool gets a copy of its own."""
        prefilled(worker)
        leased(worker, 1, 5)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert worker.handle(MemberJoined(member("pool-0", 2)), 0.0) == [asks(1, 2)]
        assert leased(worker, 2, 5) == [copy_out(2, page=5, pool="pool-0.2")]
        assert worker.handle(CopiedOut(1), 0.0) == []
        assert worker.handle(CopiedOut(2), 0.0) == [commits(5)]
        assert worker.held == NOTHING_HELD

    def test_to_a_pool_that_is_back_in_the_same_life(self, worker: PrefillCore) -> None:
        """A router announced all but the pool, which it had not heard. An ask would free the page for others."""
        prefilled(worker)
        leased(worker, 1, 5)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == []
        assert but_reports(worker.handle(TimerFired("refresh"), 5.0)) == [SetTimer("refresh", 5.0 + REFRESH_S)]
        assert worker.handle(CopiedOut(1), 5.0)[0] == asks(1, 2)
        assert leased(worker, 2, 6)[0] == copy_out(2, page=6)

    def test_that_was_cancelled_before_its_pool_went(self, worker: PrefillCore) -> None:
        """The page belongs to the dead pool: the next pool may have given the same number to another worker."""
        prefilled(worker)
        leased(worker, 1, 5)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert worker.handle(MemberJoined(member("pool-0", 2)), 0.0) == [asks(0, 2)]
        assert worker.handle(CopiedOut(1), 0.0) == []
        assert (worker.held, len(worker.leased_pages)) == (NOTHING_HELD, 0)

    def test_a_pool_that_is_back_hears_that_its_pages_are_not_wanted(self, worker: PrefillCore) -> None:
        """The lease was lost on the way, and the request has left: nothing else would ever give the page back."""
        prefilled(worker)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(0, 2)]


class TestCancel:
    def test_while_it_waits(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        worker.handle(said(ROUTER, Prefill(B)), 0.0)
        worker.handle(said(ROUTER, Cancel("b", 0)), 0.0)
        assert stepped(worker, 1, ("a", 0))[-1] == Send(
            ROUTER, Progress(ended=(("a", 0),), lengths=(1,), free_blocks=8)
        )

    def test_while_its_step_runs_its_blocks_wait_for_the_end_of_the_step(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(A)), 0.0)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        assert worker.held["blocks"] == 1
        assert stepped(worker, 1, ("a", 7)) == []
        assert worker.held == NOTHING_HELD

    def test_while_it_is_copied_its_pages_wait_for_the_end_of_the_copy(self, worker: PrefillCore) -> None:
        prefilled(worker)
        leased(worker, 1, 5)
        assert worker.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        assert (worker.held, len(worker.leased_pages)) == (NOTHING_HELD | {"blocks": 1}, 1)
        assert worker.handle(CopiedOut(1), 0.0) == [asks(0, 2)]
        assert (worker.held, len(worker.leased_pages)) == (NOTHING_HELD, 0)

    def test_of_an_older_attempt_does_not_touch_the_next(self, worker: PrefillCore) -> None:
        worker.handle(said(ROUTER, Prefill(next_attempt(A))), 0.0)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert worker.held["requests"] == 1


def test_a_lost_pool_takes_its_pages_along_and_the_next_is_asked_anew(worker: PrefillCore) -> None:
    prefilled(worker)
    leased(worker, 1, 5)
    assert worker.handle(MemberLost(POOL_MEMBER), 0.0) == []
    assert len(worker.leased_pages) == 0
    assert worker.handle(CopiedOut(1), 0.0) == []
    assert worker.handle(MemberJoined(POOL_MEMBER), 0.0) == [asks(1, 2)]
    assert leased(worker, 1, 5) == [], "the answer of the pool before"


def test_a_new_router_hears_what_is_held(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    worker.handle(said(ROUTER, Prefill(B)), 0.0)
    holding = Holding((("a", 0), ("b", 0)), free_blocks=7)
    assert worker.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]


def test_nothing_is_kept_for_a_lost_owner(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(A)), 0.0)
    stepped(worker, 1, ("a", 0))
    assert worker.held["outputs"] == 1
    worker.handle(MemberLost(GATEWAY_MEMBER), 0.0)
    assert worker.held == NOTHING_HELD
