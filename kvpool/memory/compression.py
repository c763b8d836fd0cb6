"""The compression of waiting requests' pages to int8: which pages, and when (ALISE §3.2).

    off     no pages
    auto    while fewer than a quarter of the pages are free: pages of the request with the longest expected wait first
    int8    all full pages, as they come

The pool gives the order, and a worker compresses beside its steps: Compress ─▶ worker ─▶ Compressed. A worker has one
order at a time. Order numbers rise, so a worker recognises an order that comes twice. The pool repeats lost orders with
its inquiries. The new pages are leased to the worker under a separate name, since an ask for pages gives back the
worker's other leased pages. If the worker dies, the new pages are free when the worker's lock is: before, it may still
write.

The pool does not call back an order that is no longer needed. If a running request has a page by the time of the
answer, the page stays uncompressed, since a worker reads it by its number.

A page that a running request shares, or that is in an order, cannot be compressed now, and is looked at again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from alignedserve.core import Entry, Role
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.kvpool.memory.pages_of_kinds import CompressiblePages
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, HolderGone, MemberJoined, MemberLost, Received
from alignedserve.protocol.extents import Extents
from alignedserve.protocol.form_messages import Compress, Compressed
from alignedserve.protocol.messages import AskBatch, holder
from alignedserve.scheduling.dues import Promise
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.lengths import tokens_left
from alignedserve.scheduling.levels import InLine, level_of, shortest_wait_first
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Standing


class WaitsInPool(Protocol):
    """A request that waits in the pool."""

    @property
    def id(self) -> str: ...

    @property
    def entry(self) -> Entry: ...

    @property
    def promise(self) -> Promise: ...

    @property
    def since(self) -> float: ...

    def standing(self, ask: AskBatch, now: float) -> Standing: ...


class AllWaiting(Protocol):
    """All requests that wait in the pool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[WaitsInPool]: ...

    def waiting(self, request: str) -> WaitsInPool | None: ...


class Rewriting:
    """Has workers write the pages of waiting requests again, in another form: the interface of such forms to the pool.

    Leaves all pages as they are: what the pool does without such a form (alignedserve/forms/page_rewriting.py).
    """

    num_rewritten = 0  # pages, since the start
    num_refused = 0  # pages that a worker could not write

    @property
    def num_under_way(self) -> int:
        """Return how many pages workers write now."""
        return 0

    @property
    def working(self) -> Collection[str]:
        """Return the workers that write some."""
        return ()

    def hear(self, event: Event) -> None:
        """Hear of each event before the pool's pages and requests follow it."""

    def waits(self, request: str) -> None:
        """Note that the request waits in the pool: the pages may be written again."""

    def waits_no_longer(self, request: str) -> None: ...

    def orders(self, now: float) -> Iterable[Command]:
        """Return orders to workers that have time to write pages."""
        return ()

    def say_again(self, worker: str) -> Iterable[Command]:
        """Return the order that a worker may not have heard."""
        return ()


PRESSURE = 0.25  # `auto` begins when a smaller share of the pages is free
AT_ONCE = 8  # most pages in an order
_LOOK_S = 1.0  # between two times that waiting requests are ordered, or that passed-over requests are looked at again


@dataclass(frozen=True)
class _OpenOrder:
    holder: str
    command: Compress


class Compressor(Rewriting):
    def __init__(self, policy: Policy, pages: CompressiblePages, waiters: AllWaiting) -> None:
        self._mode, self._pages, self._waiters, self._order = policy.compression, pages, waiters, WaitingOrder(policy)
        self._workers: dict[str, str] = {}  # name -> holder, the longest idle worker first
        self._orders: dict[str, _OpenOrder] = {}  # worker -> its order
        self._new: dict[str, None] = {}  # waiting requests that may have pages to compress
        self._next: deque[str] = deque()  # some of them, in the order of the last look
        self._look_at = 0.0  # time of the next look
        self._later: dict[str, None] = {}  # waiting requests with pages that could not be compressed
        self._again_at = 0.0  # when these are looked at again
        self._number = 0

    def hear(self, event: Event) -> None:
        match event:
            case Received(worker, Compressed() as answer, incarnation):
                self._answered(worker, holder(worker, incarnation), answer)
            case Received(message=AskBatch() as ask):
                self._order.heard(ask)
            case MemberJoined(member) if member.role in (Role.PREFILL, Role.DECODE):
                self._workers[member.name] = member.holder
            case MemberLost(member) if member.role in (Role.PREFILL, Role.DECODE):
                # It gets no more orders. It may still carry out its order, into pages that only it has.
                self._workers.pop(member.name, None)
            case HolderGone(gone):
                self._take_back(gone)

    def _take_back(self, holder: str) -> None:
        """Take back the pages of a holder that writes no more."""
        for worker, order in list(self._orders.items()):
            if order.holder == holder:
                del self._orders[worker]
                for page in order.command.pages:
                    self._pages.compressed(lease_to_compress(holder), page, take=False)
                    self._pass_over(page)

    def waits(self, request: str) -> None:
        self._new[request] = None

    def waits_no_longer(self, request: str) -> None:
        self._new.pop(request, None)
        self._later.pop(request, None)

    def _answered(self, worker: str, holder: str, answer: Compressed) -> None:
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
            self.num_rewritten += take
            self.num_refused += not done

    def say_again(self, worker: str) -> list[Command]:
        order = self._orders.get(worker)
        if order is None or self._workers.get(worker) != order.holder:  # a new incarnation must not write there
            return []
        return [Send(worker, order.command)]

    @property
    def working(self) -> Collection[str]:
        return self._orders

    @property
    def num_under_way(self) -> int:
        return sum(len(order.command.pages) for order in self._orders.values())

    def orders(self, now: float) -> list[Command]:
        """Give an order to each worker that has none, while there are pages to compress."""
        if self._later and now >= self._again_at:
            self._again_at = now + _LOOK_S
            self._new |= self._later
            self._later.clear()
        if not self._new:
            return []
        commands: list[Command] = []
        for worker, by in list(self._workers.items()):
            if worker in self._orders or not (self._mode is Compression.INT8 or self._is_pressed):
                continue
            pages = self._chosen(now)
            into = self._pages.compress(lease_to_compress(by), pages) if pages else None
            if into is None:
                break
            self._number += 1
            order = Compress(self._number, pages, into)
            self._orders[worker] = _OpenOrder(by, order)
            self._workers[worker] = self._workers.pop(worker)
            commands.append(Send(worker, order))
        return commands

    @property
    def _is_pressed(self) -> bool:
        return self._pages.free_share < PRESSURE

    def _chosen(self, now: float) -> tuple[int, ...]:
        """Choose the next pages; none where compression would take more room than it frees."""
        most = min(AT_ONCE, self._pages.room_to_compress())
        chosen: list[int] = []
        looked: list[WaitsInPool] = []
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
        """Return whether compression pays: under pressure a new extent must free more KV pages than it takes."""
        if not self._is_pressed or pages <= self._pages.room_to_compress(begun=True):
            return True
        together = accumulate(len(self._compressible(waiting)) for waiting in self._waiting(self._new))
        return any(pages > self._pages.extents.kv for pages in together)

    def _candidates(self, now: float) -> Iterator[WaitsInPool]:
        """Yield candidates: by longest expected wait under pressure, else in the order of arrival."""
        if self._mode is Compression.INT8:
            yield from self._waiting(self._new)
            return
        while self._next and self._next[0] not in self._new:
            self._next.popleft()
        yield from self._waiting(self._next)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            in_order = self._order.longest_first(list(self._waiters), now)
            self._next = deque(waiting.id for waiting in in_order if waiting.id in self._new)
            yield from self._waiting(self._next)

    def _waiting(self, requests: Iterable[str]) -> Iterator[WaitsInPool]:
        for request in requests:
            waiting = self._waiters.waiting(request) if request in self._new else None
            if waiting is not None:
                yield waiting

    def _to_be_compressed(self, waiting: WaitsInPool) -> list[int]:
        """Return full pages that are KV yet: those with a name, or all but the last where pages have no names."""
        entry, pages = waiting.entry, self._pages
        full = pages.pages_of(entry.request.id)[: max(len(entry.names), len(entry.pages) - 1)]
        return [page for page in full if pages.is_to_be_compressed(page)]

    def _compressible(self, waiting: WaitsInPool) -> list[int]:
        """Return the pages that can be compressed now."""
        pages = self._to_be_compressed(waiting)
        return [page for page in pages if self._pages.can_compress(page) and self._waits_only(page)]

    def _pass_over(self, page: int) -> None:
        """Leave the page until its requests are looked at again."""
        self._later |= {request: None for request in self._pages.entries_with(page) if self._waiters.waiting(request)}

    def _waits_only(self, page: int) -> bool:
        """Return whether only waiting requests have the page, one at least."""
        entries = list(self._pages.entries_with(page))
        return bool(entries) and all(self._waiters.waiting(request) is not None for request in entries)


def lease_to_compress(holder: str) -> str:
    """Return the name of the lease of the pages that a worker writes int8 to."""
    return f"{holder}/compressing"


_WEIGHT = 0.1  # weight of the newest ask in the mean batch


class WaitingOrder:
    """Waiting requests by expected wait, from what decode workers say: the longest is compressed first.

    scheduling/levels.py has the formula (ALISE §3.2), scheduling/lengths.py the predicted lengths of answers.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ask = AskBatch(0, 0)  # the newest ask
        self._mean_batch = 1.0

    def heard(self, ask: AskBatch) -> None:
        """Learn from an ask how many requests run there: all places of the worker less the free places."""
        running = max(1, ask.most_requests - ask.requests)
        self._ask = ask
        self._mean_batch += _WEIGHT * (running - self._mean_batch)

    def longest_first(self, waiting: Sequence[WaitsInPool], now: float) -> list[WaitsInPool]:
        """Return the requests, longest expected wait first; among equals the request that is served later first."""
        ask, policy = self._ask, self._policy
        as_served = policy.ordering.of_waits.sort(waiting, lambda of: of.standing(ask, now), ask.times, policy.late)

        def in_line(of: WaitsInPool) -> InLine:
            tokens = tokens_left(of.entry.request, policy, len(of.entry.output))
            return InLine(tokens * ask.times.mean_s, now - of.since, None if of.promise.is_rt else level_of(tokens))

        return shortest_wait_first(list(as_served), in_line, self._mean_batch, policy.age_s)[::-1]


def pages_of(extents: Extents) -> Pages:
    """Return the pages of these extents, all free."""
    if len(extents.kinds) > 1:
        return CompressiblePages(extents)
    return Pages(extents.num_pages(extents.first_kind))


def rewriting_of(policy: Policy, pages: Pages, waiters: AllWaiting) -> Rewriting:
    if policy.compression is not Compression.OFF and isinstance(pages, CompressiblePages):
        return Compressor(policy, pages, waiters)
    return Rewriting()
