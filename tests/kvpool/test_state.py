"""The pool: each page is owned or free, and waiting requests leave in turn (test_grouping.py tests which)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Due, Usage
from alignedserve.kvpool.state import LAST_WORDS_S, PoolCore
from alignedserve.protocol.commands import Command, Send, SetTimer, WatchHolder
from alignedserve.protocol.events import HolderGone, LinkGap, MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.figures import PagesFor
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    AskPrefix,
    Batch,
    Cancel,
    Commit,
    Figures,
    Holding,
    Inquire,
    LeasePages,
    Missed,
    Prefix,
    Progress,
    Release,
)
from alignedserve.scheduling.policy import Grouping, Policy, Room
from alignedserve.scheduling.slo import StepTimes
from tests.samples import ROUTER_MEMBER, entry, member, next_attempt, request, said

A, B, C = request("a"), request("b"), request("c")  # each takes two blocks of a decode worker
IN_A, IN_B, IN_C = entry(A, (0,)), entry(B, (1,)), entry(C, (2,))
NOTHING_HELD = {"entries": 0, "pages": 0, "unanswered asks": 0}


REFRESHES = SetTimer("refresh", 5.0)


# Where A is out at a decode worker, B and C wait, and a page is lent.
HOLDERS = PagesFor("", kept=2), PagesFor("decode-0", kept=1), PagesFor("prefill-0", leased=1)


@pytest.fixture
def pool() -> PoolCore:
    """Return a pool whose four pages are leased to one prefill worker."""
    core = PoolCore(4, 4, Policy(grouping=Grouping.FCFS, room=Room.WHOLE))
    assert asks(core, "prefill-0", 4) == [leases("prefill-0", 0, 1, 2, 3)]
    return core


def asks(pool: PoolCore, worker: str, pages: int, number: int = 1, kept: tuple[int, ...] = ()) -> list[Command]:
    return pool.handle(said(worker, AskPages(pages, number, kept)), 0.0)


def leases(worker: str, *pages: int, number: int = 1) -> Command:
    return Send(worker, LeasePages(pages, number))


def committed(*names: str) -> Command:
    return Send(ROUTER, Progress(committed=tuple((name, 0) for name in names)))


def commit_all(pool: PoolCore) -> None:
    for waiting_entry in (IN_A, IN_B, IN_C):
        assert pool.handle(said("prefill-0", Commit(waiting_entry)), 0.0) == [committed(waiting_entry.request.id)]


def test_pages_are_leased_in_the_order_of_asking(pool: PoolCore) -> None:
    assert asks(pool, "prefill-1", 3) == []
    assert asks(pool, "prefill-2", 1) == []
    assert asks(pool, "prefill-0", 0, number=2, kept=(2, 3)) == [], "it waits for its turn as well"
    assert pool.num_lent_pages == 2
    assert asks(pool, "prefill-0", 0, number=3) == [
        leases("prefill-1", 0, 1, 2),
        leases("prefill-2", 3),
        leases("prefill-0", number=3),
    ]


class TestAsks:
    """An ask says which leased pages its worker keeps, and replaces the worker's earlier ask."""

    def test_gives_back_what_is_not_kept(self, pool: PoolCore) -> None:
        asks(pool, "prefill-1", 2)
        assert asks(pool, "prefill-0", 0, number=2, kept=(1, 3)) == [
            leases("prefill-1", 0, 2),
            leases("prefill-0", number=2),
        ]
        assert pool.num_lent_pages == 4

    def test_said_again_gives_back_the_lease_that_was_lost(self, pool: PoolCore) -> None:
        """Otherwise each lost lease would leave fewer pages for all workers."""
        assert asks(pool, "prefill-0", 4, number=2) == [leases("prefill-0", 0, 1, 2, 3, number=2)]
        assert asks(pool, "prefill-0", 2, number=3) == [leases("prefill-0", 0, 1, number=3)]
        assert pool.num_lent_pages == 2

    def test_that_could_not_be_answered_is_replaced_and_keeps_its_turn(self, pool: PoolCore) -> None:
        assert asks(pool, "prefill-1", 3) == []
        assert asks(pool, "prefill-2", 1) == []
        assert asks(pool, "prefill-1", 2, number=2) == []
        assert asks(pool, "prefill-0", 0, number=2, kept=(3,)) == [
            leases("prefill-1", 0, 1, number=2),
            leases("prefill-2", 2),
            leases("prefill-0", number=2),
        ]

    def test_keeps_no_pages_of_another(self, pool: PoolCore) -> None:
        """The worker may have committed these pages meanwhile, or an earlier pool may have leased them to it."""
        asks(pool, "prefill-0", 0, number=2, kept=(0,))
        pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
        asks(pool, "prefill-0", 0, number=3, kept=(0,))
        asks(pool, "prefill-1", 0, kept=(0, 1))
        assert (pool.held["pages"], pool.num_lent_pages) == (1, 0)


def test_a_batch_is_those_that_came_first_as_far_as_they_fit(pool: PoolCore) -> None:
    commit_all(pool)
    assert pool.handle(said("decode-0", AskBatch(blocks=5, requests=9)), 0.0) == [
        Send("decode-0", Batch((IN_A, IN_B))),
        REFRESHES,
    ]
    assert pool.handle(said("decode-1", AskBatch(blocks=9, requests=1)), 0.0) == [Send("decode-1", Batch((IN_C,)))]


def test_no_request_overtakes_a_request_that_does_not_fit(pool: PoolCore) -> None:
    long = entry(request("long", max_tokens=30), (3,))
    pool.handle(said("prefill-0", Commit(long)), 0.0)
    later = replace(IN_A, due=Due(at=10.0), request=replace(IN_A.request, arrival_at=0.1))
    pool.handle(said("prefill-0", Commit(later)), 0.0)
    assert pool.handle(said("decode-0", AskBatch(blocks=4, requests=9)), 0.0) == []


def test_a_worker_that_asks_before_there_is_anything_gets_the_next(pool: PoolCore) -> None:
    assert pool.handle(said("decode-0", AskBatch(8, 2)), 0.0) == []
    assert pool.handle(said("prefill-0", Commit(IN_A)), 0.0) == [
        Send("decode-0", Batch((IN_A,))),
        REFRESHES,
        committed("a"),
    ]
    assert pool.handle(said("prefill-0", Commit(IN_B)), 0.0) == [committed("b")]


def test_released_pages_are_free(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
    pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
    asks(pool, "prefill-1", 1)
    assert pool.handle(said("decode-0", Release("a", 1)), 0.0) == []
    assert pool.handle(said("decode-0", Release("a", 0)), 0.0) == [leases("prefill-1", 0)]
    assert pool.handle(said("decode-0", Release("a", 0)), 0.0) == []
    assert pool.held == NOTHING_HELD


def test_a_prefix_is_held_no_longer_than_the_worker_that_asked_for_it_lives(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
    pool.handle(said("prefill-0", Commit(replace(IN_A, names=(11,)))), 0.0)
    pool.handle(said("decode-0", Release("a", 0)), 0.0)
    assert Send("prefill-1", Prefix("b", 0, (0,))) in pool.handle(said("prefill-1", AskPrefix("b", 0, (11,))), 0.0)
    assert pool.held["entries"] == 1
    pool.handle(MemberLost(member("prefill-1")), 0.0)
    assert pool.held == NOTHING_HELD


def test_a_request_that_starts_again_lets_those_behind_it_go(pool: PoolCore) -> None:
    long = entry(request("long", max_tokens=30), (3,))
    pool.handle(said("prefill-0", Commit(long)), 0.0)
    later = replace(IN_A, due=Due(at=10.0), request=replace(A, arrival_at=0.1))
    pool.handle(said("prefill-0", Commit(later)), 0.0)
    assert pool.handle(said("decode-0", AskBatch(blocks=4, requests=9)), 0.0) == []
    told = pool.handle(said("prefill-0", AskPrefix("long", 1, ())), 0.0)
    batches = [command.message for command in told if isinstance(command, Send) and isinstance(command.message, Batch)]
    assert [[waiting.request.id for waiting in batch.entries] for batch in batches] == [["a"]]


class TestCancel:
    def test_of_what_waits_frees_its_pages(self, pool: PoolCore) -> None:
        pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
        assert pool.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        assert pool.held == NOTHING_HELD

    def test_of_what_a_worker_has_leaves_it_the_pages(self, pool: PoolCore) -> None:
        pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
        pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
        assert pool.handle(said(ROUTER, Cancel("a", 0)), 0.0) == [Send("decode-0", Cancel("a", 0))]
        assert pool.held["pages"] == 1
        pool.handle(said("decode-0", Release("a", 0)), 0.0)
        assert pool.held == NOTHING_HELD

    def test_of_what_is_committed_later_takes_the_pages_back(self, pool: PoolCore) -> None:
        assert pool.handle(said(ROUTER, Cancel("a", 0)), 0.0) == []
        lost = Send(ROUTER, Progress(lost=(("a", 0),)))
        assert pool.handle(said("prefill-0", Commit(IN_A)), 0.0) == [lost]
        assert (pool.held, pool.num_lent_pages) == (NOTHING_HELD, 3)

    def test_of_an_older_attempt_does_not_touch_the_next(self, pool: PoolCore) -> None:
        pool.handle(said("prefill-0", Commit(entry(next_attempt(A), (0,)))), 0.0)
        pool.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert pool.held["entries"] == 1


def test_a_next_attempt_takes_the_place_of_the_attempt_before(pool: PoolCore) -> None:
    again = entry(next_attempt(A), (1,))
    pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
    pool.handle(said("prefill-0", Commit(again)), 0.0)
    assert pool.held == {"entries": 1, "pages": 1, "unanswered asks": 0}
    assert pool.handle(said("decode-0", AskBatch(8, 2)), 0.0) == [Send("decode-0", Batch((again,))), REFRESHES]


def test_a_lost_workers_lease_ends_when_its_lock_is_free(pool: PoolCore) -> None:
    """A worker that is taken for dead may still be writing, so its pages stay leased."""
    asks(pool, "prefill-1", 1)
    assert pool.handle(MemberLost(member("prefill-0")), 0.0) == [WatchHolder("prefill-0.1")]
    assert pool.handle(HolderGone("prefill-0.1"), 0.0) == [leases("prefill-1", 0)]


def test_a_later_life_is_another_holder(pool: PoolCore) -> None:
    pool.handle(MemberLost(member("prefill-0")), 0.0)
    assert pool.handle(said("prefill-0", AskPages(4, 1), incarnation=2), 0.0) == []
    assert pool.num_lent_pages == 4, "it gives back nothing of the earlier life's"
    assert pool.handle(HolderGone("prefill-0.1"), 0.0) == [leases("prefill-0", 0, 1, 2, 3)]


def test_what_a_lost_decode_worker_had_is_first_in_the_next_batch(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 1)), 0.0)
    for waiting_entry in (IN_A, IN_B):
        pool.handle(said("prefill-0", Commit(waiting_entry)), 0.0)
    assert WatchHolder("decode-0.1") in pool.handle(MemberLost(member("decode-0")), 0.0)
    assert pool.handle(said("decode-1", AskBatch(8, 2)), LAST_WORDS_S) == [Send("decode-1", Batch((IN_A, IN_B)))]


def test_what_a_lost_decode_worker_had_waits_until_the_router_can_have_cancelled_it(pool: PoolCore) -> None:
    """A request that ended the worker at once would end the next one, too, and that end would count for nothing."""
    pool.handle(said("decode-0", AskBatch(8, 1)), 0.0)
    for waiting_entry in (IN_A, IN_B):
        pool.handle(said("prefill-0", Commit(waiting_entry)), 0.0)
    timer = SetTimer("last words", LAST_WORDS_S)
    assert pool.handle(MemberLost(member("decode-0")), 0.0) == [timer, WatchHolder("decode-0.1")]
    assert pool.handle(said("decode-1", AskBatch(8, 2)), LAST_WORDS_S / 2) == []
    assert pool.handle(said(ROUTER, Cancel("a", 0)), LAST_WORDS_S / 2) == []
    assert pool.handle(TimerFired("last words"), LAST_WORDS_S) == [Send("decode-1", Batch((IN_B,)))]


def test_what_a_lost_worker_asked_for_it_does_not_get(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
    asks(pool, "prefill-1", 1)
    pool.handle(MemberLost(member("decode-0")), 0.0)
    pool.handle(MemberLost(member("prefill-1")), 0.0)
    assert asks(pool, "prefill-0", 0, number=2, kept=(0,)) == [leases("prefill-0", number=2)]
    assert pool.handle(said("prefill-0", Commit(IN_A)), 0.0) == [committed("a")]


def test_a_new_router_hears_what_is_held(pool: PoolCore) -> None:
    commit_all(pool)
    pool.handle(said("decode-0", AskBatch(8, 1)), 0.0)
    holding = Holding((("b", 0), ("c", 0), ("a", 0)))
    usage = Figures(Usage(rt=3, leased=1), holders=HOLDERS)
    assert pool.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding), Send(ROUTER, usage)]


class TestLostFrames:
    @pytest.fixture
    def pool(self, pool: PoolCore) -> PoolCore:
        """Return a pool where A is out at a decode worker, and B and C wait."""
        commit_all(pool)
        assert pool.handle(said("decode-0", AskBatch(8, 1)), 0.0) == [Send("decode-0", Batch((IN_A,))), REFRESHES]
        return pool

    HOLDING = Send(ROUTER, Holding((("b", 0), ("c", 0), ("a", 0))))

    def test_of_either_kind_may_leave_no_gap_so_what_is_out_is_asked_for_now_and_then(self, pool: PoolCore) -> None:
        inquiry = Send("decode-0", Inquire((("a", 0),)))
        told = Send(ROUTER, Figures(Usage(rt=3, leased=1), holders=HOLDERS))
        assert pool.handle(TimerFired("refresh"), 5.0) == [inquiry, told, SetTimer("refresh", 10.0)]
        pool.handle(said("decode-0", Release("a", 0)), 6.0)
        assert pool.handle(TimerFired("refresh"), 10.0) == [
            Send(ROUTER, Figures(Usage(rt=2, leased=1, free=1), holders=(HOLDERS[0], HOLDERS[2])))
        ]

    def test_of_the_router_or_to_it_have_it_told_what_is_held(self, pool: PoolCore) -> None:
        assert pool.handle(said(ROUTER, Missed()), 0.0) == [self.HOLDING]
        assert pool.handle(LinkGap(ROUTER), 0.0) == [Send(ROUTER, Missed()), self.HOLDING]

    def test_of_a_decode_worker_or_to_it_have_it_asked_what_it_has(self, pool: PoolCore) -> None:
        """A lost frame may have been a Batch or a Release."""
        inquiry = Send("decode-0", Inquire((("a", 0),)))
        assert pool.handle(said("decode-0", Missed()), 0.0) == [inquiry]
        assert pool.handle(LinkGap("decode-0"), 0.0) == [Send("decode-0", Missed()), inquiry]

    def test_of_a_worker_that_has_nothing_of_ours_are_its_own_affair(self, pool: PoolCore) -> None:
        """The worker asks again, once it knows that frames were lost."""
        assert pool.handle(said("prefill-0", Missed()), 0.0) == []
        assert pool.handle(LinkGap("prefill-0"), 0.0) == [Send("prefill-0", Missed())]
        assert pool.handle(LinkGap("decode-1"), 0.0) == [Send("decode-1", Missed())]

    def test_the_router_inquires_and_hears_what_is_not_here(self, pool: PoolCore) -> None:
        asked = Inquire((("b", 0), ("b", 1), ("never", 0), ("a", 1)))
        unknown = Send(ROUTER, Progress(unknown=(("b", 1), ("never", 0), ("a", 1))))
        assert pool.handle(said(ROUTER, asked), 0.0) == [unknown]

    def test_what_is_out_its_worker_must_know(self, pool: PoolCore) -> None:
        """A worker that never got the batch releases the request, which is then nowhere."""
        asked = said(ROUTER, Inquire((("a", 0), ("c", 0))))
        assert pool.handle(asked, 0.0) == [Send("decode-0", Inquire((("a", 0),)))]
        assert pool.handle(said("decode-0", Release("a", 0)), 0.0) == []
        assert pool.handle(asked, 0.0) == [Send(ROUTER, Progress(unknown=(("a", 0),)))]

    def test_what_waits_again_since_its_worker_was_lost_is_here(self, pool: PoolCore) -> None:
        pool.handle(MemberLost(member("decode-0")), 0.0)
        assert pool.handle(said(ROUTER, Inquire((("a", 0),))), 0.0) == []

    def test_a_commit_that_was_lost_is_unknown(self, pool: PoolCore) -> None:
        assert pool.handle(said(ROUTER, Inquire((("d", 0),))), 0.0) == [Send(ROUTER, Progress(unknown=(("d", 0),)))]


def test_the_way_to_the_device_counts_when_urgency_is_decided() -> None:
    """Both requests are due at the same time; the longer request takes longer to copy."""
    core = PoolCore(8, 4, Policy(grouping=Grouping.FCFS, room=Room.WHOLE))
    asks(core, "prefill-0", 8)
    short, long = entry(request("a", prompt=2), (0,)), entry(request("b", prompt=20), (1, 2, 3))
    for waiting_entry in (short, long):
        core.handle(said("prefill-0", Commit(waiting_entry)), 0.0)
    room = AskBatch(blocks=99, requests=1, times=StepTimes(0.001, 0.002), copy_token_s=0.001)
    assert Send("decode-0", Batch((long,))) in core.handle(said("decode-0", room), 0.0)
