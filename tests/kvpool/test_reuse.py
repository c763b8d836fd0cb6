"""Pages that are named by their tokens: shared while held, kept while no request needs the room, never wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.segmented_lru import EvictedNames, SegmentedLru
from tests.conftest import examples

NUM_PAGES, PAGE = 10, 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)  # two words: many prompts begin alike
Prompt = tuple[int, ...]


class Reuse(RuleBasedStateMachine):
    """Keep page contents, while a prefill worker holds a prompt's known pages, writes the rest, and commits; while a
    decode worker brings back more than it got, or keeps an answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(NUM_PAGES)
        self.written: dict[int, Prompt] = {}  # page -> the tokens, up to the page's end, whose KV it holds
        self.entries: dict[str, Prompt] = {}
        self.classes: dict[str, ServiceClass] = {}
        self.number = 0

    @rule(prompt=PROMPTS, service=st.sampled_from(ServiceClass))
    def run(self, prompt: Prompt, service: ServiceClass) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.classes[name] = service
        full = len(prompt) // PAGE
        names = chained_hashes(prompt, PAGE, b"root")[:full]
        known = self.pages.hold(name, names, service)
        for place, page in enumerate(known):
            assert self.written[page] == prompt[: (place + 1) * PAGE], "the KV of another beginning"
        missing = -(-len(prompt) // PAGE) - len(known)
        lease = self.pages.lease("worker", missing)
        if lease is None:
            assert missing > self.pages.num_free
            if known:
                self.pages.free_entry(name)
            return
        for place, page in enumerate(lease, len(known)):
            self.written[page] = prompt[: (place + 1) * PAGE]
        self.pages.adopt("worker", lease, name, names[len(known) :], service)
        self.entries[name] = prompt

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.entries)))
        self.pages.free_entry(name)
        del self.entries[name]

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), more=PROMPTS, has_ended=st.booleans())
    def comes_back_with_more(self, data: st.DataObject, more: Prompt, has_ended: bool) -> None:
        """Bring back an entry with pages beyond its full pages written again; if it has ended, only full pages."""
        name = data.draw(st.sampled_from(sorted(self.entries)))
        known, said = len(self.entries[name]) // PAGE, self.entries[name] + more
        full = len(said) // PAGE
        missing = (full if has_ended else -(-len(said) // PAGE)) - known
        lease = self.pages.lease("worker", missing)
        if lease is None:
            return
        for place, page in enumerate(lease, known):
            self.written[page] = said[: (place + 1) * PAGE]
        self.pages.shorten(name, known)
        self.pages.adopt("worker", lease, name, chained_hashes(said, PAGE, b"root")[known:full], self.classes[name])
        self.entries[name] = said
        if has_ended:
            self.pages.free_entry(name)
            del self.entries[name]

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def found_wrong(self, page: int) -> None:
        self.pages.forget(page)

    @invariant()
    def each_page_is_one_thing(self) -> None:
        assert sorted(self.pages.numbers) == list(range(NUM_PAGES))

    @invariant()
    def each_holder_has_its_own_tokens(self) -> None:
        for name, prompt in self.entries.items():
            pages = self.pages.pages_of(name)
            assert [self.written[page] for page in pages] == [
                prompt[: (place + 1) * PAGE] for place in range(len(pages))
            ]

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        held: dict[ServiceClass, set[int]] = {service: set() for service in ServiceClass}
        for name in self.entries:
            held[self.classes[name]].update(self.pages.pages_of(name))
        rt, be = held[ServiceClass.RT], held[ServiceClass.BE]
        free, idle = self.pages.num_free, self.pages.num_idle
        assert (self.pages.num_stored, free) == (len(rt | be), NUM_PAGES - len(rt | be))
        assert self.pages.usage == Usage(len(rt - be), len(be - rt), len(rt & be), idle, 0, free - idle)

    def teardown(self) -> None:
        for name in self.entries:
            self.pages.free_entry(name)
        assert self.pages.num_free == NUM_PAGES


TestReuse = Reuse.TestCase
TestReuse.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


def stored(pages: Pages, name: str, *names: int) -> tuple[int, ...]:
    lease = pages.lease("worker", len(names))
    assert lease is not None
    pages.adopt("worker", lease, name, names)
    return lease


def test_a_beginning_is_known_as_far_as_it_is_the_same() -> None:
    pages = Pages(8)
    first = stored(pages, "a", 1, 2, 3)
    assert pages.hold("b", (1, 2, 9)) == first[:2]
    assert pages.hold("c", (2, 3)) == (first[1], first[2]), "a name stands for all tokens before, too"
    assert pages.hold("d", (9,)) == ()
    assert "d" not in pages.entries


def test_two_requests_that_stored_the_same_share_a_page() -> None:
    pages = Pages(8)
    first = stored(pages, "a", 1, 2)
    stored(pages, "b", 1, 5)
    assert pages.pages_of("b")[0] == first[0]
    assert pages.num_stored == 3


def test_a_request_that_holds_pages_cannot_hold_others() -> None:
    pages = Pages(8)
    stored(pages, "a", 1)
    with pytest.raises(LeaseError, match="entry a has pages already"):
        pages.hold("a", (1,))


def test_an_idle_page_is_as_good_as_free_and_what_begins_a_prompt_leaves_last() -> None:
    pages = Pages(4)
    first = stored(pages, "a", 1, 2, 3)
    pages.free_entry("a")
    assert pages.num_free == 4
    assert pages.lease("worker", 2) == (3, first[2]), "the free one, then the end of the prompt"
    assert pages.hold("b", (1, 2, 3)) == first[:2]


def test_a_page_that_was_held_again_stays_longer() -> None:
    pages = Pages(4)
    again = stored(pages, "a", 1)
    pages.free_entry("a")
    pages.hold("b", (1,))
    pages.free_entry("b")
    stored_pages = [stored(pages, f"c{name}", name)[0] for name in (7, 8, 9)]
    for name in (7, 8, 9):
        pages.free_entry(f"c{name}")
    assert pages.lease("worker", 4) == (*stored_pages, *again)


def test_a_page_that_comes_again_after_it_was_evicted_stays_longer() -> None:
    """However many pages come once between its uses: the second use shows that it is worth keeping."""
    pages = Pages(4)

    def use(name: int) -> bool:
        is_known = bool(pages.hold(f"{name}", (name,)))
        if not is_known:
            stored(pages, f"{name}", name)
        pages.free_entry(f"{name}")
        return is_known

    uses = [[use(1), *(use(number) for number in range(10 * turn, 10 * turn + 6))][0] for turn in range(1, 7)]
    assert uses == [False, False, True, True, True, True]


def test_a_page_that_is_computed_again_though_it_is_there_has_been_used_again() -> None:
    pages = Pages(4)
    (again,) = stored(pages, "a", 1)
    pages.free_entry("a")
    stored(pages, "b", 1)
    pages.free_entry("b")
    assert pages.pages_of("b") == ()
    for name in (7, 8, 9):
        stored(pages, f"c{name}", name)
    for name in (7, 8, 9):
        pages.free_entry(f"c{name}")
    lease = pages.lease("worker", 4)
    assert lease is not None
    assert lease[-1] == again


def test_names_of_evicted_pages_are_forgotten_in_their_turn() -> None:
    evicted = EvictedNames(1)
    for name in range(5):
        evicted.note(name)
    assert [evicted.has_back(name) for name in (0, 1, 1)] == [False, True, False]


def test_the_protected_are_bounded() -> None:
    lru = SegmentedLru(most_protected=1)
    for page in (1, 2):
        lru.again(page)
        lru.add(page)
    lru.add(3)
    assert list(lru) == [1, 3, 2]


def test_a_page_that_was_found_wrong_is_nobodys_beginning() -> None:
    pages = Pages(4)
    (page,) = stored(pages, "a", 1)
    pages.forget(page)
    assert pages.hold("b", (1,)) == ()
    pages.free_entry("a")
    assert page in (pages.lease("worker", 4) or ())


def test_another_root_has_other_names() -> None:
    assert not set(chained_hashes(range(8), 2, b"tenant a")) & set(chained_hashes(range(8), 2, b"tenant b"))
