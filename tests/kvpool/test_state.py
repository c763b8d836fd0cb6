"""The pool: pages are somebody's or free, and those who came first leave first."""

from __future__ import annotations

import pytest

from alignedserve.kvpool.state import PoolCore
from alignedserve.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    Batch,
    Cancel,
    Command,
    Commit,
    HolderGone,
    Holding,
    LeasePages,
    MemberJoined,
    MemberLost,
    Progress,
    Release,
    ReturnPages,
    Send,
    WatchHolder,
)
from tests.samples import ROUTER_MEMBER, entry, member, next_attempt, request, said

A, B, C = request("a"), request("b"), request("c")  # each takes two pairs of a decode worker
IN_A, IN_B, IN_C = entry(A, (0,)), entry(B, (1,)), entry(C, (2,))
NOTHING_HELD = {"entries": 0, "pages": 0, "unanswered asks": 0}


@pytest.fixture
def pool() -> PoolCore:
    """Its four pages are leased to one prefill worker."""
    core = PoolCore(num_pages=4, block_size=4)
    asked = core.handle(said("prefill-0", AskPages(4)), 0.0)
    assert asked == [Send("prefill-0", LeasePages((0, 1, 2, 3)))]
    return core


def committed(*names: str) -> Command:
    return Send(ROUTER, Progress(committed=tuple((name, 0) for name in names)))


def commit_all(pool: PoolCore) -> None:
    for one in (IN_A, IN_B, IN_C):
        assert pool.handle(said("prefill-0", Commit(one)), 0.0) == [committed(one.request.id)]


def test_pages_are_leased_in_the_order_of_asking(pool: PoolCore) -> None:
    assert pool.handle(said("prefill-1", AskPages(3)), 0.0) == []
    assert pool.handle(said("prefill-2", AskPages(1)), 0.0) == []
    assert pool.handle(said("prefill-0", ReturnPages((0, 1))), 0.0) == []
    assert pool.handle(said("prefill-0", ReturnPages((2, 3))), 0.0) == [
        Send("prefill-1", LeasePages((3, 2, 1))),
        Send("prefill-2", LeasePages((0,))),
    ]


def test_a_batch_is_those_that_came_first_as_far_as_they_fit(pool: PoolCore) -> None:
    commit_all(pool)
    assert pool.handle(said("decode-0", AskBatch(pairs=5, requests=9)), 0.0) == [Send("decode-0", Batch((IN_A, IN_B)))]
    assert pool.handle(said("decode-1", AskBatch(pairs=9, requests=1)), 0.0) == [Send("decode-1", Batch((IN_C,)))]


def test_nobody_overtakes_one_that_does_not_fit(pool: PoolCore) -> None:
    long = entry(request("long", max_tokens=30), (3,))
    pool.handle(said("prefill-0", Commit(long)), 0.0)
    pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
    assert pool.handle(said("decode-0", AskBatch(pairs=4, requests=9)), 0.0) == []


def test_who_asks_before_there_is_anything_gets_the_next(pool: PoolCore) -> None:
    assert pool.handle(said("decode-0", AskBatch(8, 2)), 0.0) == []
    assert pool.handle(said("prefill-0", Commit(IN_A)), 0.0) == [Send("decode-0", Batch((IN_A,))), committed("a")]
    assert pool.handle(said("prefill-0", Commit(IN_B)), 0.0) == [committed("b")]


def test_released_pages_are_free(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
    pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
    pool.handle(said("prefill-1", AskPages(1)), 0.0)
    assert pool.handle(said("decode-0", Release("a", 1)), 0.0) == []
    assert pool.handle(said("decode-0", Release("a", 0)), 0.0) == [Send("prefill-1", LeasePages((0,)))]
    assert pool.handle(said("decode-0", Release("a", 0)), 0.0) == []
    assert pool.held == NOTHING_HELD


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


def test_a_next_attempt_takes_the_place_of_the_one_before(pool: PoolCore) -> None:
    again = entry(next_attempt(A), (1,))
    pool.handle(said("prefill-0", Commit(IN_A)), 0.0)
    pool.handle(said("prefill-0", Commit(again)), 0.0)
    assert pool.held == {"entries": 1, "pages": 1, "unanswered asks": 0}
    assert pool.handle(said("decode-0", AskBatch(8, 2)), 0.0) == [Send("decode-0", Batch((again,)))]


def test_a_lost_workers_lease_ends_when_its_lock_is_free(pool: PoolCore) -> None:
    """Not when it is taken for dead: it may still be writing."""
    pool.handle(said("prefill-1", AskPages(1)), 0.0)
    assert pool.handle(MemberLost(member("prefill-0")), 0.0) == [WatchHolder("prefill-0.1")]
    assert pool.handle(HolderGone("prefill-0.1"), 0.0) == [Send("prefill-1", LeasePages((3,)))]


def test_a_later_life_is_another_holder(pool: PoolCore) -> None:
    pool.handle(MemberLost(member("prefill-0")), 0.0)
    assert pool.handle(said("prefill-0", AskPages(4), incarnation=2), 0.0) == []
    assert pool.handle(HolderGone("prefill-0.1"), 0.0) == [Send("prefill-0", LeasePages((3, 2, 1, 0)))]


def test_what_a_lost_decode_worker_had_is_first_in_the_next_batch(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 1)), 0.0)
    for one in (IN_A, IN_B):
        pool.handle(said("prefill-0", Commit(one)), 0.0)
    assert pool.handle(MemberLost(member("decode-0")), 0.0) == [WatchHolder("decode-0.1")]
    assert pool.handle(said("decode-1", AskBatch(8, 2)), 0.0) == [Send("decode-1", Batch((IN_A, IN_B)))]


def test_what_a_lost_worker_asked_for_it_does_not_get(pool: PoolCore) -> None:
    pool.handle(said("decode-0", AskBatch(8, 2)), 0.0)
    pool.handle(said("prefill-1", AskPages(1)), 0.0)
    pool.handle(MemberLost(member("decode-0")), 0.0)
    pool.handle(MemberLost(member("prefill-1")), 0.0)
    assert pool.handle(said("prefill-0", ReturnPages((3,))), 0.0) == []
    assert pool.handle(said("prefill-0", Commit(IN_A)), 0.0) == [committed("a")]


def test_a_new_router_hears_what_is_held(pool: PoolCore) -> None:
    commit_all(pool)
    pool.handle(said("decode-0", AskBatch(8, 1)), 0.0)
    holding = Holding((("b", 0), ("c", 0), ("a", 0)))
    assert pool.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, holding)]
