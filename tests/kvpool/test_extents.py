"""Pages of several kinds: numbers that tell their kind, extents that change kind only when empty, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.core import ServiceClass
from alignedserve.errors import LeaseError
from alignedserve.kvpool.memory.pages_of_kinds import CompressiblePages
from alignedserve.protocol.extents import Extents, PageBytes, PageKind
from tests.conftest import examples

EXTENTS = Extents(5, kv=2, kv_int8=3)
WORKER, OTHER = "prefill-0", "decode-0"


@given(st.builds(Extents, *(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4))))
def test_a_number_says_its_kind_and_its_place(extents: Extents) -> None:
    numbers = [
        (page, (extent, index, kind))
        for kind in extents.kinds
        for extent in range(extents.count)
        for index, page in enumerate(extents.pages(extent, kind))
    ]
    assert [page for page, _ in numbers] == list(range(extents.num_numbers))
    assert all(extents.place(page) == place for page, place in numbers)
    for outside in (-1, extents.num_numbers):
        with pytest.raises(ValueError, match="is outside"):
            extents.place(outside)


@given(kv=st.integers(1, 10**6), int8=st.integers(0, 10**6), pages=st.integers(0, 10**4))
def test_no_extent_holds_more_than_its_room(kv: int, int8: int, pages: int) -> None:
    sizes = PageBytes(kv, int8)
    extents = sizes.divide(pages)
    for kind in extents.kinds:
        assert extents.per_extent(kind) * sizes.stride(kind) <= sizes.extent(extents)
        assert sizes.stride(kind) >= sizes.payload(kind)
    assert pages - 8 < extents.num_pages(PageKind.KV) <= pages


class Machine(RuleBasedStateMachine):
    """Store, share, compress and free pages of a pool, and keep each entry's tokens beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = CompressiblePages(EXTENTS)
        self.content: dict[int, int] = {}  # page -> its newest content
        self.entries: dict[str, list[int]] = {}  # entry -> the names of its pages, which are their content
        self.classes: dict[str, ServiceClass] = {}
        self.leased: set[int] = set()
        self.compressing: dict[int, int] = {}
        self.number = 0

    @rule(
        names=st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True),
        named=st.booleans(),
        service=st.sampled_from(ServiceClass),
    )
    def store(self, names: list[int], named: bool, service: ServiceClass) -> None:
        """Store an entry; only pages with names are shared."""
        self.number += 1
        entry = f"r{self.number}"
        known = self.pages.hold(entry, names, service) if named else ()
        assert [self.content[page] for page in known] == names[: len(known)]
        lease = self.pages.lease(WORKER, len(names) - len(known))
        if lease is None:
            if known:
                self.pages.free_entry(entry)
            return
        assert all(EXTENTS.kind_of(page) is PageKind.KV for page in lease)
        self.content |= dict(zip(lease, names[len(known) :], strict=True))
        self.pages.adopt(WORKER, lease, entry, names[len(known) :] if named else (), service)
        self.entries[entry], self.classes[entry] = names, service

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.entries)))
        del self.entries[entry]
        self.pages.free_entry(entry)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), holder=st.sampled_from([WORKER, OTHER]))
    def compress(self, data: st.DataObject, holder: str) -> None:
        entry = data.draw(st.sampled_from(sorted(self.entries)))
        pages = [page for page in self.pages.pages_of(entry) if self.pages.can_compress(page)]
        room = self.pages.room_to_compress()
        into = self.pages.compress(f"{holder}/c", pages)
        assert (into is None) == (len(pages) > room)
        for page, new in zip(pages, into or (), strict=False):
            assert EXTENTS.kind_of(new) is PageKind.KV_INT8
            self.content[new] = self.content[page]
            self.compressing[page] = new
            self.leased.add(new)

    @precondition(lambda self: self.compressing)
    @rule(data=st.data(), take=st.booleans())
    def compressed(self, data: st.DataObject, take: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.compressing)))
        new = self.compressing.pop(page)
        holder = next(name for name in (f"{WORKER}/c", f"{OTHER}/c") if new in self.pages.leased_to(name))
        had = set(self.pages.entries_with(page))
        if not take:
            self.pages.cannot_compress(page)
        self.pages.compressed(holder, page, take)
        self.leased.discard(new)
        assert set(self.pages.entries_with(new if take else page)) == had
        assert not take or not set(self.pages.entries_with(page))

    @rule(page=st.integers(0, EXTENTS.num_numbers - 1))
    def found_wrong(self, page: int) -> None:
        self.pages.forget(page)

    @invariant()
    def each_page_that_there_is_is_one_thing(self) -> None:
        assert sorted(self.pages.numbers) == sorted(self.pages.all_numbers)

    @invariant()
    def each_class_has_its_pages(self) -> None:
        held: dict[ServiceClass, set[int]] = {service: set() for service in ServiceClass}
        for entry in self.entries:
            held[self.classes[entry]].update(self.pages.pages_of(entry))
        rt, be, usage = held[ServiceClass.RT], held[ServiceClass.BE], self.pages.usage
        assert (usage.rt, usage.be, usage.shared) == (len(rt - be), len(be - rt), len(rt & be))

    @invariant()
    def extents_fit(self) -> None:
        by_extent: dict[int, set[PageKind]] = {}
        for page in self.pages.all_numbers:
            extent, _, kind = EXTENTS.place(page)
            by_extent.setdefault(extent, set()).add(kind)
        assert all(len(kinds) == 1 for kinds in by_extent.values())
        assert len(by_extent) == EXTENTS.count

    @invariant()
    def what_is_counted_as_free_can_be_had(self) -> None:
        busy = {
            *self.leased,
            *self.compressing,
            *(page for entry in self.entries for page in self.pages.pages_of(entry)),
        }
        extents = {EXTENTS.place(page)[0]: EXTENTS.kind_of(page) for page in busy}
        kv = sum(1 for page in busy if EXTENTS.kind_of(page) is PageKind.KV)
        compressed = sum(1 for kind in extents.values() if kind is PageKind.KV_INT8)
        assert self.pages.num_free == EXTENTS.kv * (EXTENTS.count - compressed) - kv

    @invariant()
    def each_holder_has_its_own_tokens(self) -> None:
        for entry, names in self.entries.items():
            assert [self.content[page] for page in self.pages.pages_of(entry)] == names

    def teardown(self) -> None:
        for holder in (WORKER, OTHER):
            for page, new in list(self.compressing.items()):
                if new in self.pages.leased_to(f"{holder}/c"):
                    self.pages.compressed(f"{holder}/c", page, take=False)
            self.pages.holder_gone(f"{holder}/c")
        for entry in self.entries:
            self.pages.free_entry(entry)
        everything = self.pages.lease("last", EXTENTS.num_pages(PageKind.KV))
        assert everything is not None
        assert sorted(everything) == list(range(EXTENTS.num_pages(PageKind.KV))), "all are pages of KV again"


TestPagesOfKinds = Machine.TestCase
TestPagesOfKinds.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_a_compressed_page_keeps_its_name_and_is_not_compressed_again() -> None:
    pages = CompressiblePages(EXTENTS)
    lease = pages.lease(WORKER, 2) or ()
    pages.adopt(WORKER, lease, "a", (11, 12))
    into = pages.compress(OTHER, lease) or ()
    for page in lease:
        pages.compressed(OTHER, page, take=True)
    assert pages.pages_of("a") == into
    assert not any(map(pages.can_compress, into))
    pages.free_entry("a")
    assert pages.hold("b", (11, 12, 13)) == into


def test_pages_of_a_kind_take_an_extent_of_another_kind_only_when_it_is_empty() -> None:
    pages = CompressiblePages(Extents(2, kv=2, kv_int8=3))
    first = pages.lease(WORKER, 2) or ()
    assert first == (0, 1)
    assert pages.compress(OTHER, first) == (7, 8), "of the extent that is empty"
    assert pages.lease(WORKER, 1) is None
    pages.give_back(OTHER, [7])
    assert pages.lease(WORKER, 1) is None
    pages.give_back(OTHER, [8])
    assert pages.lease(WORKER, 2) == (2, 3)


class TestCompressedPages:
    """They go to extents that are in use: the first page of another extent costs all KV that fits there."""

    def test_begin_an_extent_when_those_in_use_are_full(self) -> None:
        pages = CompressiblePages(Extents(4, kv=4, kv_int8=7))
        full = pages.lease(WORKER, 8) or ()
        pages.adopt(WORKER, full, "a")
        for number, page in enumerate(full):
            assert pages.compress(OTHER, (page,)) is not None
            assert pages.num_free == 16 - 8 - (4 if number < 7 else 8)

    def storing(self, extents: int, names: list[int | None]) -> CompressiblePages:
        """Return pages with entries 0, 1, ... of one compressed page each, which has a name or none."""
        pages = CompressiblePages(Extents(extents, kv=2, kv_int8=3))
        for number, name in enumerate(names):
            (page,) = pages.lease(WORKER, 1) or ()
            pages.adopt(WORKER, (page,), str(number), () if name is None else (name,))
            pages.compress(OTHER, (page,))
            pages.compressed(OTHER, page, take=True)
        return pages

    def test_take_the_free_place_of_an_extent_in_use_first(self) -> None:
        """Pages with lower numbers are free, in an extent that nothing else uses."""
        pages = self.storing(4, [None] * 4)
        assert pages.pages_of("3") < pages.pages_of("0")
        pages.free_entry("3")
        pages.free_entry("0")
        pages.adopt(WORKER, pages.lease(WORKER, 1) or (), "c")
        assert pages.num_free == 5
        assert pages.compress(OTHER, pages.pages_of("c")) is not None
        assert pages.num_free == 5

    def test_replace_idle_ones_of_an_extent_in_use_first(self) -> None:
        """The pages that have been idle for longer are in an extent that nothing else uses."""
        pages = self.storing(3, [1, 2, 3, 4, 5, 6])
        for entry in "01245":
            pages.free_entry(entry)
        pages.adopt(WORKER, pages.lease(WORKER, 2) or (), "c")
        assert (pages.num_free, pages.num_idle) == (2, 5)
        assert pages.compress(OTHER, pages.pages_of("c")[:1]) is not None
        assert (pages.num_free, pages.num_idle) == (2, 4)


def test_what_is_idle_goes_for_another_kind() -> None:
    pages = CompressiblePages(Extents(2, kv=2, kv_int8=3))
    pages.adopt(WORKER, pages.lease(WORKER, 4) or (), "a", (1, 2, 3, 4))
    pages.free_entry("a")
    pages.hold("b", (1,))
    assert pages.compress(OTHER, (0,)) == (7,)
    assert pages.num_idle == 1, "the name of page 1 stays, those of the extent that became int8 do not"
    assert pages.hold("c", (1, 2, 3)) == (0, 1)


def test_a_page_that_cannot_be_int8_is_asked_for_once_in_its_life() -> None:
    pages = CompressiblePages(EXTENTS)
    (page,) = pages.lease(WORKER, 1) or ()
    pages.adopt(WORKER, (page,), "a")
    pages.compress(OTHER, (page,))
    pages.cannot_compress(page)
    pages.compressed(OTHER, page, take=False)
    assert not pages.can_compress(page)
    pages.free_entry("a")
    assert pages.lease(WORKER, 1) == (page,)
    pages.adopt(WORKER, (page,), "b")
    assert pages.can_compress(page)


def test_a_page_that_is_being_compressed_is_free_for_nobody() -> None:
    pages = CompressiblePages(Extents(2, kv=2, kv_int8=3))
    pages.adopt(WORKER, pages.lease(WORKER, 2) or (), "a")
    pages.compress(OTHER, (0,))
    pages.free_entry("a")
    assert pages.lease(WORKER, 2) is None
    pages.compressed(OTHER, 0, take=True)
    assert pages.pages_of("a") == ()
    assert pages.lease(WORKER, 4) is not None


def test_only_what_is_leased_is_taken() -> None:
    pages = CompressiblePages(EXTENTS)
    pages.adopt(WORKER, pages.lease(WORKER, 1) or (), "a")
    pages.compress(OTHER, (0,))
    with pytest.raises(LeaseError, match="are not leased to somebody"):
        pages.compressed("somebody", 0, take=True)
