"""The blocks of a device: free blocks, blocks that requests share by name, and the blocks of a request.

Which blocks a request has, and in which form, is written here alone (`keep_as`), for a worker's memory and nobody else:
memory.py, windows.py, device_pages.py, and what a step takes by seating.py; or a memory of the papers (papers/memory/).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from alignedserve.core import NO_KV, Fold, KvForm
from alignedserve.scheduling.segmented_lru import PROTECTED_SHARE, EvictedNames, SegmentedLru
from alignedserve.worker.step.request import WorkerRequest


class Blocks:
    """Free blocks of a device: blocks that were given back last go first, then blocks that were never taken."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._fresh = 0  # this block and all after were never taken: they need no list, and a device has many
        self._back: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._back) + self._num_blocks - self._fresh

    @property
    def free(self) -> tuple[int, ...]:
        return (*range(self._fresh, self._num_blocks), *self._back)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or return None where there are fewer."""
        if count > self.num_free:
            return None
        again = [self._back.pop() for _ in range(min(count, len(self._back)))]
        start = self._fresh
        self._fresh += count - len(again)
        return (*again, *range(start, self._fresh))

    def give(self, blocks: Sequence[int]) -> None:
        self._back.extend(blocks)

    def num_freed(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks of a request are free once given back."""
        return len(blocks)


class BlockOwner(Protocol):
    prefix: int  # tokens with KV
    kv: KvForm


def keep_as(owner: BlockOwner, kv: KvForm) -> None:
    """Note where the KV of a request is from now on, and in which form. Only a memory may say so."""
    owner.kv = kv


def add_blocks(running: WorkerRequest, blocks: tuple[int, ...]) -> None:
    """Give a request more blocks, in the form of its KV."""
    keep_as(running, replace(running.kv, blocks=running.kv.blocks + blocks))


def take_blocks(running: WorkerRequest) -> tuple[int, ...]:
    """Take all blocks from a request, which may get others; return the taken blocks."""
    blocks = running.kv.blocks
    keep_as(running, replace(running.kv, blocks=()))
    return blocks


def lose_kv(running: WorkerRequest) -> None:
    """Note that a request without blocks has no KV."""
    keep_as(running, NO_KV)
    running.start_over()


def drop_beginning(running: WorkerRequest, tokens: int, block_size: int) -> tuple[int, ...]:
    """Take from a request the blocks of the first tokens, which no layer reads any more; return these blocks."""
    count = (tokens - running.kv.dropped) // block_size
    lost = running.kv.blocks[:count]
    keep_as(running, replace(running.kv, blocks=running.kv.blocks[count:], dropped=tokens))
    return lost


def num_folded(kv: KvForm, block_size: int) -> int:
    """Return how many blocks of a request are folded."""
    return (kv.folded - kv.dropped) // block_size


def fold_blocks(running: WorkerRequest, into: tuple[int, ...], fold: Fold, block_size: int) -> None:
    """Put a folded block into the place of a request's first blocks that are not folded."""
    kv = running.kv
    at, folded = num_folded(kv, block_size), kv.folded + block_size * fold.blocks
    blocks = (*kv.blocks[:at], *into, *kv.blocks[at + fold.blocks :])
    keep_as(running, replace(kv, blocks=blocks, dropped=fold.spared(folded), folded=folded))


def blocks_in_place(kv: KvForm, block_size: int) -> tuple[int, ...]:
    """Return the block of each `block_size` tokens, of a request that lacks no token.

    A folded block stands in the place of each block that was folded into it."""
    if not kv.folded:
        return kv.blocks
    count = num_folded(kv, block_size)
    each = kv.folded // (count * block_size)
    return tuple([block for block in kv.blocks[:count] for _ in range(each)]) + kv.blocks[count:]


PageCost: TypeAlias = Callable[[bool], float]


@dataclass(eq=False, slots=True)
class _DevicePage:
    name: int
    block: int  # also names the page: no two pages have the same block
    before: _DevicePage | None
    num_readers: int = 1
    after: dict[int, _DevicePage] = field(default_factory=dict)  # named pages that go on from this page, by name
    is_named: bool = True
    is_elsewhere: bool = False  # the pool has the page too, and can copy it back
    value: float = 0.0  # while idle


class NamedBlocks(Blocks):
    """Blocks that get names as full pages, so that requests with equal beginnings read the same blocks.

    free ── take ──▶ read by one ── publish ──▶ named, read by some ── give, by the last ──▶ idle, and found by its name
     ▲                    │                        ▲                                          │  │
     ├────── give ────────┘                        └──────────────── share ───────────────────┘  │
     └───────────────────────────────── take, where no block is free ─────────────────────────────┘

    A page is a full block, named by its tokens and all tokens before. The blocks of a request are its pages in order,
    and blocks that are not full yet. Nothing is written to a full page, so any number of requests may read it at once.
    Pages make a tree: a page is found only after the page before it. So a page is never evicted while an idle page goes
    on from it, and when a page is forgotten, so are all pages that go on from it: they were computed from that page.

    Pages that were used once are evicted first, then pages that were used again, or that came again after an eviction
    (segmented LRU). Within each kind, the page of the least value goes first. The value is the cost to get the page
    back, by a copy from the pool or by a computation, plus the value of the page that was evicted last before this page
    became idle (GreedyDual).
    """

    def __init__(self, num_blocks: int, cost_s: PageCost = lambda _is_elsewhere: 0.0) -> None:
        """`cost_s` returns the cost to get a page back that the pool has (True), or has not."""
        super().__init__(num_blocks)
        self._pages: dict[int, _DevicePage] = {}  # block -> page with a name, or forgotten and still read
        self._named: dict[int, _DevicePage] = {}
        self._shared: set[int] = set()  # blocks of pages that have several readers
        most = int(num_blocks * PROTECTED_SHARE)
        self._idle = {is_elsewhere: SegmentedLru(most) for is_elsewhere in (False, True)}  # blocks of pages
        self._evicted = EvictedNames(num_blocks)
        self._num_idle = 0  # pages
        self._cost_s, self._level = cost_s, 0.0  # the level: the value of the page that was evicted last
        # The page that was to go first, and the page before the page that went instead:
        self._evicted_after: tuple[_DevicePage | None, _DevicePage | None] = None, None
        self.version = 0  # rises whenever another set of pages has names

    # --- Blocks

    @property
    def num_free(self) -> int:
        """Return how many blocks can be taken: free blocks, and blocks of idle pages."""
        return len(self._back) + self._num_blocks - self._fresh + self._num_idle

    @property
    def free(self) -> tuple[int, ...]:
        return (*super().free, *(block for order in self._idle.values() for block in order))

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or return None where there are fewer. Idle pages are evicted where free blocks lack."""
        if count > self.num_free:
            return None
        while count > len(self._back) + self._num_blocks - self._fresh:
            self._evict()
        return super().take(count)

    def give(self, blocks: Sequence[int]) -> None:
        """Give back blocks of a request. The last page becomes idle first, and so is evicted first."""
        if not self._pages:
            super().give(blocks)
            return
        read = list[_DevicePage]()
        for block in blocks:
            page = self._pages.get(block)
            if page is None:
                self._back.append(block)
            else:
                read.append(page)
        values = [self._level + self._cost_s(is_elsewhere) for is_elsewhere in (False, True)]
        for page in reversed(read):
            page.num_readers -= 1
            if page.num_readers < 2:
                self._shared.discard(page.block)
            if not page.num_readers:
                self._rest(page, values[page.is_elsewhere])

    def _rest(self, page: _DevicePage, value: float) -> None:
        """Make a page without readers idle, or free a page that has lost its name."""
        if page.is_named:
            page.value = value
            self._num_idle += 1
            self._idle[page.is_elsewhere].add(page.block)
        else:
            self._free(page)

    def _free(self, page: _DevicePage) -> None:
        del self._pages[page.block]
        self._idle[page.is_elsewhere].forget(page.block)
        self._back.append(page.block)

    def num_freed(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks of a request have no other reader."""
        if not self._shared:  # nearly always, and asked at every step for every request
            return len(blocks)
        return len(blocks) - len(self._shared.intersection(blocks))

    @property
    def kept(self) -> Collection[int]:
        """Return the blocks that nothing may be written to, since requests read these blocks, or may come to."""
        return self._pages.keys()

    @property
    def more_readers(self) -> Sequence[int]:
        """Return the blocks with several readers, each block once per reader beside the first: three readers, twice."""
        return [block for block in self._shared for _ in range(self._pages[block].num_readers - 1)]

    # --- Pages

    def find(self, names: Sequence[int]) -> int:
        """Return how many of these pages are here, counted from the first page up to the first gap."""
        found = 0
        for name in names:
            if name not in self._named:
                break
            found += 1
        return found

    def num_shared(self, names: Sequence[int]) -> int:
        """Return how many of these pages, which are here, some request reads."""
        return sum([self._named[name].num_readers > 0 for name in names])

    def num_read_once(self, names: Sequence[int]) -> int:
        """Return how many of these pages, which are here, have a single reader."""
        return sum([self._named[name].num_readers == 1 for name in names])

    def share(self, names: Sequence[int]) -> tuple[int, ...]:
        """Add a reader to these pages, which are here; return the blocks."""
        pages = [self._named[name] for name in names]
        for page in pages:
            self._num_idle -= self._idle[page.is_elsewhere].again(page.block)
            page.num_readers += 1
            if page.num_readers == 2:
                self._shared.add(page.block)
        return tuple([page.block for page in pages])

    def publish(self, names: Sequence[int], blocks: Sequence[int], num_dropped: int = 0, num_folded: int = 0) -> None:
        """Name the full pages of a request that are in these blocks, where no other pages have these names.

        The blocks begin after the `num_dropped` pages that the request has given back; the first `num_folded` pages are
        in no block. Where a page of the request was forgotten, the pages behind it get no names.
        """
        count = len(names)
        while count and names[count - 1] not in self._named:
            count -= 1
        if count < max(num_dropped, num_folded):
            return
        before = self._named[names[count - 1]] if count else None
        for at in range(count, len(names)):
            block = blocks[at - num_dropped]
            if block in self._pages:
                return
            page = _DevicePage(names[at], block, before)
            self._pages[block] = self._named[page.name] = page
            if self._evicted.has_back(page.name):
                self._idle[False].again(block)
            if before is not None:
                before.after[page.name] = page
            before = page
            self.version += 1

    def note_elsewhere(self, names: Sequence[int]) -> None:
        """Note that the pool has these pages too; pages without readers are passed over."""
        for name in names:
            page = self._named.get(name)
            if page is not None and page.num_readers and not page.is_elsewhere:
                was_used_again = self._idle[False].forget_return(page.block)
                page.is_elsewhere = True
                if was_used_again:
                    self._idle[True].again(page.block)

    def forget(self, names: Sequence[int]) -> None:
        """Let no other request find these pages, or pages that go on from them; present readers read on."""
        for name in names:
            if (page := self._named.get(name)) is not None:
                self._unname(page)

    def _unname(self, page: _DevicePage) -> None:
        """Take the names of a page and of all pages that go on from it; free the idle ones among these."""
        if page.before is not None:
            del page.before.after[page.name]
        leaving = [page]
        while leaving:
            page = leaving.pop()
            leaving += page.after.values()
            del self._named[page.name]
            page.after, page.before, page.is_named = {}, None, False
            if page.num_readers:
                self._idle[page.is_elsewhere].forget(page.block)
            else:
                self._num_idle -= 1
                self._free(page)
        self.version += 1

    def _evict(self) -> None:
        """Free the idle page of least value, or else the last idle page that goes on from that page."""
        *_, first = min([self._first_of(order) for order in self._idle.values() if order])
        page = self._last_idle(first)
        self._evicted_after = first, page.before
        self._level = max(self._level, page.value)
        self._evicted.note(page.name)
        self._unname(page)

    def _first_of(self, order: SegmentedLru) -> tuple[bool, float, bool, _DevicePage]:
        """Return the page of this order that goes first, after the values to compare pages by."""
        is_protected, block = order.first()
        page = self._pages[block]
        return is_protected, page.value, page.is_elsewhere, page

    def _last_idle(self, first: _DevicePage) -> _DevicePage:
        """Return an idle page that goes on from this page, and that no idle page goes on from.

        The search goes on where the one before ended: thousands of pages may go on from a page."""
        before, page = self._evicted_after
        if before is not first or page is None or page.num_readers or not page.is_named:
            page = first
        while page.after and (last := next((page for page in page.after.values() if not page.num_readers), None)):
            page = last
        return page
