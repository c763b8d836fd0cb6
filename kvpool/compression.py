"""Which pages of those who wait become int8, and when (ALISE §3.2).

    off     none
    auto    where fewer than a quarter of the pages, the reserve apart, is to be had: of who has longest to wait first,
            until there are more
    int8    all full ones, as they come

The pool commands and a worker does it, beside its steps: Compress ─▶ worker ─▶ Compressed. A worker has one such order
at a time, and its numbers rise, so one that comes twice is known. What was lost is said again with the inquiries after
all that is out. The new pages are leased to the worker under a name of its own, since an ask for pages gives back what
its other lease has. If it dies, they are free when its lock is; until then it may still be writing.

An order that nobody needs any more is not called back. Its pages wait for the answer, and if somebody who runs has one
of them by then, that one stays as it is: whoever got its number reads it.

What cannot be compressed now, since somebody who runs shares it or since it was in such an order, is looked at again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from alignedserve.core import Entry
from alignedserve.kvpool.grouping import Waiters, Waiting
from alignedserve.kvpool.pages import Pages
from alignedserve.kvpool.waiting_order import WaitingOrder
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Compress, Compressed, Member
from alignedserve.scheduling.policy import Compression

PRESSURE = 0.25  # of all pages but the reserve: with fewer to be had, `auto` begins
AT_ONCE = 8  # pages of an order
_LOOK_S = 1.0  # between two times that all who wait are put in order, or those are looked at again who were passed over


@dataclass(frozen=True)
class _Order:
    holder: str
    command: Compress


class Compressor:
    def __init__(self, mode: Compression, pages: Pages, waiters: Waiters, order: WaitingOrder) -> None:
        self._mode, self._pages, self._waiters, self._order = mode, pages, waiters, order
        self._workers: dict[str, str] = {}  # name -> holder; who was idle longest comes first
        self._orders: dict[str, _Order] = {}  # worker -> what it has to do
        self._new: dict[str, None] = {}  # who waits and may have pages to compress
        self._next: deque[str] = deque()  # of them, in the order that was right when it was looked at
        self._look_at = 0.0  # not before then again
        self._later: dict[str, None] = {}  # who waits and has pages that could not be compressed when it was looked at
        self._again_at = 0.0  # not before then are they
        self._number = 0
        self.num_compressed = 0  # pages
        self.num_refused = 0  # pages that had to stay as they were

    def met(self, member: Member) -> None:
        self._workers[member.name] = member.holder

    def lost(self, name: str) -> None:
        """It gets no more. What it has to do it may still do, and what it writes to is its own."""
        self._workers.pop(name, None)

    def gone(self, holder: str) -> None:
        """It writes no more."""
        for worker, order in list(self._orders.items()):
            if order.holder == holder:
                del self._orders[worker]
                for page in order.command.pages:
                    self._pages.compressed(lease_to_compress(holder), page, take=False)
                    self._pass_over(page)

    def waits(self, request: str) -> None:
        if self._mode is not Compression.OFF:
            self._new[request] = None

    def waits_no_longer(self, request: str) -> None:
        self._new.pop(request, None)
        self._later.pop(request, None)

    def answered(self, worker: str, holder: str, answer: Compressed) -> None:
        order = self._orders.get(worker)
        if order is None or (order.holder, order.command.number) != (holder, answer.number):
            return
        del self._orders[worker]
        for page, done in zip(order.command.pages, answer.done, strict=True):
            take = done and self._waits_only(page)
            if not done:
                self._pages.cannot_compress(page)
            self._pages.compressed(lease_to_compress(holder), page, take)
            if done and not take:
                self._pass_over(page)
            self.num_compressed += take
            self.num_refused += not done

    def say_again(self, worker: str) -> list[Command]:
        order = self._orders.get(worker)
        if order is None or self._workers.get(worker) != order.holder:  # another life must not write there
            return []
        return [Send(worker, order.command)]

    @property
    def working(self) -> Iterable[str]:
        """Workers that have an order."""
        return self._orders

    @property
    def num_compressing(self) -> int:
        return sum(len(order.command.pages) for order in self._orders.values())

    def orders(self, now: float) -> list[Command]:
        """What there is to compress now, for each worker that has nothing to compress."""
        if self._later and now >= self._again_at:
            self._again_at = now + _LOOK_S
            self._new |= self._later
            self._later.clear()
        if not self._new:
            return []
        commands: list[Command] = []
        for worker, holder in list(self._workers.items()):
            if worker in self._orders or not self._is_wanted:
                continue
            pages = self._chosen(now)
            into = self._pages.compress(lease_to_compress(holder), pages) if pages else None
            if into is None:
                break
            self._number += 1
            order = Compress(self._number, pages, into)
            self._orders[worker] = _Order(holder, order)
            self._workers[worker] = self._workers.pop(worker)
            commands.append(Send(worker, order))
        return commands

    @property
    def _is_wanted(self) -> bool:
        return self._mode is Compression.INT8 or self._is_pressed

    @property
    def _is_pressed(self) -> bool:
        return self._pages.free_share < PRESSURE

    def _chosen(self, now: float) -> tuple[int, ...]:
        """The next pages; none where they would take more room than they leave."""
        most = min(AT_ONCE, self._pages.room_to_compress())
        chosen: list[int] = []
        looked: list[Waiting] = []
        for waiting in self._candidates(now):
            pages = [page for page in self._compressible(waiting) if page not in chosen]
            room = most - len(chosen)
            chosen += pages[:room]
            if len(pages) <= room:
                looked.append(waiting)
            if len(pages) >= room:
                break
        if not self._pays(len(chosen)):
            return ()
        for waiting in looked:
            self._new.pop(waiting.id, None)
            if any(page not in chosen for page in self._to_be_compressed(waiting)):
                self._later[waiting.id] = None
        return tuple(chosen)

    def _pays(self, pages: int) -> bool:
        """Under pressure an extent is begun only for what is more KV than finds room in it."""
        if not self._is_pressed or pages <= self._pages.room_to_compress(begun=True):
            return True
        so_many = accumulate(len(self._compressible(one)) for one in self._waiting(self._new))
        return any(pages > self._pages.extents.kv for pages in so_many)

    def _candidates(self, now: float) -> Iterator[Waiting]:
        """Under pressure those with longest to wait first, else as they came."""
        if self._mode is Compression.INT8:
            yield from self._waiting(self._new)
            return
        while self._next and self._next[0] not in self._new:
            self._next.popleft()
        yield from self._waiting(self._next)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            in_order = self._order.longest_first(list(self._waiters), now)
            self._next = deque(one.id for one in in_order if one.id in self._new)
            yield from self._waiting(self._next)

    def _waiting(self, requests: Iterable[str]) -> Iterator[Waiting]:
        for request in requests:
            waiting = self._waiters.waiting(request) if request in self._new else None
            if waiting is not None:
                yield waiting

    def _full_pages(self, entry: Entry) -> tuple[int, ...]:
        """Those with a name are full; where nothing is named, all but the last."""
        return self._pages.of(entry.request.id)[: max(len(entry.names), len(entry.pages) - 1)]

    def _to_be_compressed(self, waiting: Waiting) -> list[int]:
        return [page for page in self._full_pages(waiting.entry) if self._pages.is_to_be_compressed(page)]

    def _compressible(self, waiting: Waiting) -> list[int]:
        """Now."""
        pages = self._to_be_compressed(waiting)
        return [page for page in pages if self._pages.can_compress(page) and self._waits_only(page)]

    def _pass_over(self, page: int) -> None:
        """It was to be compressed, and stays as it is until those who have it are looked at again."""
        self._later |= {request: None for request in self._pages.entries_with(page) if self._waiters.waiting(request)}

    def _waits_only(self, page: int) -> bool:
        """Somebody has the page, and none of those runs."""
        entries = list(self._pages.entries_with(page))
        return bool(entries) and all(self._waiters.waiting(request) is not None for request in entries)


def lease_to_compress(holder: str) -> str:
    """The name of the lease by which a worker has what it writes int8 to."""
    return f"{holder}/compressing"
