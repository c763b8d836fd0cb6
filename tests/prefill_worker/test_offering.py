"""A finished prompt goes to the pool; where no pool is of use it is offered to the decode worker that was named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Entry, ServiceClass, StepResult
from alignedserve.lab.fuzzing.worker_views import num_preemptions
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
    GiveBack,
    Message,
    Offer,
    Prefill,
    Progress,
    Pull,
)
from alignedserve.scheduling.policy import Handoff, Policy
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from tests.prefill_worker.asks import asks, firm, leased, spare
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said

A = request("a")
DECODE = replace(member("decode-0"), transport="there")
ELSEWHERE = replace(member("decode-1"), node="elsewhere", transport="there")
BE = ServiceClass.BE
IN_A: Entry = entry(A, ())
LONG = request("a", prompt=19)


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


def gets(worker: PrefillCore, number: int, *pages: int) -> list[CopyOut]:
    """Return the copies that these pages allow."""
    return copies(worker.handle(said("pool-0", leased(pages, number)), 0.0))


def copies(commands: Sequence[Command]) -> list[CopyOut]:
    return [command for command in commands if isinstance(command, CopyOut)]


def commits(worker: PrefillCore, written: list[CopyOut]) -> list[Message]:
    """End these copies."""
    ended = [command for copy in written for command in worker.handle(CopiedOut(copy.number), 0.0)]
    return [message for message in sent(ended) if isinstance(message, Commit)]


def stepped(worker: PrefillCore, number: int, *names: str) -> list[Command]:
    return worker.handle(StepDone(StepResult(number, tuple((name, 7) for name in names))), 0.0)


def is_empty(worker: PrefillCore) -> bool:
    return not any(worker.held.values()) or worker.held == {**dict.fromkeys(worker.held, 0), "outputs": 1}


def test_it_is_offered_at_once_pulled_and_gone(worker: PrefillCore) -> None:
    assert Offer(IN_A, has_pool=False) in sent(through(worker), "decode-0")
    assert pulled(worker) == [SendKv(1, "decode-0.1", (0,), (1, 2, 3))]
    assert worker.held["blocks"] == 1, "until it is sent"
    worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
    assert is_empty(worker)
    assert worker.held["outputs"] == 0, "its decode worker has the output"


@pytest.mark.parametrize("handoff", [Handoff.POOL, Handoff.ROOM])
@pytest.mark.parametrize("decode", ["", "decode-1"])
def test_where_workers_of_the_node_decode_it_goes_to_the_pool_for_that_worker(handoff: Handoff, decode: str) -> None:
    core = beside(Policy(handoff=handoff, reuse=False))
    assert asks(through(core, decode)) == [firm(1, 2)]
    assert commits(core, gets(core, 2, 5)) == [Commit(replace(IN_A, pages=(5,)), to=decode)]


@pytest.mark.parametrize("handoff", Handoff)
def test_a_named_worker_that_is_reached_is_asked_first(handoff: Handoff) -> None:
    """It may decline only where the pool is of use, which gets the request then."""
    core = beside(Policy(handoff=handoff, reuse=False))
    by_pool, stays = handoff is Handoff.POOL, handoff is Handoff.DEVICE
    offered = sent(through(core, "decode-0"), "decode-0")
    assert offered == ([] if by_pool else [Offer(IN_A, has_pool=not stays)])
    declined = core.handle(said("decode-0", Decline("a", 0)), 0.0)
    assert sent(declined, "pool-0") == ([firm(1, 2)] if handoff is Handoff.ROOM else [])
    if handoff is Handoff.ROOM:
        assert commits(core, gets(core, 2, 5)) == [Commit(replace(IN_A, pages=(5,)))]


def test_where_kv_stays_on_its_device_no_pages_are_asked_for(worker: PrefillCore) -> None:
    """Nothing would ever be written to them, and what is written ahead would hold up the offer."""
    assert not asks(worker.handle(said(ROUTER, Prefill(request("a", prompt=19), "decode-0")), 0.0))
    for number, first in ((1, ()), (2, ()), (3, (("a", 7),))):
        commands = worker.handle(StepDone(StepResult(number, first)), 0.0)
        assert not asks(commands)
    assert sent(commands, "decode-0")


def test_pages_that_were_asked_for_go_back_once_kv_stays_though_their_answer_was_lost() -> None:
    """The pool has leased them to this worker, which does not know, and has no use for them any more."""
    worker = PrefillCore(WorkerSetup(LIMITS, Policy(handoff=Handoff.DEVICE, reuse=False), direct=True))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    assert AskPages(1, 1, (), is_spare=True) in sent(worker.handle(said(ROUTER, Prefill(A)), 0.0))
    worker.handle(MemberJoined(DECODE), 0.0)
    told = sent(worker.handle(TimerFired("refresh"), REFRESH_S))
    assert AskPages(0, 2, (), is_spare=True) in told


def test_without_a_link_nothing_is_offered() -> None:
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False)))
    for neighbour in (POOL_MEMBER, DECODE):
        core.handle(MemberJoined(neighbour), 0.0)
    assert not sent(through(core), "decode-0")


def test_where_no_decode_worker_of_the_node_is_left_prompts_are_offered_elsewhere(by_pool: PrefillCore) -> None:
    """The pool is there, but no worker would ever fetch a request from it."""
    by_pool.handle(MemberLost(DECODE), 0.0)
    by_pool.handle(MemberJoined(ELSEWHERE), 0.0)
    assert Offer(IN_A, has_pool=False) in sent(through(by_pool, "decode-1"), "decode-1")
    again = by_pool.handle(said("decode-1", Decline("a", 0, is_failed=True)), 0.0)
    assert sent(again, "decode-1") == [Offer(IN_A, has_pool=False)]
    by_pool.handle(MemberJoined(replace(DECODE, incarnation=2)), 0.0)
    (ask,) = asks(by_pool.handle(said("decode-1", Decline("a", 0)), 0.0))
    assert (ask.pages, ask.is_spare) == (1, False)


@pytest.mark.parametrize("then", [MemberJoined(DECODE), MemberJoined(POOL_MEMBER)])
def test_a_prompt_that_can_go_nowhere_goes_as_soon_as_it_can(then: MemberJoined) -> None:
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False), direct=True))
    assert not sent(through(core, ""), "decode-0")
    (said_then,) = sent(core.handle(then, 0.0))
    assert said_then == (Offer(IN_A, has_pool=False) if then.member == DECODE else firm(1, 1))


def test_a_prompt_that_waits_for_pages_is_offered_when_the_pool_is_lost(by_pool: PrefillCore) -> None:
    through(by_pool, "")
    assert Offer(IN_A, has_pool=False) in sent(by_pool.handle(MemberLost(POOL_MEMBER), 0.0), "decode-0")


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

    def test_what_was_sent_a_thousand_requests_ago_came(self, worker: PrefillCore) -> None:
        """A worker may send requests for months, and does not remember each of them."""
        for number in range(1, 1002):
            name = f"r{number}"
            worker.handle(said(ROUTER, Prefill(request(name), "decode-0")), 0.0)
            worker.handle(StepDone(StepResult(number, ((name, 7),))), 0.0)
            worker.handle(said("decode-0", Pull(number, name, 0)), 0.0)
            worker.handle(KvSent(number, "decode-0.1", ok=True), 0.0)

        def lost(name: str) -> list[Message]:
            commands = worker.handle(said("decode-0", Decline(name, 0, is_failed=True)), 0.0)
            return [message for message in sent(commands, ROUTER) if isinstance(message, Progress) and message.lost]

        assert not lost("r1")
        assert lost("r2")
        assert lost("r1001")

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

    @pytest.fixture
    def core(self, by_pool: PrefillCore) -> PrefillCore:
        """Return a worker that runs a prompt of three chunks, with its pages at hand."""
        assert asks(by_pool.handle(said(ROUTER, Prefill(LONG)), 0.0)) == [spare(3, 1)]
        gets(by_pool, 1, 1, 2, 3)
        return by_pool

    def test_each_page_is_written_beside_the_next_chunk(self, core: PrefillCore) -> None:
        (first,) = copies(stepped(core, 1))
        assert (first.tokens, first.start, first.aside) == (LONG.prompt[:8], 0, True)
        core.handle(CopiedOut(first.number), 0.0)
        (second,) = copies(stepped(core, 2))
        assert (second.tokens, second.start) == (LONG.prompt[:16], 8)
        assert not copies(stepped(core, 3, "a")), "a part of it is still being written"
        (last,) = copies(core.handle(CopiedOut(second.number), 0.0))
        assert (last.tokens, last.start, last.aside) == (LONG.prompt, 16, False)
        (commit,) = commits(core, [last])
        assert isinstance(commit, Commit)
        assert commit.entry.pages == (*first.pages, *second.pages, *last.pages)
        assert is_empty(core)

    def test_of_what_is_cancelled_the_pages_go_back_when_they_are_written(self, core: PrefillCore) -> None:
        (copy,) = copies(stepped(core, 1))
        core.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        stepped(core, 2)
        assert asks(core.handle(said("pool-0", GiveBack()), 0.0))[0].kept == copy.pages
        core.handle(CopiedOut(copy.number), 0.0)
        assert asks(core.handle(said("pool-0", GiveBack()), 0.0))[0].kept == ()

    def test_of_what_another_worker_gets_directly_too(self, core: PrefillCore) -> None:
        core.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        stepped(core, 1)
        core.handle(said(ROUTER, Prefill(replace(LONG, id="b"), "decode-0")), 0.0)
        for number in (2, 3):
            for copy in copies(stepped(core, number)):
                core.handle(CopiedOut(copy.number), 0.0)
        assert sent(stepped(core, 4, "b"), "decode-0")
        core.handle(said("decode-0", Pull(1, "b", 0)), 0.0)
        core.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        assert asks(core.handle(said("pool-0", GiveBack()), 0.0))[0].kept == ()
        assert is_empty(core)

    def test_where_too_few_pages_are_left_they_are_given_up(self, core: PrefillCore) -> None:
        """Two requests, here or on two workers, could wait for each other's pages for ever."""
        (copy,) = copies(stepped(core, 1))
        core.handle(CopiedOut(copy.number), 0.0)
        core.handle(said("pool-0", GiveBack()), 0.0)
        stepped(core, 2)
        (ask,) = asks(stepped(core, 3, "a"))
        assert (ask.is_spare, ask.pages, ask.kept) == (False, 3, ())
        (whole,) = gets(core, ask.number, 4, 5, 6)
        assert (whole.tokens, whole.start) == (LONG.prompt, 0)


def test_a_chat_goes_on_in_the_place_of_a_document_that_is_through() -> None:
    """All memory of the document is for the chat, and what the pool has got of it is not computed again."""
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False)))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    core.handle(said(ROUTER, Prefill(replace(LONG, service=BE))), 0.0)
    for number in (1, 2):
        stepped(core, number)
    assert asks(stepped(core, 3, "a")) == [firm(3, 2)]
    begun = core.handle(said(ROUTER, Prefill(request("chat", prompt=16))), 0.0)
    plans = [command.plan for command in begun if isinstance(command, RunStep)]
    assert [chunk.request for plan in plans for chunk in plan.chunks] == ["chat"]
    assert num_preemptions(core) == 1
    stepped(core, 4)
    (ask,) = asks(stepped(core, 5, "chat"))
    assert len(commits(core, gets(core, ask.number, 1, 2))) == 1
    for number in (6, 7):
        stepped(core, number)
    (ask,) = asks(stepped(core, 8, "a"))
    (commit,) = commits(core, gets(core, ask.number, 1, 2, 3))
    assert isinstance(commit, Commit)
    assert commit.entry.output == (7, 7), "with the token that its client has"
