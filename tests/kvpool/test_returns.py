"""Returns from decode workers: preempted requests wait again, answers are kept, spare pages are reused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Entry
from alignedserve.kvpool.state import LAST_WORDS_S, REFRESH_S, PoolCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    AskPrefix,
    Batch,
    Cancel,
    Commit,
    GiveBack,
    Keep,
    LeasePages,
    Message,
    Prefix,
    Progress,
    Release,
)
from alignedserve.scheduling.policy import Grouping, Policy
from tests.samples import member, request, said

LONG = request("long", prompt=19, max_tokens=20)  # two pages and a part of a third
NAMES = (101, 102)
OUT = Entry(LONG, (7,), (0, 1, 2), names=NAMES)
LATER = replace(OUT, output=(7,) * 8, names=(*NAMES, 103))  # 26 tokens have KV: three pages and a part of a fourth


def leased(pool: PoolCore, worker: str, pages: int, number: int = 1, *, is_spare: bool = True) -> tuple[int, ...]:
    ask = AskPages(pages, number, is_spare=is_spare)
    commands = pool.handle(said(worker, ask), 0.0)
    return next(
        (command.message.pages for command in to(worker, commands) if isinstance(command.message, LeasePages)), ()
    )


def to(member: str, commands: list[Command]) -> list[Send]:
    return [command for command in commands if isinstance(command, Send) and command.to == member]


def messages(member: str, commands: list[Command]) -> list[Message]:
    return [command.message for command in to(member, commands)]


@pytest.fixture
def pool() -> PoolCore:
    """Return a pool where, of eight pages, a request that is out has three, and its worker has two spare pages."""
    core = PoolCore(8, 4, Policy(grouping=Grouping.FCFS))
    assert leased(core, "prefill-0", 3, is_spare=False) == (0, 1, 2)
    core.handle(said("decode-0", AskBatch(99, 9)), 0.0)
    core.handle(said("prefill-0", Commit(OUT)), 0.0)
    assert leased(core, "decode-0", 2) == (3, 4)
    return core


def returns(pool: PoolCore, worker: str = "decode-0", known: int = 2) -> list[Command]:
    entry = replace(LATER, pages=(0, 1, 3, 4) if known else (3, 4))
    return pool.handle(said(worker, Commit(entry, known)), 0.0)


class TestWhoComesBack:
    def test_has_its_full_pages_and_what_was_written_after_them(self, pool: PoolCore) -> None:
        assert messages(ROUTER, returns(pool)) == [Progress(committed=(("long", 0),))]
        assert pool.pages.pages_of("long") == (0, 1, 3, 4)
        assert sorted(pool.pages.numbers) == list(range(8))
        (batch,) = messages("decode-1", pool.handle(said("decode-1", AskBatch(99, 9)), 0.0))
        assert isinstance(batch, Batch)
        (entry,) = batch.entries
        assert (entry.pages, entry.output) == ((0, 1, 3, 4), LATER.output)

    @pytest.mark.parametrize("known", [0, 2])
    def test_is_lost_where_it_is_somebody_elses(self, pool: PoolCore, known: int) -> None:
        leased(pool, "decode-1", 1)
        pool.handle(MemberLost(member("decode-0")), 0.0)
        pool.handle(said("decode-1", AskBatch(99, 9)), LAST_WORDS_S)
        lost = messages(ROUTER, returns(pool, known=known))
        assert lost == [Progress(lost=(("long", 0),))]
        assert pool.pages.pages_of("long") == (0, 1, 2)
        assert sorted(pool.pages.numbers) == list(range(8))

    def test_to_a_pool_that_never_heard_of_it_brings_all(self) -> None:
        core = PoolCore(8, 4, Policy())
        pages = leased(core, "decode-0", 4)
        core.handle(said("decode-0", Commit(replace(LATER, pages=pages))), 0.0)
        assert core.pages.pages_of("long") == pages

    def test_without_its_first_page_takes_the_place_of_what_was_out(self, pool: PoolCore) -> None:
        returns(pool, known=0)
        assert pool.pages.pages_of("long") == (0, 1), "they hold the same"
        assert sorted(pool.pages.numbers) == list(range(8))

    @pytest.mark.parametrize("known", [0, 2])
    def test_and_was_cancelled_leaves_no_page_of_its_own(self, pool: PoolCore, known: int) -> None:
        pool.handle(said(ROUTER, Cancel("long", 0)), 0.0)
        returns(pool, known=known)
        pool.handle(said("decode-0", Release("long", 0)), 0.0)
        assert pool.held == {"entries": 0, "pages": 0, "unanswered asks": 0}
        assert pool.num_lent_pages == 0

    @pytest.mark.parametrize("stage", ["waits", "is out", "is asked for"])
    def test_too_late_takes_nothing_from_its_next_attempt(self, pool: PoolCore, stage: str) -> None:
        """The pool took the decode worker for dead, and the Cancel was lost."""
        pool.handle(MemberLost(member("decode-0")), 0.0)
        if stage == "is asked for":
            pool.handle(said("prefill-0", AskPrefix("long", 1, NAMES)), 0.0)
        else:
            pages = leased(pool, "prefill-0", 3, number=2, is_spare=False)
            pool.handle(said("prefill-0", Commit(replace(OUT, request=replace(LONG, attempt=1), pages=pages))), 0.0)
        if stage == "is out":
            pool.handle(said("decode-1", AskBatch(99, 9)), 0.0)
        had = pool.pages.pages_of("long")
        assert messages(ROUTER, returns(pool, known=0)) == [Progress(lost=(("long", 0),))]
        assert pool.pages.pages_of("long") == had != ()
        assert sorted(pool.pages.numbers) == list(range(8))


class TestAnswers:
    KEPT = Keep("long", 0, 2, (3,), (103,))

    def test_are_where_the_next_turn_begins(self, pool: PoolCore) -> None:
        pool.handle(said("decode-0", self.KEPT), 0.0)
        assert pool.held["entries"] == 0
        assert (pool.pages.num_idle, pool.num_lent_pages) == (3, 1)
        told = pool.handle(said("prefill-0", AskPrefix("next", 0, (*NAMES, 103, 104))), 0.0)
        assert messages("prefill-0", told) == [Prefix("next", 0, (0, 1, 3))]

    @pytest.mark.parametrize("by", ["decode-1", "decode-0"])
    def test_of_what_is_not_out_there_are_given_back(self, pool: PoolCore, by: str) -> None:
        pool.handle(said("decode-0", Release("long", 0)), 0.0)
        page = leased(pool, by, 1, number=2)
        pool.handle(said(by, replace(self.KEPT, pages=page)), 0.0)
        assert sorted(pool.pages.numbers) == list(range(8))
        assert pool.pages.num_idle == 2, "the prompt's"


class TestSparePages:
    def test_are_half_of_what_is_free(self) -> None:
        assert len(leased(PoolCore(8, 4), "decode-0", 9)) == 4

    def test_are_for_when_nobody_waits(self, pool: PoolCore) -> None:
        assert leased(pool, "prefill-0", 4, 2, is_spare=False) == ()
        assert leased(pool, "decode-1", 1) == ()

    def test_are_asked_back_when_somebody_waits_and_go_there_first(self, pool: PoolCore) -> None:
        asked = pool.handle(said("prefill-0", AskPages(5, 2)), 0.0)
        assert messages("decode-0", asked) == [GiveBack()]
        assert pool.handle(said("prefill-1", AskPages(1, 1)), 0.0) == [], "and not again"
        given = pool.handle(said("decode-0", AskPages(0, 2, is_spare=True)), 0.0)
        (lease,) = messages("prefill-0", given)
        assert isinstance(lease, LeasePages)
        assert len(lease.pages) == 5
        assert pool.num_lent_pages == 5

    def test_that_were_not_given_back_are_asked_back_again(self, pool: PoolCore) -> None:
        pool.handle(said("prefill-0", AskPages(5, 2)), 0.0)
        assert GiveBack() in messages("decode-0", pool.handle(TimerFired("refresh"), REFRESH_S))

    def test_of_a_worker_that_died_nobody_waits_for(self, pool: PoolCore) -> None:
        """The pool waits only until the lock of the dead worker is free."""
        pool.handle(said("prefill-0", AskPages(5, 2)), 0.0)
        pool.handle(MemberLost(member("decode-0")), 0.0)
        assert not messages("decode-0", pool.handle(TimerFired("refresh"), REFRESH_S))

    def test_of_a_worker_that_was_taken_for_dead_are_asked_back_when_it_is_met_again(self, pool: PoolCore) -> None:
        pool.handle(MemberLost(member("decode-0")), 0.0)
        pool.handle(MemberJoined(member("decode-0")), 0.0)
        assert messages("decode-0", pool.handle(said("prefill-0", AskPages(5, 2)), 0.0)) == [GiveBack()]


def test_a_release_counts_from_whoever_has_it(pool: PoolCore) -> None:
    pool.handle(said("decode-1", Release("long", 0)), 0.0)
    assert pool.held["entries"] == 1


def test_an_empty_ask_withdraws_the_ask_before(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(99, 9)), 0.0)
    pool.handle(said("decode-0", AskBatch(0, 0)), 0.0)
    assert not messages("decode-0", returns(pool))
