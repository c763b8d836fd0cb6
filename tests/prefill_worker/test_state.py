"""The prefill worker: prompts in chunks, first tokens, and pages that never stay behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import (
    Chunk,
    Due,
    Entry,
    FinishReason,
    KvForm,
    Logprob,
    Opening,
    Request,
    Sampling,
    ServiceClass,
    StepPlan,
    StepResult,
)
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, LinkGap, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    Cancel,
    Commit,
    GiveBack,
    Holding,
    Inquire,
    Missed,
    Output,
    Prefill,
    Progress,
    Resend,
    Tokens,
)
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.prefill_worker.asks import asks, firm, leased, spare
from tests.samples import GATEWAY_MEMBER, LIMITS, POOL_MEMBER, ROUTER_MEMBER, member, next_attempt, request, said

A, B = request("a"), request("b", prompt=6)
DUE = Due(at=A.slo.tbt_s)  # the due time after a token at 0.0
NOTHING_HELD = {"requests": 0, "blocks": 0, "pages": 0, "outputs": 0, "buffers": 0}


@pytest.fixture
def worker() -> PrefillCore:
    """Return a worker that asks for no cached beginnings; test_prefixes.py tests workers that do."""
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False)))
    assert core.handle(MemberJoined(POOL_MEMBER), 0.0) == []
    return core


def comes(worker: PrefillCore, *prompts: Request) -> list[Command]:
    return [command for prompt in prompts for command in worker.handle(said(ROUTER, Prefill(prompt)), 0.0)]


def step(number: int, *chunks: Chunk) -> Command:
    return RunStep(StepPlan(number, chunks=chunks))


def stepped(worker: PrefillCore, number: int, *names: str, token: int = 7) -> list[Command]:
    """End a step in which these prompts have got their first token."""
    return worker.handle(StepDone(StepResult(number, tuple((name, token) for name in names))), 0.0)


def gets(worker: PrefillCore, number: int, *pages: int) -> list[Command]:
    return worker.handle(said("pool-0", leased(pages, number)), 0.0)


def cancelled(worker: PrefillCore, name: str) -> list[Command]:
    return worker.handle(said(ROUTER, Cancel(name, 0)), 0.0)


def copies(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, CopyOut)]


def token(name: str, value: int, finish: FinishReason | None = None) -> Command:
    return Send("gateway-0", Tokens((Output(name, 0, 0, (value,), finish),)))


def copy_out(number: int, page: int, pool: str = "pool-0.1", blocks: tuple[int, ...] = (0,)) -> Command:
    return CopyOut(number, pool, blocks, (page,), (1, 2, 3))


def commits(page: int, attempt: int = 0) -> Command:
    return Send("pool-0", Commit(Entry(replace(A, attempt=attempt), (7,), (page,), DUE)))


def prefilled(worker: PrefillCore) -> None:
    """Run the prompt A, for whose page the worker waits then."""
    comes(worker, A)
    assert asks(stepped(worker, 1, "a")) == [firm(1, 2)]


def test_a_prompt_runs_is_copied_and_committed(worker: PrefillCore) -> None:
    """Pages that were asked for only at its end would come during the next step, and the KV would wait for its end."""
    begun = comes(worker, A)
    assert begun[0] == step(1, Chunk("a", (1, 2, 3), 0, KvForm((0,)), Sampling()))
    assert asks(begun) == [spare(1, 1)]
    gets(worker, 1, 5)
    comes(worker, B)
    assert stepped(worker, 1, "a")[:2] == [token("a", 7), copy_out(1, page=5)], "and then comes the step of b"
    assert commits(5) in worker.handle(CopiedOut(1), 0.0)
    cancelled(worker, "b")
    stepped(worker, 2)
    assert worker.held == NOTHING_HELD


def test_log_probabilities_go_on_with_the_entry(worker: PrefillCore) -> None:
    """The decode worker may have to send the log-probabilities again."""
    mine, of_prompt = Logprob(-0.5), (Logprob(-1.0), Logprob(-2.0))
    scored = replace(A, sampling=Sampling(logprobs=0, prompt_logprobs=0))
    comes(worker, scored)
    gets(worker, 1, 5)
    result = StepResult(1, (("a", 7),), logprobs=(("a", mine),), prompt_logprobs=(("a", of_prompt),))
    worker.handle(StepDone(result), 0.0)
    committed = Commit(Entry(scored, (7,), (5,), DUE, (mine,), Opening(of_prompt)))
    assert Send("pool-0", committed) in worker.handle(CopiedOut(1), 0.0)


def test_prompts_run_in_their_order_and_only_the_last_is_cut(worker: PrefillCore) -> None:
    comes(worker, request("z", prompt=1), B, replace(A, arrival_at=0.1))
    first_b = Chunk("b", (1, 2, 3, 4, 5, 6), 0, KvForm((1, 2)), Sampling())
    assert step(2, first_b, Chunk("a", (1, 2), 0, KvForm((3,)), None)) in stepped(worker, 1, "z")
    assert step(3, Chunk("a", (3,), 2, KvForm((3,)), Sampling())) in stepped(worker, 2, "b")


def test_a_next_attempt_runs_what_was_emitted_and_goes_on_after_it(worker: PrefillCore) -> None:
    again = next_attempt(A, (7, 8))
    assert step(1, Chunk("a", (1, 2, 3, 7, 8), 0, KvForm((0, 1)), Sampling(), index=2)) in comes(worker, again)


def test_one_token_may_be_enough(worker: PrefillCore) -> None:
    comes(worker, A)
    commands = stepped(worker, 1, "a", token=0)
    assert token("a", 0, FinishReason.STOP) in commands
    assert Send(ROUTER, Progress(ended=(("a", 0),), lengths=(1,), free_blocks=8)) in commands
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.0) == [token("a", 0, FinishReason.STOP)]
    worker.handle(said("gateway-0", Acknowledge(("a",))), 0.0)
    assert worker.held == NOTHING_HELD


class TestTooFewPages:
    def test_they_are_waited_for_one_request_at_a_time(self, worker: PrefillCore) -> None:
        """The requests together may want more than the pool will ever have free."""
        comes(worker, request("z", prompt=2), A, request("c", prompt=5))
        assert asks(stepped(worker, 1, "z")) == [firm(1, 2)]
        assert not asks(stepped(worker, 2, "a", "c"))
        commands = gets(worker, 2, 5)
        assert copies(commands) == [CopyOut(1, "pool-0.1", (0,), (5,), (1, 2))]
        assert asks(commands) == [firm(1, 3, kept=(5,))], "what is being written is kept"
        assert copies(gets(worker, 3, 6)) == [copy_out(2, page=6, blocks=(1,))]

    def test_chats_leave_before_documents(self, worker: PrefillCore) -> None:
        """A larger ask takes the place of the ask before, whose answer may be on its way."""
        comes(worker, replace(A, service=ServiceClass.BE))
        stepped(worker, 1, "a")
        comes(worker, request("chat", prompt=9))
        stepped(worker, 2)
        assert asks(stepped(worker, 3, "chat")) == [firm(2, 3)]
        assert gets(worker, 2, 5) == []
        assert [len(copy.pages) for copy in copies(gets(worker, 3, 5, 6)) if isinstance(copy, CopyOut)] == [2]

    def test_pages_that_came_too_late_can_be_had_back(self, worker: PrefillCore) -> None:
        prefilled(worker)
        (ask,) = asks(cancelled(worker, "a"))
        assert ask.is_spare
        assert gets(worker, 2, 5) == [], "the pool has it back by now"
        gets(worker, ask.number, 5)
        assert asks(worker.handle(said("pool-0", GiveBack()), 0.0))[0] == spare(0, 4)
        assert (worker.held, worker.leased_pages) == (NOTHING_HELD, ())

    def test_others_get_pages_at_hand_while_these_are_waited_for(self, worker: PrefillCore) -> None:
        """Two workers that each kept a few pages and waited for more would wait for ever."""
        comes(worker, request("long", prompt=8), request("b", prompt=9))
        gets(worker, 1, 5)
        assert len(copies(stepped(worker, 1, "long"))) == 1
        worker.handle(CopiedOut(1), 0.0)
        gets(worker, 2, 6)
        stepped(worker, 2)
        assert asks(stepped(worker, 3, "b")) == [firm(2, 3)], "the page at hand went back"
        assert asks(worker.handle(said("pool-0", GiveBack()), 0.0)) == [firm(2, 4)], "and they are waited for still"


class TestLostFrames:
    """Frames from or to the pool are lost: an ask or a lease that did not arrive, a commit that was not heard."""

    def test_an_ask_without_an_answer_is_said_again(self, worker: PrefillCore) -> None:
        prefilled(worker)
        for now, number in ((5.0, 3), (10.0, 4)):
            assert asks(worker.handle(TimerFired("refresh"), now)) == [firm(1, number)]
        assert gets(worker, 3, 5) == [], "the pool has it back by now"
        assert copies(gets(worker, 4, 6)) == [copy_out(1, page=6)]

    def test_nobody_is_asked_again_when_the_pool_has_gone(self, worker: PrefillCore) -> None:
        prefilled(worker)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert not asks(worker.handle(TimerFired("refresh"), 5.0))

    def test_between_the_pool_and_us_have_us_ask_again(self, worker: PrefillCore) -> None:
        prefilled(worker)
        assert worker.handle(said("pool-0", Missed()), 0.0) == [Send("pool-0", firm(1, 3))]
        assert worker.handle(LinkGap("pool-0"), 0.0) == [Send("pool-0", Missed()), Send("pool-0", firm(1, 4))]

    def test_what_is_committed_is_not_here_any_more(self, worker: PrefillCore) -> None:
        """The pool may have died before it told the router, which inquires of the worker: the attempt is nowhere."""
        prefilled(worker)
        gets(worker, 2, 5)
        assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == []
        assert commits(5) in worker.handle(CopiedOut(1), 0.0)
        unknown = Send(ROUTER, Progress(unknown=(("a", 0),), free_blocks=8))
        assert worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == [unknown]

    def test_the_pages_of_a_commit_that_was_lost_go_back(self, worker: PrefillCore) -> None:
        """The pages are still leased to this worker, which may never ask again, while other workers wait for pages."""
        prefilled(worker)
        gets(worker, 2, 5)
        worker.handle(CopiedOut(1), 0.0)
        (ask,) = asks(worker.handle(TimerFired("refresh"), 5.0))
        assert (ask.kept, ask.is_spare) == ((), True)


class TestAbandonedCopies:
    """An abandoned copy may still be under way; its end is not taken for the end of the next copy."""

    def test_of_an_attempt_before(self, worker: PrefillCore) -> None:
        prefilled(worker)
        gets(worker, 2, 5)
        comes(worker, next_attempt(A))
        (ask,) = asks(stepped(worker, 2, "a"))
        assert ask == firm(1, ask.number, kept=(5,))
        assert copies(gets(worker, ask.number, 6)) == [copy_out(2, page=6)]
        worker.handle(CopiedOut(1), 0.0)
        assert commits(6, attempt=1) in worker.handle(CopiedOut(2), 0.0)
        assert worker.held == NOTHING_HELD
        worker.handle(said("pool-0", GiveBack()), 0.0)
        assert worker.leased_pages == ()

    def test_to_a_pool_that_has_gone(self, worker: PrefillCore) -> None:
        """The copy to the lost pool is worth nothing; the prompt runs again, and the next pool gets its own copy."""
        prefilled(worker)
        gets(worker, 2, 5)
        again = worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert any(isinstance(command, RunStep) for command in again)
        assert worker.leased_pages == ()
        (ask,) = asks(worker.handle(MemberJoined(member("pool-0", 2)), 0.0))
        assert gets(worker, 2, 5) == [], "the answer of the pool before"
        assert worker.handle(CopiedOut(1), 0.0) == []
        worker.handle(said("pool-0", leased((5,), ask.number), 2), 0.0)
        (copy,) = copies(stepped(worker, 2, "a"))
        assert isinstance(copy, CopyOut)
        assert (copy.pool, copy.pages) == ("pool-0.2", (5,))
        worker.handle(CopiedOut(2), 0.0)
        assert worker.held == NOTHING_HELD

    def test_to_a_pool_that_is_back_in_the_same_life(self, worker: PrefillCore) -> None:
        """A router announced all but the pool, which it had not heard. An ask would free the page for others."""
        prefilled(worker)
        gets(worker, 2, 5)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        assert not asks(worker.handle(MemberJoined(POOL_MEMBER), 0.0))
        assert not asks(worker.handle(TimerFired("refresh"), 5.0))
        (ask,) = asks(worker.handle(CopiedOut(1), 5.0))
        assert ask.kept == ()

    def test_that_was_cancelled_before_its_pool_went(self, worker: PrefillCore) -> None:
        """The page belongs to the dead pool: the next pool may have given the same number to another worker."""
        prefilled(worker)
        gets(worker, 2, 5)
        cancelled(worker, "a")
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        (ask,) = asks(worker.handle(MemberJoined(member("pool-0", 2)), 0.0))
        assert (ask.kept, worker.handle(CopiedOut(1), 0.0)) == ((), [])
        assert (worker.held, worker.leased_pages) == (NOTHING_HELD, ())

    def test_a_pool_that_is_back_hears_that_its_pages_are_not_wanted(self, worker: PrefillCore) -> None:
        """The lease was lost on the way, and the request has left: nothing else would ever give the page back."""
        prefilled(worker)
        cancelled(worker, "a")
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        (ask,) = asks(worker.handle(MemberJoined(POOL_MEMBER), 0.0))
        assert (ask.kept, ask.is_spare) == ((), True)


class TestCancel:
    def test_while_it_waits(self, worker: PrefillCore) -> None:
        comes(worker, A, B)
        cancelled(worker, "b")
        assert stepped(worker, 1, "a", token=0)[-1] == Send(
            ROUTER, Progress(ended=(("a", 0),), lengths=(1,), free_blocks=8)
        )

    def test_while_its_step_runs_its_blocks_wait_for_the_end_of_the_step(self, worker: PrefillCore) -> None:
        comes(worker, A)
        cancelled(worker, "a")
        assert worker.held == NOTHING_HELD | {"blocks": 1}
        stepped(worker, 1, "a")
        assert worker.held == NOTHING_HELD

    def test_while_it_is_copied_its_page_waits_for_the_end_of_the_copy(self, worker: PrefillCore) -> None:
        prefilled(worker)
        gets(worker, 2, 5)
        cancelled(worker, "a")
        assert asks(worker.handle(said("pool-0", GiveBack()), 0.0))[0].kept == worker.leased_pages == (5,)
        worker.handle(CopiedOut(1), 0.0)
        assert asks(worker.handle(said("pool-0", GiveBack()), 0.0))[0].kept == ()
        assert worker.held == NOTHING_HELD

    def test_of_an_older_attempt_does_not_touch_the_next(self, worker: PrefillCore) -> None:
        comes(worker, next_attempt(A))
        cancelled(worker, "a")
        assert worker.held["requests"] == 1


def test_a_new_router_hears_what_is_held(worker: PrefillCore) -> None:
    comes(worker, A, B)
    holding = Holding((("a", 0), ("b", 0)), free_blocks=7, waiting=(("b", 0),))
    assert worker.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]


def test_nothing_is_kept_for_a_lost_owner(worker: PrefillCore) -> None:
    comes(worker, A)
    stepped(worker, 1, "a", token=0)
    assert worker.held["outputs"] == 1
    worker.handle(MemberLost(GATEWAY_MEMBER), 0.0)
    assert worker.held == NOTHING_HELD
