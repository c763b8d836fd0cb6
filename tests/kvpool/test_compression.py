"""Compression: the requests and the workers chosen, and what follows when pages, workers or answers are lost."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.kvpool.memory.compression import AT_ONCE
from alignedserve.kvpool.state import PoolCore
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import HolderGone, MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.extents import Extents, PageKind
from alignedserve.protocol.form_messages import Compress, Compressed
from alignedserve.protocol.messages import (
    AskBatch,
    AskPages,
    AskPrefix,
    Batch,
    Commit,
    Figures,
    Missed,
    Prefix,
    Release,
)
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Grouping, Policy
from alignedserve.scheduling.slo import StepTimes
from tests.samples import entry, member, request, said

EXTENTS = Extents(8, kv=2, kv_int8=3)
PREFILL, DECODE = member("prefill-0"), member("decode-0")


def pool_of(mode: Compression = Compression.INT8, *, fcfs: bool = False, extents: Extents = EXTENTS) -> PoolCore:
    scheduler = SchedulerName.FCFS if fcfs else SchedulerName.BROS
    core = PoolCore(extents, 4, Policy(scheduler, grouping=Grouping.FCFS, compression=mode))
    core.handle(MemberJoined(PREFILL), 0.0)
    return core


def stores(pool: PoolCore, name: str, pages: int, names: tuple[int, ...] = (), now: float = 0.0) -> list[Command]:
    """Store a request, whose last page is not full unless all pages have names."""
    leased = pool.handle(said("prefill-0", AskPages(pages, int(now * 100) + 1)), now)
    lease = tuple(sorted(pool.pages.leased_to(PREFILL.holder)))[:pages]
    assert len(lease) == pages
    stored = Commit(replace(entry(request(name), lease), names=names))
    return leased + pool.handle(said("prefill-0", stored), now)


def orders(commands: list[Command]) -> dict[str, Compress]:
    return {
        command.to: command.message
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Compress)
    }


def answers(pool: PoolCore, order: Compress, *done: bool, worker: str = "prefill-0") -> list[Command]:
    return pool.handle(said(worker, Compressed(order.number, done)), 1.0)


def takes(pool: PoolCore) -> Batch:
    commands = pool.handle(said("decode-0", AskBatch(blocks=99, requests=1)), 1.0)
    (batch,) = [
        command.message for command in commands if isinstance(command, Send) and isinstance(command.message, Batch)
    ]
    return batch


def kinds(pool: PoolCore, name: str) -> list[PageKind]:
    return [EXTENTS.kind_of(page) for page in pool.pages.pages_of(name)]


def test_full_pages_of_waiting_requests_are_compressed_and_the_last_page_stays() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    assert order.pages == pool.pages.pages_of("a")[:2]
    assert kinds(pool, "a") == [PageKind.KV] * 3
    answers(pool, order, True, True)
    assert kinds(pool, "a") == [PageKind.KV_INT8, PageKind.KV_INT8, PageKind.KV]
    assert takes(pool).entries[0].pages == pool.pages.pages_of("a"), "who runs it hears of its pages as they are"
    assert (pool.rewriting.num_rewritten, pool.rewriting.num_refused, pool.num_lent_pages) == (2, 0, 0)
    pool.handle(said("decode-0", Release("a", 0)), 2.0)
    assert not any(pool.held.values())


def test_off_commands_nothing_and_nor_does_auto_while_there_is_room() -> None:
    assert not orders(stores(pool_of(Compression.OFF, extents=Extents(16)), "a", 3))
    assert not orders(stores(pool_of(Compression.AUTO), "a", 3))


def test_under_pressure_the_request_with_longest_to_wait_comes_first() -> None:
    pool = pool_of(Compression.AUTO, fcfs=True)
    pool.handle(said("decode-0", AskBatch(0, 0, StepTimes(0.1, 0.1), most_requests=4)), 0.0)
    for number in range(3):
        assert not orders(stores(pool, f"r{number}", 4, now=0.1 * number))
    order = orders(stores(pool, "r3", 1, now=0.4))["prefill-0"]
    assert order.pages == pool.pages.pages_of("r2")[:3], "as many as find room where an extent is empty"
    assert not orders(answers(pool, order, True, True, True)), "a quarter is free again"


def test_no_extent_is_given_up_for_fewer_pages_than_it_had() -> None:
    pool = pool_of(Compression.AUTO, extents=Extents(4, kv=2, kv_int8=3))
    for number in range(3):
        assert not orders(stores(pool, f"r{number}", 2, now=0.1 * number)) or number == 2
    small = pool_of(Compression.AUTO, extents=Extents(2, kv=2, kv_int8=3))
    assert not orders(stores(small, "a", 2)), "one page that is full, and an extent that holds two"


def test_an_order_is_no_larger_than_a_worker_does_between_two_steps() -> None:
    pool = pool_of(extents=Extents(20, kv=2, kv_int8=3))
    order = orders(stores(pool, "a", 20))["prefill-0"]
    assert len(order.pages) == AT_ONCE
    following = orders(answers(pool, order, *[True] * AT_ONCE))["prefill-0"]
    assert following.pages == pool.pages.pages_of("a")[AT_ONCE : 2 * AT_ONCE]
    assert following.number > order.number


def test_an_order_for_pages_of_several_requests_is_no_larger_either() -> None:
    pool = pool_of(extents=Extents(20, kv=2, kv_int8=3))
    first = orders(stores(pool, "a", 2))["prefill-0"]
    for number, name in enumerate("bcd", 1):
        assert not orders(stores(pool, name, 6, now=0.1 * number)), "the worker has something to do"
    assert len(orders(answers(pool, first, True))["prefill-0"].pages) == AT_ONCE


def test_workers_take_turns() -> None:
    pool = pool_of()
    pool.handle(MemberJoined(DECODE), 0.0)
    assert set(orders(stores(pool, "a", 2))) == {"prefill-0"}
    assert set(orders(stores(pool, "b", 2, now=0.1))) == {"decode-0"}
    assert not orders(stores(pool, "c", 2, now=0.2)), "both have something to do"


def test_what_left_meanwhile_keeps_the_pages_that_it_was_told_of() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 2))["prefill-0"]
    pages = takes(pool).entries[0].pages
    answers(pool, order, True)
    assert pool.pages.pages_of("a") == pages
    assert (pool.num_lent_pages, pool.rewriting.num_rewritten) == (0, 0)


def test_a_shared_page_is_compressed_only_while_none_of_its_holders_runs() -> None:
    pool = pool_of()
    pool.handle(MemberLost(PREFILL), 0.0)
    stores(pool, "a", 2, names=(11, 12))
    pool.handle(said("prefill-1", AskPrefix("b", 0, (11, 12, 13))), 0.5)
    order = orders(pool.handle(MemberJoined(PREFILL), 0.6))
    assert not order, "a prompt that runs begins with them"
    order = orders(pool.handle(said("prefill-1", Release("b", 0)), 0.7))
    assert order["prefill-0"].pages == pool.pages.pages_of("a")


def test_a_request_that_was_passed_over_is_looked_at_again_at_most_once_a_second() -> None:
    pool = pool_of()
    pool.handle(said("prefill-1", AskPrefix("b", 0, (11, 12, 13))), 0.0)
    pool.handle(MemberLost(PREFILL), 0.0)
    stores(pool, "a", 2, names=(11, 12))
    pool.handle(said("prefill-1", AskPrefix("b", 1, (11, 12, 13))), 0.5)
    assert not orders(pool.handle(MemberJoined(PREFILL), 0.6))
    assert not orders(pool.handle(TimerFired("refresh"), 5.0)), "b has its pages still"
    assert not orders(pool.handle(said("prefill-1", Release("b", 1)), 5.5))
    order = orders(pool.handle(TimerFired("refresh"), 6.0))["prefill-0"]
    assert order.pages == pool.pages.pages_of("a")


def test_pages_of_an_order_that_were_not_taken_are_ordered_again() -> None:
    """A running request had the pages when the answer came."""
    pool = pool_of()
    order = orders(stores(pool, "a", 2, names=(11, 12)))["prefill-0"]
    pool.handle(said("prefill-1", AskPrefix("b", 0, (11, 12, 13))), 0.5)
    assert not orders(answers(pool, order, True, True))
    assert kinds(pool, "a") == [PageKind.KV, PageKind.KV]
    again = orders(pool.handle(said("prefill-1", Release("b", 0)), 2.0))["prefill-0"]
    assert (again.pages, again.number) == (order.pages, order.number + 1)


def test_pages_of_an_order_that_died_with_its_worker_are_ordered_of_another() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    pool.handle(MemberJoined(DECODE), 0.5)
    pool.handle(MemberLost(PREFILL), 1.0)
    again = orders(pool.handle(HolderGone(PREFILL.holder), 2.0))["decode-0"]
    assert again.pages == order.pages


def test_a_page_that_is_named_keeps_its_name() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 2, names=(11, 12)))["prefill-0"]
    answers(pool, order, True, True)
    known = pool.handle(said("prefill-1", AskPrefix("b", 0, (11, 12, 13))), 2.0)
    assert isinstance(known[0], Send)
    assert isinstance(known[0].message, Prefix)
    assert known[0].message.pages == order.into


def test_what_cannot_be_int8_is_counted_and_not_asked_for_again() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    assert not orders(answers(pool, order, True, False))
    assert kinds(pool, "a") == [PageKind.KV_INT8, PageKind.KV, PageKind.KV]
    assert pool.rewriting.num_refused == 1
    assert not orders(stores(pool, "b", 1, now=0.5))


def test_the_counts_are_told_with_the_pool_s_figures() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    answers(pool, order, True, False)
    takes(pool)
    (told,) = [
        command.message
        for command in pool.handle(TimerFired("refresh"), 5.0)
        if isinstance(command, Send) and isinstance(command.message, Figures)
    ]
    assert (told.num_compressed, told.num_incompressible) == (1, 1)


def test_an_order_is_said_again_until_it_is_answered() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    assert orders(pool.handle(TimerFired("refresh"), 5.0)) == {"prefill-0": order}
    assert orders(pool.handle(said("prefill-0", Missed()), 6.0)) == {"prefill-0": order}
    answers(pool, order, True, True)
    answers(pool, order, True, True)
    assert pool.rewriting.num_rewritten == 2
    assert not orders(pool.handle(TimerFired("refresh"), 10.0))


def test_a_lost_worker_may_still_write_until_its_lock_is_free() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    pool.handle(MemberLost(PREFILL), 1.0)
    assert not orders(pool.handle(TimerFired("refresh"), 5.0))
    assert pool.num_lent_pages == 2
    pool.handle(MemberJoined(member("prefill-0", 2)), 6.0)
    assert not orders(pool.handle(TimerFired("refresh"), 10.0)), "another life must not write there"
    later = said("prefill-0", Compressed(order.number, (True, True)), incarnation=2)
    pool.handle(later, 10.5)
    assert kinds(pool, "a") == [PageKind.KV] * 3
    again = orders(pool.handle(HolderGone(PREFILL.holder), 11.0))
    assert kinds(pool, "a") == [PageKind.KV] * 3
    assert pool.num_lent_pages == sum(len(order.into) for order in again.values())


def test_a_worker_that_was_only_taken_for_dead_goes_on() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    pool.handle(MemberLost(PREFILL), 1.0)
    pool.handle(MemberJoined(PREFILL), 2.0)
    assert orders(pool.handle(TimerFired("refresh"), 5.0)) == {"prefill-0": order}
    answers(pool, order, True, True)
    assert kinds(pool, "a") == [PageKind.KV_INT8, PageKind.KV_INT8, PageKind.KV]


def test_what_ends_meanwhile_is_free_when_the_worker_has_answered() -> None:
    pool = pool_of()
    order = orders(stores(pool, "a", 3))["prefill-0"]
    takes(pool)
    pool.handle(said("decode-0", Release("a", 0)), 2.0)
    assert pool.pages.num_free == 16 - 2 - 2, "two that it reads, and the extent that it writes to"
    answers(pool, order, True, True)
    assert pool.pages.num_free == 16
    assert not any(pool.held.values())
