"""Urgent requests do not wait in the pool but go to the named decode worker; KV that a worker has is kept for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Due, Entry, ServiceClass
from alignedserve.kvpool.state import PoolCore
from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    AskPrefix,
    Batch,
    Cancel,
    Commit,
    Keep,
    Kept,
    LeasePages,
    Message,
    Prefix,
    Release,
)
from alignedserve.scheduling.policy import Grouping, Policy
from alignedserve.scheduling.slo import StepTimes
from tests.samples import entry, member, request, said

SLOW = StepTimes(0.5, 0.5)
FULL = AskBatch(0, 0, times=SLOW)
IN_A, IN_B = (replace(entry(request(name), (page,)), names=()) for page, name in enumerate("ab"))


def pool_with(policy: Policy) -> PoolCore:
    """Return a pool whose pages are leased to a prefill worker; two decode workers have no room and slow steps."""
    core = PoolCore(8, 4, policy)
    for name in ("decode-0", "decode-1"):
        core.handle(MemberJoined(member(name)), 0.0)
        core.handle(said(name, AskBatch(8, 1, times=SLOW)), 0.0)
        core.handle(said(name, FULL), 0.0)
    core.handle(said("prefill-0", AskPages(4, 1)), 0.0)
    return core


@pytest.fixture
def pool() -> PoolCore:
    core = pool_with(Policy())
    # The pool learns step times from asks that it answers.
    core.handle(said("prefill-0", Commit(replace(entry(request("z"), (3,)), names=()))), 0.0)
    core.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
    return core


def sent(commands: Sequence[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


def committed(pool: PoolCore, entry: Entry, to: str) -> list[Command]:
    return pool.handle(said("prefill-0", Commit(entry, 0, to)), 0.0)


def lease(pool: PoolCore, worker: str) -> tuple[int, ...]:
    (leased,) = sent(pool.handle(said(worker, AskPages(1, 1)), 0.0), worker)
    assert isinstance(leased, LeasePages)
    return leased.pages


class TestRequestsThatCannotWait:
    def test_goes_to_the_worker_named_where_nobody_asks(self, pool: PoolCore) -> None:
        assert sent(committed(pool, IN_A, "decode-1"), "decode-1") == [Batch((IN_A,), is_pinned=True)]

    def test_to_whoever_asks_first(self, pool: PoolCore) -> None:
        pool.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
        commands = committed(pool, IN_A, "decode-1")
        assert not sent(commands, "decode-1")
        assert sent(commands, "decode-0") == [Batch((IN_A,), is_pinned=True)], "it has room now"

    @pytest.mark.parametrize("to", ["", "decode-7"])
    def test_to_whoever_asks_next_where_nobody_is_named(self, pool: PoolCore, to: str) -> None:
        assert not any(
            isinstance(command, Send) and isinstance(command.message, Batch) for command in committed(pool, IN_A, to)
        )
        asked = pool.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
        assert sent(asked, "decode-0") == [Batch((IN_A,), is_pinned=True)]

    @pytest.mark.parametrize("service", ServiceClass)
    def test_what_a_decode_worker_hands_on_goes_straight_to_the_one_named(
        self, pool: PoolCore, service: ServiceClass
    ) -> None:
        """The worker that hands it on has room, too, and asks for more: it does not get it back."""
        pages = lease(pool, "decode-0")
        pool.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
        is_rt = service is ServiceClass.RT
        of = replace(IN_B, request=replace(IN_B.request, service=service), pages=pages, due=Due(1e6) if is_rt else None)
        commands = pool.handle(said("decode-0", Commit(of, 0, "decode-1")), 0.0)
        assert sent(commands, "decode-1") == [Batch((of,), is_pinned=is_rt, is_dynamic=not is_rt)]
        assert not sent(commands, "decode-0")
        assert pool.out["decode-1"] == {("b", 0)}

    def test_what_is_handed_on_to_a_worker_that_is_gone_waits_for_the_next(self, pool: PoolCore) -> None:
        pages = lease(pool, "decode-0")
        pool.handle(MemberLost(member("decode-1")), 0.0)
        pool.handle(said("decode-0", Commit(replace(IN_A, pages=pages), 0, "decode-1")), 0.0)
        asked = pool.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
        (batch,) = sent(asked, "decode-0")
        assert isinstance(batch, Batch)
        assert [handed.request.id for handed in batch.entries] == ["a"]

    def test_what_was_cancelled_at_a_worker_that_is_lost_goes_to_no_other(self, pool: PoolCore) -> None:
        """A request that ended a worker would end each next one, and what runs alone there is taken for the cause."""
        lease(pool, "prefill-0")
        pool.handle(said("decode-0", AskBatch(8, 1, times=SLOW)), 0.0)
        assert sent(committed(pool, IN_A, ""), "decode-0")
        pool.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        pool.handle(MemberLost(member("decode-0")), 0.0)
        pool.handle(said("decode-1", AskBatch(8, 1, times=SLOW)), 0.0)
        assert "a" not in pool.kept

    def test_a_request_that_can_wait_does_not_go_there(self, pool: PoolCore) -> None:
        calm = replace(IN_A, due=Due(1e6))
        flex = replace(IN_B, request=replace(IN_B.request, service=ServiceClass.BE), due=None)
        assert not sent(committed(pool, calm, "decode-1"), "decode-1")
        assert not sent(committed(pool, flex, "decode-1"), "decode-1")

    def test_a_request_that_could_wait_goes_there_when_its_slack_has_run_out(self, pool: PoolCore) -> None:
        """The request is due at 2 s; waiting for a batch takes half a second, and a step takes as long."""
        (timer,) = [
            command
            for command in committed(pool, replace(IN_A, due=Due(2.0)), "decode-1")
            if isinstance(command, SetTimer) and command.name == "look"
        ]
        assert 0.0 < timer.at < 2.0 - SLOW.most_s
        early = timer.at - 0.01
        assert not sent(pool.handle(said("decode-0", FULL), early), "decode-1")
        assert not sent(pool.handle(TimerFired("look"), early), "decode-1"), "not before"
        (batch,) = sent(pool.handle(TimerFired("look"), timer.at), "decode-1")
        assert isinstance(batch, Batch)
        assert batch.is_pinned
        assert [entry.request.id for entry in batch.entries] == ["a"]

    def test_nor_where_nobody_is_pinned(self) -> None:
        pool = pool_with(Policy(grouping=Grouping.FCFS))
        assert not sent(committed(pool, IN_A, "decode-1"), "decode-1")


class TestHeldForAnotherWorker:
    """The request's KV went from worker to worker directly; the pool holds its prompt's pages for it all the time."""

    @pytest.fixture
    def holding(self, pool: PoolCore) -> PoolCore:
        pool.handle(said("prefill-0", Keep("a", 0, 0, (0,), (17,), ServiceClass.RT, goes_on=True)), 0.0)
        assert pool.held_for == {"prefill-0": {("a", 0)}}
        return pool

    def goes_on(self, pool: PoolCore, to: str = "decode-1") -> list[Command]:
        return pool.handle(said("prefill-0", Release("a", 0, to)), 0.0)

    def test_that_one_hears_of_them_and_frees_them(self, holding: PoolCore) -> None:
        assert self.goes_on(holding) == [Send("decode-1", Kept("a", 0, (0,)))]
        assert holding.held_for == {"decode-1": {("a", 0)}}
        holding.handle(said("prefill-0", Release("a", 0)), 0.0)
        assert holding.held_for == {"decode-1": {("a", 0)}}, "what its worker before says counts no more"
        holding.handle(said("decode-1", Release("a", 0)), 0.0)
        assert not holding.held_for

    def test_its_answer_is_kept_behind_them(self, holding: PoolCore) -> None:
        self.goes_on(holding)
        (leased,) = lease(holding, "decode-1")
        holding.handle(said("decode-1", Keep("a", 0, 1, (leased,), (18,), ServiceClass.RT)), 0.0)
        asked = holding.handle(said("decode-0", AskPrefix("next", 0, (17, 18), ServiceClass.RT)), 0.0)
        assert sent(asked, "decode-0") == [Prefix("next", 0, (0, leased))]

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_for_a_worker_that_has_gone_nothing_is_held(self, holding: PoolCore, is_lost: bool) -> None:
        if is_lost:
            self.goes_on(holding)
        holding.handle(MemberLost(member("decode-1")), 0.0)
        if not is_lost:
            assert not sent(self.goes_on(holding), "decode-1")
        assert not holding.held_for
