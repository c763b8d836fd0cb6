"""Some pages are for real-time requests only: best-effort requests never have them, whatever the order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError
from alignedserve.forms.pool.pages import CompressiblePages
from alignedserve.forms.pool.table import pages_of
from alignedserve.kvpool.arena.extents import Extents, PageKind
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.kvpool.state import PoolCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import AskPages, AskPrefix, Cancel, Commit, LeasePages, Message, Prefix, Release
from alignedserve.scheduling.policy import Grouping, Policy
from tests.conftest import examples
from tests.samples import entry, request, said

RT, BE = ServiceClass.RT, ServiceClass.BE
NUM_PAGES, NUM_RESERVED = 10, 3
CLASSES = st.sampled_from([RT, BE])
NAMES = st.lists(st.integers(0, 5), max_size=5, unique=True)


class _AnyClasses(RuleBasedStateMachine):
    """Check the pages against the simplest account: a set of (class, name) for each page."""

    extents: Extents
    pages: Pages

    def __init__(self) -> None:
        super().__init__()
        self.pages = pages_of(self.extents, NUM_RESERVED)
        self.leased: dict[int, ServiceClass] = {}
        self.entries: dict[str, ServiceClass] = {}
        self.number = 0

    @property
    def best_effort(self) -> set[int]:
        held = {page for name, service in self.entries.items() if service is BE for page in self.pages.pages_of(name)}
        return held | {page for page, service in self.leased.items() if service is BE}

    @rule(service=CLASSES, count=st.integers(0, NUM_PAGES), more=st.integers(0, NUM_PAGES))
    def lease(self, service: ServiceClass, count: int, more: int) -> None:
        free = self.pages.num_free
        room = free if service is RT else max(0, free - NUM_RESERVED)
        pages = self.pages.lease("worker", count, service, count + more)
        assert (pages is None) == (count > room)
        if pages is not None:
            assert len(pages) == min(count + more, max(count, room))
            self.leased.update(dict.fromkeys(pages, service))

    @precondition(lambda self: self.leased)
    @rule(service=CLASSES, data=st.data(), names=NAMES)
    def commit(self, service: ServiceClass, data: st.DataObject, names: list[int]) -> None:
        """Commit pages that are leased for the class, with names that other entries may have stored."""
        mine = sorted(page for page, of in self.leased.items() if of is service)
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.number += 1
        self.pages.adopt("worker", pages, f"r{self.number}", names, service)
        self.entries[f"r{self.number}"] = service
        for page in pages:
            del self.leased[page]

    @rule(service=CLASSES, names=NAMES)
    def hold(self, service: ServiceClass, names: list[int]) -> None:
        """Hold a prompt that begins as others did; a real-time prompt gets all of its beginning that is stored."""
        self.number += 1
        if self.pages.hold(f"r{self.number}", names, service):
            self.entries[f"r{self.number}"] = service

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.entries)))
        self.pages.free_entry(name)
        del self.entries[name]

    @rule(service=CLASSES, kept=st.lists(st.integers(0, NUM_PAGES - 1)))
    def keep_only(self, service: ServiceClass, kept: list[int]) -> None:
        self.pages.keep_only("worker", kept, service)
        self.leased = {page: of for page, of in self.leased.items() if of is not service or page in kept}

    @rule()
    def worker_gone(self) -> None:
        self.pages.holder_gone("worker")
        self.leased.clear()

    @precondition(lambda self: any(of is RT for of in self.leased.values()))
    @rule(data=st.data())
    def what_is_leased_for_real_time_is_for_nobody_else(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(page for page, of in self.leased.items() if of is RT)))
        with pytest.raises(LeaseError, match="for real-time requests only"):
            self.pages.adopt("worker", [page], "thief", service=BE)

    @invariant()
    def best_effort_has_nothing_of_the_reserve(self) -> None:
        """An extent of int8 pages with a best-effort page is unavailable to requests that need KV pages."""
        places = {self.extents.place(page) for page in self.best_effort}
        alone = sum(kind is PageKind.KV for _, _, kind in places)
        extents = {extent for extent, _, kind in places if kind is PageKind.KV_INT8}
        assert self.pages.best_effort == alone + self.extents.kv * len(extents) <= NUM_PAGES - NUM_RESERVED

    @invariant()
    def each_page_is_there_once(self) -> None:
        assert sorted(self.pages.numbers) == sorted(self.pages.all_numbers)

    def teardown(self) -> None:
        """Check that the reserve is free when real-time requests have left, whatever other requests remain."""
        for name in [name for name, service in self.entries.items() if service is RT]:
            self.pages.free_entry(name)
            del self.entries[name]
        self.pages.keep_only("worker", (), RT)
        reserve = self.pages.lease("chat", NUM_RESERVED)
        assert reserve is not None
        self.pages.give_back("chat", reserve)
        for name in self.entries:
            self.pages.free_entry(name)
        self.pages.holder_gone("worker")
        assert self.pages.lease("last", NUM_PAGES) is not None


class Classes(_AnyClasses):
    extents = Extents(NUM_PAGES)

    @invariant()
    def each_page_is_one_thing(self) -> None:
        held = {service: set[int]() for service in (RT, BE)}
        for name, service in self.entries.items():
            held[service] |= set(self.pages.pages_of(name))
        idle, leased, free = self.pages.num_idle, len(self.leased), self.pages.num_free - self.pages.num_idle
        both = len(held[RT] & held[BE])
        assert self.pages.usage == Usage(len(held[RT]) - both, len(held[BE]) - both, both, idle, leased, free)


class ClassesOfKinds(_AnyClasses):
    """The same checks while pages of waiting requests are compressed to int8."""

    extents = Extents(NUM_PAGES // 2, kv=2, kv_int8=3)
    pages: CompressiblePages

    def __init__(self) -> None:
        super().__init__()
        self.compressing: dict[int, int] = {}

    @property
    def best_effort(self) -> set[int]:
        return super().best_effort | set(self.compressing.values())

    @rule(service=CLASSES, count=st.integers(1, 4))
    def becomes_int8(self, service: ServiceClass, count: int) -> None:
        pages = self._stored(count, service)
        for page in pages if self.pages.compress("another", pages) else ():
            self.pages.compressed("another", page, take=True)

    @rule(left=st.integers(0, NUM_RESERVED + 2), count=st.integers(1, 2))
    def room_is_short(self, left: int, count: int) -> None:
        """Fill the pool with real-time requests but for `left` pages, and compress a waiting request's pages."""
        self._stored(max(0, self.pages.num_free - left - count), RT)
        pages = self._stored(count, RT)
        free = self.pages.num_free
        for page in pages if self.pages.compress("another", pages) else ():
            assert self.pages.num_free >= min(free, NUM_RESERVED)
            self.pages.compressed("another", page, take=True)

    def _stored(self, count: int, service: ServiceClass) -> tuple[int, ...]:
        pages = self.pages.lease("another", count, service)
        if pages:
            self.number += 1
            self.pages.adopt("another", pages, f"r{self.number}", service=service)
            self.entries[f"r{self.number}"] = service
        return pages or ()

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), most=st.integers(1, 4))
    def compress(self, data: st.DataObject, most: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.entries)))
        pages = [page for page in self.pages.pages_of(name) if self.pages.can_compress(page)][:most]
        free, room, begun = self.pages.num_free, self.pages.room_to_compress(), self.pages.room_to_compress(begun=True)
        into = self.pages.compress("worker/compressing", pages)
        assert (into is None) == (len(pages) > room)
        assert self.pages.num_free >= min(free, NUM_RESERVED), "what is reserved is not begun"
        assert self.pages.num_free == free or len(pages) > begun or free >= NUM_RESERVED + 2
        self.compressing |= dict(zip(pages, into or (), strict=False))

    @precondition(lambda self: self.compressing)
    @rule(data=st.data(), take=st.booleans())
    def compressed(self, data: st.DataObject, take: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.compressing)))
        del self.compressing[page]
        self.pages.compressed("worker/compressing", page, take)

    def teardown(self) -> None:
        for page in self.compressing:
            self.pages.compressed("worker/compressing", page, take=False)
        super().teardown()


TestClasses, TestClassesOfKinds = Classes.TestCase, ClassesOfKinds.TestCase
TestClasses.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestClassesOfKinds.settings = TestClasses.settings


class TestBeginningAnExtentOfInt8:
    EXTENTS = Extents(4, kv=4, kv_int8=7)

    def test_is_for_when_those_in_use_are_full(self) -> None:
        pages = CompressiblePages(self.EXTENTS)
        full = pages.lease("worker", 8) or ()
        pages.adopt("worker", full, "a")
        (first,) = pages.compress("one", full[:1]) or ()
        (second,) = pages.compress("two", full[1:2]) or ()
        extent = self.EXTENTS.place(first)[0]
        assert self.EXTENTS.place(second)[0] == extent
        assert pages.num_free == 16 - 8 - 4

    def test_of_the_same_kind_that_nobody_has_a_page_of_is_beginning_it_too(self) -> None:
        """Free int8 pages with lower numbers are there; taking one of these would take four pages of the reserve."""
        extents = Extents(6, kv=4, kv_int8=7)
        pages = CompressiblePages(extents, num_reserved=6)
        full = pages.lease("worker", 8, BE) or ()
        pages.adopt("worker", full[:7], "a", service=BE)
        pages.adopt("worker", full[7:], "b", service=BE)
        assert pages.compress("one", full) is not None
        for page in full:
            pages.compressed("one", page, take=True)
        assert pages.pages_of("b") < pages.pages_of("a")
        pages.free_entry("b")
        chat = pages.lease("worker", 15) or ()
        pages.adopt("worker", chat, "chat")
        assert (pages.num_free, pages.room_to_compress()) == (5, 0)
        pages.shorten("a", 6)
        (new,) = pages.compress("one", chat[:1]) or ()
        assert extents.place(new)[0] == extents.place(pages.pages_of("a")[0])[0]
        assert pages.num_free == 5

    def test_does_not_come_before_idle_pages_where_the_reserve_would_suffer(self) -> None:
        pages = CompressiblePages(self.EXTENTS, num_reserved=6)
        full = pages.lease("worker", 4) or ()
        pages.adopt("worker", full[:2], "a", (1, 2))
        pages.adopt("worker", full[2:], "b", (3, 4))
        assert pages.compress("one", full) is not None
        for page in full:
            pages.compressed("one", page, take=True)
        pages.free_entry("b")
        chat = pages.lease("worker", 5) or ()
        pages.adopt("worker", chat, "chat", (5, 6, 7, 8, 9))
        assert (pages.num_free, pages.num_idle) == (7, 2)
        assert pages.compress("one", chat) is not None
        assert (pages.num_free, pages.num_idle) == (7, 0)

    def test_an_extent_with_only_real_time_pages_stays_real_time_when_room_is_short(self) -> None:
        pages = CompressiblePages(self.EXTENTS, num_reserved=6)
        full = pages.lease("worker", 6) or ()
        pages.adopt("worker", full[:1], "chat")
        assert pages.compress("one", full[:1]) is not None
        pages.compressed("one", full[0], take=True)
        assert pages.best_effort == 0, "nobody's but the chat's"
        more = pages.lease("worker", 4) or ()
        pages.adopt("worker", (*full[1:], *more), "others")
        assert pages.num_free == 3
        assert pages.room_to_compress() == 0
        pages.free_entry("chat")
        assert pages.num_free == 7


@pytest.fixture
def pool() -> PoolCore:
    """Return a pool in which two of eight pages are for real-time requests only."""
    return PoolCore(8, 4, Policy(grouping=Grouping.FCFS, rt_reserve=0.25))


def say(pool: PoolCore, worker: str, message: Message) -> list[Command]:
    return pool.handle(said(worker, message), 0.0)


def asks(pool: PoolCore, worker: str, pages: int, service: ServiceClass, number: int = 1, most: int = 0) -> list[int]:
    """Ask for pages, and return the numbers of pages that workers are leased in answer."""
    commands = say(pool, worker, AskPages(pages, number, (), service, most))
    return [
        len(command.message.pages)
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, LeasePages)
    ]


def test_best_effort_waits_where_real_time_goes_on(pool: PoolCore) -> None:
    assert asks(pool, "prefill-0", 5, BE) == [5]
    assert asks(pool, "prefill-1", 2, BE) == [], "one page is left for it, two are reserved"
    assert asks(pool, "prefill-2", 3, RT) == [3]
    assert pool.pages.usage == Usage(leased=8)
    assert asks(pool, "prefill-0", 0, BE, number=2) == [2, 0], "as soon as there is room"


def test_while_a_real_time_ask_waits_no_best_effort_ask_is_answered(pool: PoolCore) -> None:
    """An answer to the best-effort ask would take pages that the real-time ask waits for."""
    assert asks(pool, "prefill-0", 6, RT) == [6]
    assert asks(pool, "prefill-1", 3, RT) == []
    assert asks(pool, "prefill-2", 0, BE) == []
    assert asks(pool, "prefill-0", 2, RT, number=2) == [3, 2, 0]


def test_as_many_as_there_are_up_to_what_could_be_used(pool: PoolCore) -> None:
    assert asks(pool, "prefill-0", 1, BE, most=4) == [4]
    assert asks(pool, "prefill-1", 1, BE, most=9) == [2]
    assert asks(pool, "prefill-2", 1, BE, most=9) == []


def stored(pool: PoolCore, name: str, service: ServiceClass, names: tuple[int, ...]) -> None:
    """Commit an entry of pages with these names, as a worker does."""
    (lease,) = say(pool, "prefill-9", AskPages(len(names), 1, (), service))
    assert isinstance(lease, Send)
    assert isinstance(lease.message, LeasePages)
    of = replace(request(name), service=service)
    say(pool, "prefill-9", Commit(replace(entry(of, lease.message.pages), names=names)))


def idle(pool: PoolCore, *names: int) -> None:
    stored(pool, "before", BE, names)
    say(pool, "decode-0", Release("before", 0))
    pool.handle(said("router", Cancel("before", 0)), 0.0)


def held(pool: PoolCore, name: str, names: tuple[int, ...], service: ServiceClass) -> int:
    (answer,) = [
        command for command in say(pool, "prefill-0", AskPrefix(name, 0, names, service)) if isinstance(command, Send)
    ]
    assert isinstance(answer.message, Prefix)
    return len(answer.message.pages)


def test_best_effort_holds_no_beginning_that_would_take_of_the_reserve(pool: PoolCore) -> None:
    idle(pool, 1, 2, 3, 4)
    assert asks(pool, "prefill-1", 3, RT) == [3]
    assert held(pool, "flex", (1, 2, 3, 4), BE) == 3
    assert held(pool, "chat", (1, 2, 3, 4), RT) == 4


def test_what_best_effort_holds_is_taken_back_before_what_real_time_does(pool: PoolCore) -> None:
    idle(pool, 1, 2, 3, 4)
    assert held(pool, "chat", (1, 2), RT) == 2
    assert held(pool, "flex", (1, 2, 3, 4), BE) == 4
    taken, lease = say(pool, "prefill-1", AskPages(5))[:2]
    assert taken == Send("prefill-0", Prefix("flex", 0, ()))
    assert isinstance(lease, Send)
    assert isinstance(lease.message, LeasePages)
    assert "chat" in pool.kept


def test_best_effort_takes_nothing_back_from_real_time(pool: PoolCore) -> None:
    idle(pool, 1, 2, 3, 4)
    assert held(pool, "chat", (1, 2, 3, 4), RT) == 4
    assert asks(pool, "prefill-1", 3, BE) == []
    assert "chat" in pool.kept
    assert asks(pool, "prefill-1", 5, RT) == [5]
    assert "chat" not in pool.kept


class TestIdleInt8Pages:
    """The first page taken from an extent of idle int8 pages makes the whole extent unavailable for KV pages."""

    NAMES = (1, 2, 3, 4)

    @pytest.fixture
    def pages(self) -> CompressiblePages:
        """Return pages where one of four extents of four KV pages holds idle int8 pages; six pages are reserved."""
        core = CompressiblePages(Extents(4, kv=4, kv_int8=7), 6)
        leased = core.lease("worker", 4) or ()
        core.adopt("worker", leased, "before", self.NAMES)
        assert core.compress("worker", leased) is not None
        for page in leased:
            core.compressed("worker", page, take=True)
        core.free_entry("before")
        return core

    def test_are_held_for_best_effort_as_far_as_the_reserve_stays(self, pages: CompressiblePages) -> None:
        pages.lease("worker", 8)
        assert pages.hold("flex", self.NAMES, BE) == ()
        assert pages.num_free == 8
        assert len(pages.hold("chat", self.NAMES, RT)) == 4

    def test_are_held_for_best_effort_while_there_is_room(self, pages: CompressiblePages) -> None:
        pages.lease("worker", 3)
        assert len(pages.hold("flex", self.NAMES, BE)) == 4

    def test_take_the_place_of_new_ones_as_far_as_the_reserve_stays(self, pages: CompressiblePages) -> None:
        pages.lease("worker", 7)
        pages.adopt("worker", pages.lease("worker", 2, BE) or (), "flex", self.NAMES[:2], BE)
        assert pages.num_free == 7
        assert {pages.extents.kind_of(page) for page in pages.pages_of("flex")} == {PageKind.KV}
        assert pages.hold("chat", self.NAMES[:2]) == pages.pages_of("flex"), "they have the names now"
        assert sorted(pages.numbers) == sorted(pages.all_numbers)
