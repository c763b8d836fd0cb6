"""A finished prompt goes to the pool; where no pool is of use it is offered to the decode worker that was named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Entry, ServiceClass, StepResult
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send, SendKv
from alignedserve.protocol.events import CopiedOut, KvSent, LinkGap, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    AskPages,
    Cancel,
    Commit,
    Decline,
    Figures,
    LeasePages,
    Member,
    Message,
    Offer,
    Prefill,
    Prefix,
    Progress,
    Pull,
)
from alignedserve.scheduling.policy import Chunking, Handoff, Policy, Room, SchedulerName
from alignedserve.worker.arriving import ANSWER_S
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said

A = request("a")
DECODE = replace(member("decode-0"), transport="there")
ELSEWHERE = replace(member("decode-1"), node="elsewhere", transport="there")
BE = ServiceClass.BE
IN_A: Entry = entry(A, ())


def beside(policy: Policy) -> PrefillCore:
    core = PrefillCore(WorkerSetup(LIMITS, policy, direct=True))
    for neighbour in (POOL_MEMBER, ROUTER_MEMBER, DECODE):
        core.handle(MemberJoined(neighbour), 0.0)
    return core


@pytest.fixture
def worker() -> PrefillCore:
    """Return a worker whose KV stays on its device until it is pulled."""
    return beside(Policy(handoff=Handoff.DEVICE, reuse=False))


@pytest.fixture
def by_pool() -> PrefillCore:
    return beside(Policy(reuse=False))


def sent(commands: Sequence[Command], to: str = "") -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to.startswith(to)]


def through(worker: PrefillCore, decode: str = "decode-0") -> list[Command]:
    worker.handle(said(ROUTER, Prefill(A, decode)), 0.0)
    return worker.handle(StepDone(StepResult(1, (("a", 7),))), 0.0)


def pulled(worker: PrefillCore, number: int = 1, incarnation: int = 1) -> list[Command]:
    return worker.handle(said("decode-0", Pull(number, "a", 0), incarnation), 0.0)


def leased(worker: PrefillCore, number: int, *pages: int) -> list[Command]:
    return worker.handle(said("pool-0", LeasePages(pages, number)), 0.0)


def is_empty(worker: PrefillCore) -> bool:
    return not any(worker.held.values()) or worker.held == {**dict.fromkeys(worker.held, 0), "outputs": 1}


def test_it_is_offered_at_once_pulled_and_gone(worker: PrefillCore) -> None:
    assert Offer(IN_A, has_pool=False) in sent(through(worker), "decode-0")
    assert pulled(worker) == [SendKv(1, "decode-0.1", (0,), (1, 2, 3))]
    assert worker.held["blocks"] == 1, "until it is sent"
    worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
    assert is_empty(worker)
    assert worker.held["outputs"] == 0, "its decode worker has the output"


@pytest.mark.parametrize("decode", ["", "decode-0", "decode-1"])
def test_where_workers_of_the_node_decode_it_goes_to_the_pool_for_that_worker(
    by_pool: PrefillCore, decode: str
) -> None:
    assert AskPages(1, 1) in sent(through(by_pool, decode), "pool-0")
    (copy,) = leased(by_pool, 1, 5)
    assert isinstance(copy, CopyOut)
    assert sent(by_pool.handle(CopiedOut(copy.number), 0.0)) == [Commit(replace(IN_A, pages=(5,)), to=decode)]


def test_without_a_link_nothing_is_offered() -> None:
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False)))
    for neighbour in (POOL_MEMBER, DECODE):
        core.handle(MemberJoined(neighbour), 0.0)
    assert not sent(through(core), "decode-0")


def test_a_chat_has_its_pages_when_it_is_through(by_pool: PrefillCore) -> None:
    """Pages that were asked for only now would come during the next step, and the KV would wait for its end."""
    by_pool.handle(said(ROUTER, Prefill(A)), 0.0)
    asked = by_pool.handle(said(ROUTER, Prefill(request("b"))), 0.0)
    assert AskPages(0, 1, most=1) in sent(asked, "pool-0")
    leased(by_pool, 1, 5)
    commands = by_pool.handle(StepDone(StepResult(1, (("a", 7),)), seconds=A.slo.tbt_s), 0.0)
    assert [type(command) for command in commands if isinstance(command, CopyOut | RunStep)] == [CopyOut, RunStep]


def test_where_no_decode_worker_of_the_node_is_left_prompts_are_offered_elsewhere(by_pool: PrefillCore) -> None:
    """The pool is there, but no worker would ever fetch a request from it."""
    by_pool.handle(MemberLost(DECODE), 0.0)
    by_pool.handle(MemberJoined(ELSEWHERE), 0.0)
    assert Offer(IN_A, has_pool=False) in sent(through(by_pool, "decode-1"), "decode-1")
    again = by_pool.handle(said("decode-1", Decline("a", 0, is_failed=True)), 0.0)
    assert sent(again) == [Offer(IN_A, has_pool=False)]
    by_pool.handle(MemberJoined(replace(DECODE, incarnation=2)), 0.0)
    assert sent(by_pool.handle(said("decode-1", Decline("a", 0)), 0.0), "pool-0"), "it asks for pages"


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ([], MemberJoined(DECODE)),
        ([ELSEWHERE, POOL_MEMBER, DECODE], MemberLost(DECODE)),
        ([ELSEWHERE, POOL_MEMBER, DECODE], MemberLost(POOL_MEMBER)),
    ],
)
def test_a_document_that_waits_for_pages_runs_when_it_needs_none_any_more(
    before: list[Member], then: MemberJoined | MemberLost
) -> None:
    as_they_come = Policy(SchedulerName.FCFS, Chunking.NONE, reuse=False)
    core = PrefillCore(WorkerSetup(LIMITS, as_they_come, direct=True))
    for neighbour in before:
        core.handle(MemberJoined(neighbour), 0.0)
    waiting = core.handle(said(ROUTER, Prefill(replace(A, service=BE), "decode-0")), 0.0)
    assert not [command for command in waiting if isinstance(command, RunStep)]
    assert [command for command in core.handle(then, 0.0) if isinstance(command, RunStep)]


class TestFailures:
    def test_a_transfer_that_failed_is_counted_and_its_kv_stays_until_it_is_declined(self, worker: PrefillCore) -> None:
        through(worker)
        pulled(worker)
        commands = worker.handle(KvSent(1, "decode-0.1", ok=False), 2.0)
        told = [message for message in sent(commands, ROUTER) if isinstance(message, Figures)]
        assert [figures.num_failed_transfers for figures in told] == [1]
        commands = worker.handle(said("decode-0", Decline("a", 0, is_failed=True)), 0.0)
        assert sent(commands, "decode-0") == [Offer(IN_A, has_pool=False)]

    def test_declined_before_it_is_over_its_blocks_wait(self, worker: PrefillCore) -> None:
        through(worker)
        pulled(worker)
        worker.handle(said("decode-0", Decline("a", 0, is_failed=True)), 0.0)
        assert worker.held["blocks"] == 1
        commands = worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        assert sent(commands, "decode-0") == [Offer(IN_A, has_pool=False)], "it is still here"

    def test_what_was_sent_and_did_not_come_is_lost(self, worker: PrefillCore) -> None:
        through(worker)
        pulled(worker)
        worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        commands = worker.handle(said("decode-0", Decline("a", 0, is_failed=True)), 0.0)
        assert [message.lost for message in sent(commands, ROUTER) if isinstance(message, Progress)] == [(("a", 0),)]

    def test_the_decode_worker_is_lost(self, worker: PrefillCore) -> None:
        through(worker)
        commands = worker.handle(MemberLost(DECODE), 0.0)
        assert any(isinstance(message, AskPages) and message.pages == 1 for message in sent(commands))

    def test_in_mid_transfer(self, worker: PrefillCore) -> None:
        through(worker)
        pulled(worker)
        assert not any(
            isinstance(message, AskPages) and message.pages for message in sent(worker.handle(MemberLost(DECODE), 0.0))
        )
        commands = worker.handle(KvSent(1, "decode-0.1", ok=False), 0.0)
        assert any(isinstance(message, AskPages) and message.pages == 1 for message in sent(commands))

    def test_cancelled_while_it_is_sent_its_blocks_wait_for_the_end(self, worker: PrefillCore) -> None:
        through(worker)
        pulled(worker)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert (worker.held["requests"], worker.held["blocks"]) == (0, 1)
        worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        assert is_empty(worker)


def test_a_pull_that_comes_twice_or_late_is_not_served(worker: PrefillCore) -> None:
    """Transfers between two lives of the members are in the order of their numbers."""
    through(worker)
    assert pulled(worker, number=2)
    assert pulled(worker, number=2) == []
    assert pulled(worker, number=1) == []
    assert pulled(worker, number=1, incarnation=2) == [SendKv(1, "decode-0.2", (), ())], "it is on its way already"


def test_offers_are_said_again(worker: PrefillCore) -> None:
    """Offers are repeated periodically, and at once where frames were lost, but not after the request has left."""
    through(worker)
    assert Offer(IN_A, has_pool=False) in sent(worker.handle(TimerFired("refresh"), 5.0), "decode-0")
    assert Offer(IN_A, has_pool=False) in sent(worker.handle(LinkGap("decode-0"), 5.0), "decode-0")
    pulled(worker)
    worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
    assert not sent(worker.handle(LinkGap("decode-0"), 5.0)[1:], "decode-0")


class TestChunkByChunk:
    """Full pages of a running prompt are written ahead; the commit after its last chunk copies the rest."""

    def test_of_a_best_effort_prompt_to_its_pages(self, by_pool: PrefillCore) -> None:
        flex = replace(request("a", prompt=19), service=BE)
        by_pool.handle(said(ROUTER, Prefill(flex)), 0.0)
        by_pool.handle(said("pool-0", LeasePages((1, 2, 3), 1, BE)), 0.0)
        first = [
            command for command in by_pool.handle(StepDone(StepResult(1, ())), 0.0) if isinstance(command, CopyOut)
        ]
        assert [(copy.tokens, copy.start, copy.aside) for copy in first] == [(flex.prompt[:8], 0, True)]
        second = [
            command for command in by_pool.handle(StepDone(StepResult(2, ())), 0.0) if isinstance(command, CopyOut)
        ]
        assert [(copy.tokens, copy.start) for copy in second] == [(flex.prompt[:16], 8)]
        by_pool.handle(CopiedOut(first[0].number), 0.0)
        through = by_pool.handle(StepDone(StepResult(3, (("a", 7),))), 0.0)
        assert not [command for command in through if isinstance(command, CopyOut)], (
            "a part of it is still being written"
        )
        (last,) = by_pool.handle(CopiedOut(second[0].number), 0.0)
        assert isinstance(last, CopyOut)
        assert (last.tokens, last.start, last.aside) == (flex.prompt, 16, False)
        (commit,) = sent(by_pool.handle(CopiedOut(last.number), 0.0), "pool-0")
        assert isinstance(commit, Commit)
        assert commit.entry.pages == (*first[0].pages, *second[0].pages, *last.pages)
        assert len(by_pool.leased_pages) == 0

    def test_a_real_time_request_asks_for_pages_and_waits_for_none(self, by_pool: PrefillCore) -> None:
        chat = request("a", prompt=19)
        by_pool.handle(said(ROUTER, Prefill(chat)), 0.0)
        commands = by_pool.handle(StepDone(StepResult(1, ())), 0.0)
        assert AskPages(0, 1, most=3) in sent(commands, "pool-0")
        copies = [command for command in leased(by_pool, 1, 4) if isinstance(command, CopyOut)]
        assert [copy.pages for copy in copies] == [(4,)], "there is one"
        by_pool.handle(StepDone(StepResult(2, ())), 0.0)
        by_pool.handle(CopiedOut(copies[0].number), 0.0)
        commands = by_pool.handle(StepDone(StepResult(3, (("a", 7),))), 0.0)
        assert AskPages(3, 2) in sent(commands, "pool-0"), "who waits for pages has none: two could wait for each other"

    def test_while_a_finished_prompt_waits_for_pages_nothing_is_written_ahead(self, by_pool: PrefillCore) -> None:
        """Pages given up for the finished prompt must not be taken again: the prompts would take turns for ever."""
        by_pool.handle(said(ROUTER, Prefill(request("a", prompt=11))), 0.0)
        by_pool.handle(StepDone(StepResult(1, ())), 0.0)
        leased(by_pool, 1, 4)
        by_pool.handle(said(ROUTER, Prefill(request("b", prompt=19))), 0.0)
        by_pool.handle(CopiedOut(1), 0.0)
        commands = by_pool.handle(StepDone(StepResult(2, (("a", 7),))), 0.0)
        assert AskPages(2, 2) in sent(commands, "pool-0")
        by_pool.handle(TimerFired("answer"), ANSWER_S)
        for number in (3, 4):
            commands = by_pool.handle(StepDone(StepResult(number, ())), ANSWER_S)
            assert not any(isinstance(command, CopyOut) for command in commands)

    def test_a_chat_goes_on_in_the_place_of_a_document_that_is_through(self) -> None:
        """A chat that has a seat shares nothing more: all memory of the document is for it."""
        by_pool = PrefillCore(WorkerSetup(LIMITS, Policy(room=Room.CHUNKS)))
        by_pool.handle(MemberJoined(POOL_MEMBER), 0.0)
        document = replace(request("a", prompt=9), service=BE)
        by_pool.handle(said(ROUTER, Prefill(document)), 0.0)
        by_pool.handle(said("pool-0", Prefix("a", 0, ())), 0.0)
        by_pool.handle(said("pool-0", LeasePages((1, 2), 1, BE)), 0.0)
        by_pool.handle(StepDone(StepResult(1, ())), 0.0)
        chat = replace(request("b"), prompt=tuple(range(101, 125)))
        by_pool.handle(said(ROUTER, Prefill(chat)), 0.0)
        by_pool.handle(said("pool-0", Prefix("b", 0, ())), 0.0)
        for number, tokens in ((2, (("a", 7),)), (3, ()), (4, ())):
            commands = by_pool.handle(StepDone(StepResult(number, tokens)), 0.0)
            commands += by_pool.handle(TimerFired("answer"), ANSWER_S)
            (step,) = [command.plan for command in commands if isinstance(command, RunStep)]
            assert [(chunk.request, len(chunk.tokens)) for chunk in step.chunks] == [("b", 8)]

    def test_of_what_is_cancelled_the_pages_go_back_when_they_are_written(self, by_pool: PrefillCore) -> None:
        flex = replace(request("a", prompt=19), service=BE)
        by_pool.handle(said(ROUTER, Prefill(flex)), 0.0)
        by_pool.handle(said("pool-0", LeasePages((1, 2, 3), 1, BE)), 0.0)
        (copy,) = [
            command for command in by_pool.handle(StepDone(StepResult(1, ())), 0.0) if isinstance(command, CopyOut)
        ]
        asks = sent(by_pool.handle(said(ROUTER, Cancel("a", 0)), 0.0), "pool-0")
        assert asks == [AskPages(0, 2, copy.pages, BE)]
        assert by_pool.handle(CopiedOut(copy.number), 0.0) == []
        assert sent(by_pool.handle(said("pool-0", LeasePages((), 2, BE)), 0.0), "pool-0") == [AskPages(0, 3, (), BE)]
