"""Block pairs of a device whose full pages have names, so that requests with equal beginnings read the same pairs.

    free ── take ──▶ read by one ── publish ──▶ named, read by some ── give, by the last ──▶ idle, and found by its name
     ▲                    │                        ▲                                          │  │
     ├────── give ────────┘                        └──────────────── share ───────────────────┘  │
     └───────────────────────────────── take, where no pair is free ─────────────────────────────┘

A page is named by its tokens and all tokens before them, and has as many pairs as hold its tokens. The pairs of a
request are its pages in their order, and what comes after them. Nothing is written to a full page any more, so all who
read it may do so at once. Pages make a tree: a page is found only after the page before it. So no page is evicted as
long as an idle page goes on from it, and what comes after a page that is forgotten is forgotten with it: it was
computed from that.

Evicted first are pages that were used once, then those that were used again, or that came again after they were evicted
(segmented LRU). Among these, the page of the least value goes first: its value is what it costs to have it anew, a copy
from the pool or a computation, and rises with the value of the page that was last evicted before it became idle
(GreedyDual).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from alignedserve.scheduling.segmented_lru import PROTECTED_SHARE, EvictedNames, SegmentedLru
from alignedserve.worker.step.blocks import Blocks

PageCost: TypeAlias = Callable[[bool], float]


@dataclass(eq=False, slots=True)
class _DevicePage:
    name: int
    pairs: tuple[int, ...]
    before: _DevicePage | None
    num_readers: int = 1
    after: dict[int, _DevicePage] = field(default_factory=dict)  # named pages that go on from it, by name
    is_named: bool = True
    is_elsewhere: bool = False  # the pool has it too: to have it anew costs a copy
    value: float = 0.0  # while it is idle

    @property
    def place(self) -> int:
        """Return its first pair, by which it is known: no two pages have the same."""
        return self.pairs[0]


class NamedBlocks(Blocks):
    def __init__(self, num_pairs: int, pairs_of_page: int, cost_s: PageCost = lambda _is_elsewhere: 0.0) -> None:
        """`cost_s` returns what it costs to have a page anew that the pool has, or has not."""
        super().__init__(num_pairs)
        self._pairs_of_page = pairs_of_page
        self._pages: dict[
            int, _DevicePage
        ] = {}  # by their first pairs: those with names, and forgotten ones with readers
        self._named: dict[int, _DevicePage] = {}
        self._shared: set[int] = set()  # first pairs of pages that have several readers
        most = int(num_pairs // pairs_of_page * PROTECTED_SHARE)
        self._idle = {is_elsewhere: SegmentedLru(most) for is_elsewhere in (False, True)}  # first pairs of pages
        self._evicted = EvictedNames(num_pairs // pairs_of_page)
        self._num_idle = 0  # pages
        self._cost_s, self._level = cost_s, 0.0  # the level: the value of the page that was evicted last
        # The page that was to go first, and the page before the one that went in its place:
        self._evicted_after: tuple[_DevicePage | None, _DevicePage | None] = None, None
        self.version = 0  # rises whenever another set of pages has names

    # --- Pairs

    @property
    def num_free(self) -> int:
        """Return how many pairs can be taken: free ones, and those of idle pages."""
        return len(self._back) + self._num_pairs - self._fresh + self._num_idle * self._pairs_of_page

    @property
    def free(self) -> tuple[int, ...]:
        idle = (pair for order in self._idle.values() for place in order for pair in self._pages[place].pairs)
        return (*super().free, *idle)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pairs, or return None where there are fewer. Idle pages are evicted where free pairs lack."""
        if count > self.num_free:
            return None
        while count > len(self._back) + self._num_pairs - self._fresh:
            self._evict()
        return super().take(count)

    def give(self, pairs: Sequence[int]) -> None:
        """Give back whole pages of a request. The last page becomes idle first, so that it is evicted first."""
        if not self._pages:
            super().give(pairs)
            return
        read, size = list[_DevicePage](), self._pairs_of_page
        for at in range(0, len(pairs), size):
            page = self._pages.get(pairs[at])
            if page is None:
                self._back.extend(pairs[at : at + size])
            else:
                read.append(page)
        values = [self._level + self._cost_s(is_elsewhere) for is_elsewhere in (False, True)]
        for page in reversed(read):
            page.num_readers -= 1
            if page.num_readers < 2:
                self._shared.discard(page.place)
            if not page.num_readers:
                self._rest(page, values[page.is_elsewhere])

    def _rest(self, page: _DevicePage, value: float) -> None:
        """Let a page that nobody reads be idle, or free it where it has no name any more."""
        if page.is_named:
            page.value = value
            self._num_idle += 1
            self._idle[page.is_elsewhere].add(page.place)
        else:
            self._free(page)

    def _free(self, page: _DevicePage) -> None:
        del self._pages[page.place]
        self._idle[page.is_elsewhere].forget(page.place)
        self._back.extend(page.pairs)

    def num_freed(self, pairs: Sequence[int]) -> int:
        """Return how many of these pairs of a request have no other reader."""
        if not self._shared:  # nearly always, and asked at every step for every request
            return len(pairs)
        size = self._pairs_of_page
        return len(pairs) - len(self._shared.intersection(pairs[::size])) * size

    @property
    def kept(self) -> Collection[int]:
        return {pair for page in self._pages.values() for pair in page.pairs}

    @property
    def more_readers(self) -> Sequence[int]:
        shared = [self._pages[place] for place in self._shared]
        return [pair for page in shared for pair in page.pairs * (page.num_readers - 1)]

    # --- Pages

    def find(self, names: Sequence[int]) -> int:
        """Return how many of these pages are here, one after the other from the first."""
        found = 0
        for name in names:
            if name not in self._named:
                break
            found += 1
        return found

    def num_read(self, names: Sequence[int]) -> int:
        """Return how many pairs of these pages, which are here, some request reads."""
        return sum([self._named[name].num_readers > 0 for name in names]) * self._pairs_of_page

    def num_read_once(self, names: Sequence[int]) -> int:
        """Return how many pairs of these pages, which are here, have a single reader."""
        return sum([self._named[name].num_readers == 1 for name in names]) * self._pairs_of_page

    def share(self, names: Sequence[int]) -> tuple[int, ...]:
        """Read these pages, which are here, and return their pairs."""
        pages = [self._named[name] for name in names]
        for page in pages:
            self._num_idle -= self._idle[page.is_elsewhere].again(page.place)
            page.num_readers += 1
            if page.num_readers == 2:
                self._shared.add(page.place)
        return tuple([pair for page in pages for pair in page.pairs])

    def publish(self, names: Sequence[int], pairs: Sequence[int], num_dropped: int = 0, num_folded: int = 0) -> None:
        """Name the full pages that a request has in these pairs, where no others have their names already. The pairs
        begin after `dropped` pages, which it has given back; its first pages that are folded are in none.

        Pages of it that were forgotten keep all that come after them from being named.
        """
        count, size = len(names), self._pairs_of_page
        while count and names[count - 1] not in self._named:
            count -= 1
        if count < max(num_dropped, num_folded):
            return
        before = self._named[names[count - 1]] if count else None
        for at in range(count, len(names)):
            own = tuple(pairs[(at - num_dropped) * size : (at - num_dropped + 1) * size])
            if own[0] in self._pages:
                return
            page = _DevicePage(names[at], own, before)
            self._pages[page.place] = self._named[page.name] = page
            if self._evicted.has_back(page.name):
                self._idle[False].again(page.place)
            if before is not None:
                before.after[page.name] = page
            before = page
            self.version += 1

    def note_elsewhere(self, names: Sequence[int]) -> None:
        """Note that the pool has these pages too; pages that nobody here reads are passed over."""
        for name in names:
            page = self._named.get(name)
            if page is not None and page.num_readers and not page.is_elsewhere:
                was_used_again = self._idle[False].forget_return(page.place)
                page.is_elsewhere = True
                if was_used_again:
                    self._idle[True].again(page.place)

    def forget(self, names: Sequence[int]) -> None:
        """Let no other request read these pages, nor those that go on from them; who reads them now goes on."""
        for name in names:
            if (page := self._named.get(name)) is not None:
                self._unname(page)

    def _unname(self, page: _DevicePage) -> None:
        """Take the names of a page and of all that go on from it; the idle ones of them are free."""
        if page.before is not None:
            del page.before.after[page.name]
        leaving = [page]
        while leaving:
            page = leaving.pop()
            leaving += page.after.values()
            del self._named[page.name]
            page.after, page.before, page.is_named = {}, None, False
            if page.num_readers:
                self._idle[page.is_elsewhere].forget(page.place)
            else:
                self._num_idle -= 1
                self._free(page)
        self.version += 1

    def _evict(self) -> None:
        """Free the idle page that is of least use, or the last idle one of those that go on from it."""
        *_, first = min([self._first_of(order) for order in self._idle.values() if order])
        page = self._last_idle(first)
        self._evicted_after = first, page.before
        self._level = max(self._level, page.value)
        self._evicted.note(page.name)
        self._unname(page)

    def _first_of(self, order: SegmentedLru) -> tuple[bool, float, bool, _DevicePage]:
        """Return the page that goes first of those that the pool has, or has not, behind what it is compared by."""
        is_protected, place = order.first()
        page = self._pages[place]
        return is_protected, page.value, page.is_elsewhere, page

    def _last_idle(self, first: _DevicePage) -> _DevicePage:
        """Return an idle page that goes on from this one, and from which no idle page goes on.

        The search goes on where the one before ended: thousands of pages may go on from a page."""
        before, page = self._evicted_after
        if before is not first or page is None or page.num_readers or not page.is_named:
            page = first
        while page.after and (last := next((page for page in page.after.values() if not page.num_readers), None)):
            page = last
        return page
