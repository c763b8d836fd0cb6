"""Block pairs with names: several requests read the same full pages, and what nobody reads stays until it is needed."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.protocol.page_names import chained_hashes
from alignedserve.worker.step.named_blocks import NamedBlocks
from tests.calls import calls_of
from tests.conftest import examples

NUM_PAIRS, PAIRS_OF_PAGE = 24, 2


def names_of(*tokens: int) -> tuple[int, ...]:
    """Return the names of pages of one token each: what a page holds is of no matter here."""
    return chained_hashes(tokens, 1)


class Sharing(RuleBasedStateMachine):
    """Requests share what is found of them, take pairs for the rest, fill them page by page, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = NamedBlocks(NUM_PAIRS, PAIRS_OF_PAGE, cost_s)
        self.requests: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # names, pairs, full pages
        self.forgotten: set[tuple[int, ...]] = set()  # pairs of pages that were forgotten, and are read still

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), extra=st.integers(0, 3))
    def seat(self, tokens: list[int], extra: int) -> None:
        names = names_of(*tokens)
        found = self.blocks.find(names)
        needed = len(names) * PAIRS_OF_PAGE + extra - self.blocks.num_read(names[:found])
        fits = needed <= self.blocks.num_free
        if not fits:
            return
        shared = self.blocks.share(names[:found])
        assert not any(set(page) <= set(shared) for page in self.forgotten), "a forgotten page was shared"
        more = self.blocks.take(len(names) * PAIRS_OF_PAGE + extra - len(shared))
        assert more is not None, "pairs that were counted as free were not"
        self.requests.append((names, shared + more, found))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def run(self, data: st.DataObject, pages: int) -> None:
        number = data.draw(st.integers(0, len(self.requests) - 1))
        names, pairs, full = self.requests[number]
        full = min(full + pages, len(names))
        self.blocks.publish(names[:full], pairs)
        self.requests[number] = names, pairs, full

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def note_elsewhere(self, tokens: list[int]) -> None:
        self.blocks.note_elsewhere(names_of(*tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_doubt=st.booleans())
    def leave(self, data: st.DataObject, in_doubt: bool) -> None:
        names, pairs, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if in_doubt:
            shared = self.blocks.share(names[: self.blocks.find(names)])
            self.blocks.give(shared)
            self.forgotten |= {shared[at : at + PAIRS_OF_PAGE] for at in range(0, len(shared), PAIRS_OF_PAGE)}
            self.blocks.forget(names)
        assert self.blocks.find(names) == 0 or not in_doubt
        self.blocks.give(pairs)
        held = {pair for _, held, _ in self.requests for pair in held}
        self.forgotten = {page for page in self.forgotten if page[0] in held}

    @rule(count=st.integers(0, NUM_PAIRS))
    def take_and_give(self, count: int) -> None:
        pairs = self.blocks.take(count) if count <= self.blocks.num_free else ()
        assert pairs is not None, "pairs that were counted as free were not"
        assert len(set(pairs)) == len(pairs)
        self.blocks.give(pairs)

    @invariant()
    def each_pair_is_free_or_read(self) -> None:
        read = Counter(pair for _, pairs, _ in self.requests for pair in pairs)
        assert read - Counter(self.blocks.more_readers) == Counter(set(read)), "readers are counted wrong"
        assert sorted([*self.blocks.free, *read]) == list(range(NUM_PAIRS))
        assert self.blocks.num_free == len(self.blocks.free)

    @invariant()
    def what_leaves_frees_what_no_other_reads(self) -> None:
        read = Counter(pair for _, pairs, _ in self.requests for pair in pairs)
        for _, pairs, _ in self.requests:
            assert self.blocks.num_freed(pairs) == sum(read[pair] == 1 for pair in pairs)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def filled(blocks: NamedBlocks, names: tuple[int, ...]) -> tuple[int, ...]:
    """Let a request come whose pages these are: it shares what is here, and publishes the rest."""
    shared = blocks.share(names[: blocks.find(names)])
    more = blocks.take(len(names) * PAIRS_OF_PAGE - len(shared))
    assert more is not None
    blocks.publish(names, shared + more)
    return shared + more


def test_what_was_given_back_is_found_again() -> None:
    blocks, names = NamedBlocks(8, PAIRS_OF_PAGE), names_of(1, 2, 3)
    pairs = filled(blocks, names)
    assert blocks.num_free == 2
    blocks.give(pairs)
    assert (blocks.num_free, blocks.find(names), blocks.find(names_of(1, 2, 4))) == (8, 3, 2)
    assert blocks.share(names) == pairs


def test_the_last_pages_of_a_beginning_are_evicted_first() -> None:
    blocks, names = NamedBlocks(8, PAIRS_OF_PAGE), names_of(1, 2, 3, 4)
    blocks.give(filled(blocks, names))
    found = []
    for _ in range(4):
        blocks.take(PAIRS_OF_PAGE)
        found.append(blocks.find(names))
    assert found == [3, 2, 1, 0]


def test_a_page_is_evicted_as_fast_the_more_pages_go_on_from_one() -> None:
    """Function calls are counted. The pool has the first page, so it would go first, but for what goes on from it."""
    blocks, names = NamedBlocks(200, PAIRS_OF_PAGE, cost_s), names_of(*range(100))
    pairs = filled(blocks, names)
    blocks.note_elsewhere(names[:1])
    blocks.give(pairs)
    blocks.take(PAIRS_OF_PAGE)
    counted = [calls_of(lambda: blocks.take(PAIRS_OF_PAGE)) for _ in range(99)]
    assert max(counted) < 1.5 * min(counted)
    assert blocks.find(names) == 0


def test_a_page_that_was_computed_twice_leaves_none_behind_that_goes_on_from_it() -> None:
    """Two requests compute the same first page at once, and only the second goes on: its page outlives the first."""
    blocks, names = NamedBlocks(8, PAIRS_OF_PAGE), names_of(1, 2)
    first, second = blocks.take(2), blocks.take(4)
    assert first is not None
    assert second is not None
    blocks.publish(names[:1], first)
    blocks.publish(names, second)
    blocks.give(first)
    assert blocks.take(4) is not None  # this evicts the first page, while the page after it is read
    assert blocks.find(names) == 0
    blocks.give(second)
    assert blocks.num_free == 4


def test_what_goes_on_from_a_forgotten_page_is_never_found_again() -> None:
    blocks, names = NamedBlocks(16, PAIRS_OF_PAGE), names_of(1, 2, 3)
    doubtful = filled(blocks, names)
    blocks.forget(names[:1])
    assert blocks.find(names) == 0
    blocks.publish(names, doubtful)
    assert blocks.find(names) == 0, "what was forgotten has a name again"
    anew = filled(blocks, names)
    assert blocks.find(names) == 3
    assert not set(anew) & set(doubtful)
    blocks.give(doubtful)
    blocks.give(anew)
    assert blocks.num_free == 16


def test_a_scan_of_prompts_that_come_once_keeps_what_was_used_again() -> None:
    blocks, hot = NamedBlocks(40, PAIRS_OF_PAGE), names_of(1, 2, 3, 4)
    blocks.give(filled(blocks, hot))
    blocks.give(filled(blocks, hot))
    for number in range(200):
        blocks.give(filled(blocks, names_of(100 + number, 0, 0)))
        assert blocks.find(hot) == 4


def test_what_comes_again_after_it_was_evicted_is_kept_in_a_scan() -> None:
    blocks, hot = NamedBlocks(40, PAIRS_OF_PAGE), names_of(1, 2, 3, 4)
    found = []
    for turn in range(4):
        found.append(blocks.find(hot))
        blocks.give(filled(blocks, hot))
        for number in range(10):
            blocks.give(filled(blocks, names_of(100 * turn + number + 10, 0, 0)))
    assert found == [0, 0, 4, 4]


def cost_s(is_elsewhere: bool) -> float:
    return 1.0 if is_elsewhere else 3.0


def test_what_the_pool_has_too_is_evicted_before_what_is_to_be_computed_anew() -> None:
    blocks, computed, copied = NamedBlocks(4, PAIRS_OF_PAGE, cost_s), names_of(1), names_of(2)
    blocks.give(filled(blocks, computed))
    pairs = filled(blocks, copied)
    blocks.note_elsewhere(copied)
    blocks.give(pairs)
    blocks.take(PAIRS_OF_PAGE)
    assert (blocks.find(computed), blocks.find(copied)) == (1, 0)


def test_what_costs_much_goes_too_once_nobody_has_asked_for_it_long_enough() -> None:
    blocks, computed = NamedBlocks(4, PAIRS_OF_PAGE, cost_s), names_of(1)
    blocks.give(filled(blocks, computed))
    kept = 0
    while blocks.find(computed):
        kept += 1
        copied = names_of(10 + kept)
        pairs = filled(blocks, copied)
        blocks.note_elsewhere(copied)
        blocks.give(pairs)
    assert kept == 4, "three copies are worth as much as the computation"


def test_a_scan_of_what_is_computed_keeps_what_was_used_again_and_the_pool_has() -> None:
    blocks, hot = NamedBlocks(40, PAIRS_OF_PAGE, cost_s), names_of(1, 2, 3, 4)
    for _ in range(2):
        pairs = filled(blocks, hot)
        blocks.note_elsewhere(hot)
        blocks.give(pairs)
    for number in range(200):
        blocks.give(filled(blocks, names_of(100 + number, 0, 0)))
        assert blocks.find(hot) == 4
