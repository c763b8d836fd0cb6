"""Page numbers: every page has one owner, whatever the order of events."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.errors import LeaseError
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.protocol.page_names import chained_hashes
from tests.conftest import examples

NUM_PAGES = 12
HOLDERS = st.sampled_from(["prefill0", "prefill1", "decode0"])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


class PagesMachine(RuleBasedStateMachine):
    """Compare the accounts under test with the simplest account: the owner of page 0, page 1, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(NUM_PAGES)
        self.owners: dict[int, tuple[str, str]] = {}  # page -> ("holder" or "entry", name); no free pages
        self.num_entries = 0

    def owned(self, kind: str, name: str) -> list[int]:
        return [page for page, owner in self.owners.items() if owner == (kind, name)]

    def free(self, pages: list[int]) -> None:
        for page in pages:
            del self.owners[page]

    @rule(holder=HOLDERS, count=st.integers(0, NUM_PAGES + 1))
    def lease(self, holder: str, count: int) -> None:
        enough = count <= NUM_PAGES - len(self.owners)
        leased = self.pages.lease(holder, count)
        if not enough:
            assert leased is None
            return
        assert leased is not None
        assert len(set(leased)) == count
        assert set(leased) <= set(range(NUM_PAGES)) - set(self.owners)
        self.owners.update(dict.fromkeys(leased, ("holder", holder)))

    @rule(holder=HOLDERS, data=st.data())
    def adopt(self, holder: str, data: st.DataObject) -> None:
        pages = self.some_of(holder, data)
        entry = data.draw(st.sampled_from([*self.entries(), "new"]))
        if entry == "new":
            entry = f"request{self.num_entries}"
            self.num_entries += 1
        self.pages.adopt(holder, pages, entry)
        self.owners.update(dict.fromkeys(pages, ("entry", entry)))

    @rule(holder=HOLDERS, data=st.data())
    def give_back(self, holder: str, data: st.DataObject) -> None:
        pages = self.some_of(holder, data)
        self.pages.give_back(holder, pages)
        self.free(pages)

    @rule(holder=HOLDERS, data=st.data(), pages=st.lists(st.integers(-1, NUM_PAGES)))
    def keep_only(self, holder: str, data: st.DataObject, pages: list[int]) -> None:
        """Name pages of others, or free pages, among the kept: they do not become the holder's."""
        kept = [*self.some_of(holder, data), *pages]
        self.pages.keep_only(holder, kept)
        self.free([page for page in self.owned("holder", holder) if page not in kept])

    @rule(holder=HOLDERS)
    def holder_gone(self, holder: str) -> None:
        leased = self.owned("holder", holder)
        assert self.pages.holder_gone(holder) == len(leased)
        self.free(leased)

    @precondition(lambda self: self.entries())
    @rule(data=st.data())
    def free_entry(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries()))
        self.pages.free_entry(entry)
        self.free(self.owned("entry", entry))

    @rule(holder=HOLDERS, page=st.integers(-1, NUM_PAGES), adopt=st.booleans())
    def touch_a_page_of_another(self, holder: str, page: int, adopt: bool) -> None:
        pages = self.owned("holder", holder)
        if page in pages:
            return
        end = partial(self.pages.adopt, entry="thief") if adopt else self.pages.give_back
        with pytest.raises(LeaseError, match=f"pages \\[{page}\\] are not leased to {holder}"):
            end(holder, [*pages, page])

    @invariant()
    def counts_add_up(self) -> None:
        leased = sum(kind == "holder" for kind, _ in self.owners.values())
        stored = len(self.owners) - leased
        counted = (self.pages.num_leased, self.pages.num_stored, self.pages.num_free)
        assert counted == (leased, stored, NUM_PAGES - len(self.owners))

    def teardown(self) -> None:
        for entry in self.entries():
            self.pages.free_entry(entry)
        for holder in ("prefill0", "prefill1", "decode0"):
            self.pages.holder_gone(holder)
        everything = self.pages.lease("last", NUM_PAGES)
        assert everything is not None
        assert sorted(everything) == list(range(NUM_PAGES))

    def some_of(self, holder: str, data: st.DataObject) -> list[int]:
        leased = self.owned("holder", holder)
        return data.draw(st.lists(st.sampled_from(leased), unique=True)) if leased else []

    def entries(self) -> list[str]:
        return sorted({name for kind, name in self.owners.values() if kind == "entry"})


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_page_named_twice_changes_nothing() -> None:
    pages = Pages(4)
    leased = pages.lease("prefill0", 2)
    assert leased is not None
    with pytest.raises(LeaseError, match="twice"):
        pages.give_back("prefill0", [leased[0], leased[0]])
    assert (pages.num_free, pages.num_leased) == (2, 2)


def test_an_entry_is_freed_once() -> None:
    pages = Pages(4)
    pages.adopt("prefill0", pages.lease("prefill0", 3) or (), "request0")
    pages.free_entry("request0")
    with pytest.raises(LeaseError, match="request0 has no pages"):
        pages.free_entry("request0")


@given(tokens=TOKENS, page_size=st.integers(1, 8), at=st.integers(0, 39))
def test_a_token_changes_the_hash_of_its_page_and_of_all_after(tokens: list[int], page_size: int, at: int) -> None:
    hashes = chained_hashes(tokens, page_size)
    assert len(hashes) == -(-len(tokens) // page_size)
    assert all(0 <= page_hash < 2**64 for page_hash in hashes)
    if at < len(tokens):
        tokens[at] ^= 1
        same = [old == new for old, new in zip(hashes, chained_hashes(tokens, page_size), strict=True)]
        assert same == [page < at // page_size for page in range(len(hashes))]


@given(tokens=TOKENS, page_size=st.integers(1, 8))
def test_a_longer_request_keeps_the_hashes_of_full_pages(tokens: list[int], page_size: int) -> None:
    full = len(tokens) // page_size
    assert chained_hashes([*tokens, 7], page_size)[:full] == chained_hashes(tokens, page_size)[:full]


def test_hashes_are_the_same_in_every_process_and_on_every_machine() -> None:
    assert chained_hashes(range(5), 2)[0] == 0xEE5CBB614170506E
    code = "from alignedserve.protocol.page_names import chained_hashes; print(chained_hashes(range(5), 2))"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(chained_hashes(range(5), 2))
