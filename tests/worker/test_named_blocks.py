"""Blocks with names: several requests read the same full pages, and what nobody reads stays until it is needed."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.protocol.page_names import chained_hashes
from alignedserve.worker.step.blocks import NamedBlocks
from tests.calls import calls_of
from tests.conftest import examples

NUM_BLOCKS = 12


def names_of(*tokens: int) -> tuple[int, ...]:
    """Return the names of pages of one token each: what a page holds is of no matter here."""
    return chained_hashes(tokens, 1)


class Sharing(RuleBasedStateMachine):
    """Requests share what is found of them, take blocks for the rest, fill them page by page, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = NamedBlocks(NUM_BLOCKS, cost_s)
        self.requests: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # names, blocks, full pages
        self.forgotten: set[int] = set()  # pages that were forgotten, and are read still

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), extra=st.integers(0, 3))
    def seat(self, tokens: list[int], extra: int) -> None:
        names = names_of(*tokens)
        found = self.blocks.find(names)
        needed = len(names) + extra - self.blocks.num_shared(names[:found])
        fits = needed <= self.blocks.num_free
        if not fits:
            return
        shared = self.blocks.share(names[:found])
        assert not self.forgotten & {*shared}, "a forgotten page was shared"
        more = self.blocks.take(len(names) + extra - len(shared))
        assert more is not None, "blocks that were counted as free were not"
        self.requests.append((names, shared + more, found))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def run(self, data: st.DataObject, pages: int) -> None:
        number = data.draw(st.integers(0, len(self.requests) - 1))
        names, blocks, full = self.requests[number]
        full = min(full + pages, len(names))
        self.blocks.publish(names[:full], blocks)
        self.requests[number] = names, blocks, full

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def note_elsewhere(self, tokens: list[int]) -> None:
        self.blocks.note_elsewhere(names_of(*tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_doubt=st.booleans())
    def leave(self, data: st.DataObject, in_doubt: bool) -> None:
        names, blocks, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if in_doubt:
            shared = self.blocks.share(names[: self.blocks.find(names)])
            self.blocks.give(shared)
            self.forgotten |= {*shared}
            self.blocks.forget(names)
        assert self.blocks.find(names) == 0 or not in_doubt
        self.blocks.give(blocks)
        self.forgotten &= {block for _, held, _ in self.requests for block in held}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take_and_give(self, count: int) -> None:
        blocks = self.blocks.take(count) if count <= self.blocks.num_free else ()
        assert blocks is not None, "blocks that were counted as free were not"
        assert len(set(blocks)) == len(blocks)
        self.blocks.give(blocks)

    @invariant()
    def each_block_is_free_or_read(self) -> None:
        read = Counter(block for _, blocks, _ in self.requests for block in blocks)
        assert read - Counter(self.blocks.more_readers) == Counter(set(read)), "readers are counted wrong"
        assert sorted([*self.blocks.free, *read]) == list(range(NUM_BLOCKS))
        assert self.blocks.num_free == len(self.blocks.free)

    @invariant()
    def what_leaves_frees_what_no_other_reads(self) -> None:
        read = Counter(block for _, blocks, _ in self.requests for block in blocks)
        for _, blocks, _ in self.requests:
            assert self.blocks.num_freed(blocks) == sum(read[block] == 1 for block in blocks)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


def filled(store: NamedBlocks, names: tuple[int, ...]) -> tuple[int, ...]:
    """Let a request come whose pages these are: it shares what is here, and publishes the rest."""
    shared = store.share(names[: store.find(names)])
    more = store.take(len(names) - len(shared))
    assert more is not None
    store.publish(names, shared + more)
    return shared + more


def test_what_was_given_back_is_found_again() -> None:
    store, names = NamedBlocks(4), names_of(1, 2, 3)
    blocks = filled(store, names)
    assert store.num_free == 1
    store.give(blocks)
    assert (store.num_free, store.find(names), store.find(names_of(1, 2, 4))) == (4, 3, 2)
    assert store.share(names) == blocks


def test_the_last_pages_of_a_beginning_are_evicted_first() -> None:
    store, names = NamedBlocks(4), names_of(1, 2, 3, 4)
    store.give(filled(store, names))
    found = []
    for _ in range(4):
        store.take(1)
        found.append(store.find(names))
    assert found == [3, 2, 1, 0]


def test_a_page_is_evicted_as_fast_the_more_pages_go_on_from_one() -> None:
    """Function calls are counted. The pool has the first page, so it would go first, but for what goes on from it."""
    store, names = NamedBlocks(100, cost_s), names_of(*range(100))
    blocks = filled(store, names)
    store.note_elsewhere(names[:1])
    store.give(blocks)
    store.take(1)
    counted = [calls_of(lambda: store.take(1)) for _ in range(99)]
    assert max(counted) < 1.5 * min(counted)
    assert store.find(names) == 0


def test_a_page_that_was_computed_twice_leaves_none_behind_that_goes_on_from_it() -> None:
    """Two requests compute the same first page at once, and only the second goes on: its page outlives the first."""
    store, names = NamedBlocks(4), names_of(1, 2)
    first, second = store.take(1), store.take(2)
    assert first is not None
    assert second is not None
    store.publish(names[:1], first)
    store.publish(names, second)
    store.give(first)
    assert store.take(2) is not None  # this evicts the first page, while the page after it is read
    assert store.find(names) == 0
    store.give(second)
    assert store.num_free == 2


def test_what_goes_on_from_a_forgotten_page_is_never_found_again() -> None:
    store, names = NamedBlocks(8), names_of(1, 2, 3)
    doubtful = filled(store, names)
    store.forget(names[:1])
    assert store.find(names) == 0
    store.publish(names, doubtful)
    assert store.find(names) == 0, "what was forgotten has a name again"
    anew = filled(store, names)
    assert store.find(names) == 3
    assert not set(anew) & set(doubtful)
    store.give(doubtful)
    store.give(anew)
    assert store.num_free == 8


def test_a_scan_of_prompts_that_come_once_keeps_what_was_used_again() -> None:
    store, hot = NamedBlocks(20), names_of(1, 2, 3, 4)
    store.give(filled(store, hot))
    store.give(filled(store, hot))
    for number in range(200):
        store.give(filled(store, names_of(100 + number, 0, 0)))
        assert store.find(hot) == 4


def test_what_comes_again_after_it_was_evicted_is_kept_in_a_scan() -> None:
    store, hot = NamedBlocks(20), names_of(1, 2, 3, 4)
    found = []
    for turn in range(4):
        found.append(store.find(hot))
        store.give(filled(store, hot))
        for number in range(10):
            store.give(filled(store, names_of(100 * turn + number + 10, 0, 0)))
    assert found == [0, 0, 4, 4]


def cost_s(is_elsewhere: bool) -> float:
    return 1.0 if is_elsewhere else 3.0


def test_what_the_pool_has_too_is_evicted_before_what_is_to_be_computed_anew() -> None:
    store, computed, copied = NamedBlocks(2, cost_s), names_of(1), names_of(2)
    store.give(filled(store, computed))
    blocks = filled(store, copied)
    store.note_elsewhere(copied)
    store.give(blocks)
    store.take(1)
    assert (store.find(computed), store.find(copied)) == (1, 0)


def test_what_costs_much_goes_too_once_nobody_has_asked_for_it_long_enough() -> None:
    store, computed = NamedBlocks(2, cost_s), names_of(1)
    store.give(filled(store, computed))
    kept = 0
    while store.find(computed):
        kept += 1
        copied = names_of(10 + kept)
        blocks = filled(store, copied)
        store.note_elsewhere(copied)
        store.give(blocks)
    assert kept == 4, "three copies are worth as much as the computation"


def test_a_scan_of_what_is_computed_keeps_what_was_used_again_and_the_pool_has() -> None:
    store, hot = NamedBlocks(20, cost_s), names_of(1, 2, 3, 4)
    for _ in range(2):
        blocks = filled(store, hot)
        store.note_elsewhere(hot)
        store.give(blocks)
    for number in range(200):
        store.give(filled(store, names_of(100 + number, 0, 0)))
        assert store.find(hot) == 4
