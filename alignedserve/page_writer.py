"""What a worker writes to the pool: the pages that it has leased, the copies to them, and their names.

    ask ──▶ at hand ──▶ in a copy ──▶ handed on to the pool (Commit, Keep)
               ▲            └── nobody wants it any more: at hand again

A prefill worker waits for pages, of each class apart, and asks for as many as the first who waits needs. A decode
worker never waits: it asks for some to have at hand (spare ones), which the pool takes from it as soon as anybody
waits.

Copies and steps are done in the order in which they are ordered: whatever is written to the pairs of a copy by what is
ordered after it, is written when the copy has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from alignedserve.core import ServiceClass
from alignedserve.kvpool.pages import more_hashes
from alignedserve.leases import Lease, Need
from alignedserve.messages import SPARE, Command, CopyOut, LeasePages, Member, Send
from alignedserve.running import Running, units_for


class PageNames:
    def __init__(self, page_size: int, root: bytes) -> None:
        """`root` names the model and the layout of its KV."""
        self._page_size, self._root = page_size, root

    def of(self, running: Running, tokens: int) -> tuple[int, ...]:
        """Of the full pages of so many of its tokens: each is hashed once on a worker."""
        full, known = tokens // self._page_size, running.names
        if len(known) < full:
            more = running.tokens(len(known) * self._page_size, full * self._page_size)
            root = self._root + running.request.salt.encode()
            running.names = more_hashes(known, more, self._page_size, root)
        return running.names[:full]


@dataclass
class Copy:
    """Of a request to pages of the pool. They stay taken until it has ended, whether anybody wants it or not."""

    running: Running
    known: tuple[int, ...]  # pages of the pool that come before
    pages: tuple[int, ...]
    lease: ServiceClass  # by which we have them
    pool: str  # its holder
    wanted: bool = True
    has_ended: bool = False  # the request, as the copy began: only its full pages are written


class PageWriter:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._leases = {service: Lease(service) for service in ServiceClass}
        self._copies: dict[int, Copy] = {}
        self._copies_before: dict[int, str] = {}  # still under way, to a pool that was lost: number -> its holder
        self._copy_number = 0

    @property
    def leased(self) -> tuple[int, ...]:
        return tuple(page for service in ServiceClass for page in self.leased_for(service))

    def leased_for(self, service: ServiceClass) -> tuple[int, ...]:
        return (*self._leases[service].pages, *self._in_copies(service))

    def num_at_hand(self, service: ServiceClass) -> int:
        return len(self._leases[service].pages)

    @property
    def copies(self) -> list[Copy]:
        return list(self._copies.values())

    @property
    def awaits_the_pool(self) -> bool:
        return any(lease.is_awaited for lease in self._leases.values())

    def may_write(self, pool: Member) -> bool:
        """Not before all copies to an earlier meeting with it have ended: their pages may be somebody else's."""
        return pool.holder not in self._copies_before.values()

    def pages_for(self, running: Running, tokens: int) -> int:
        """That the pool lacks of the first tokens."""
        return units_for(tokens, self._page_size) - len(running.known)

    # --- Leases

    def answered(self, lease: LeasePages) -> bool:
        """Whether there may be more pages at hand."""
        return self._leases[lease.service].answered(lease)

    def ask(self, pool: Member, service: ServiceClass, need: Need) -> list[Command]:
        ask = self._leases[service].ask(need, self._in_copies(service))
        return [] if ask is None else [Send(pool.name, ask)]

    def ask_for_spare(self, pool: Member, wanted: int) -> list[Command]:
        ask = self._leases[SPARE].ask_for_spare(wanted, self._in_copies(SPARE))
        return [] if ask is None else [Send(pool.name, ask)]

    def give_back(self, pool: Member) -> Command:
        """Somebody waits for pages."""
        return Send(pool.name, self._leases[SPARE].give_back(self._in_copies(SPARE)))

    def ask_again(self) -> None:
        for lease in self._leases.values():
            lease.ask_again()

    # --- Copies

    def begin(
        self,
        running: Running,
        pool: Member,
        tokens: int,
        service: ServiceClass,
        has_ended: bool = False,
        saved: tuple[tuple[int, int], ...] = (),
    ) -> CopyOut:
        """Of the tokens whose pages the pool lacks, to pages at hand for that class, which must be enough.

        `saved` are those that have no slot, and their places."""
        pages = self._leases[service].take(self.pages_for(running, tokens))
        self._copy_number += 1
        self._copies[self._copy_number] = Copy(running, running.known, pages, service, pool.holder, has_ended=has_ended)
        start = len(running.known) * self._page_size
        written, right = running.tokens(0, tokens), running.from_right
        return CopyOut(self._copy_number, pool.holder, running.pairs, pages, written, start, right, saved)

    def ended(self, number: int) -> Copy | None:
        """The copy whose pages are to be handed on, or else taken back; nothing where its pool was lost."""
        self._copies_before.pop(number, None)
        return self._copies.pop(number, None)

    def handed_on(self, copy: Copy) -> None:
        self._leases[copy.lease].handed_on()

    def take_back(self, copy: Copy) -> None:
        self._leases[copy.lease].pages += copy.pages

    def drop(self, request: str, attempt: int) -> list[Running]:
        """Those that nobody wants any more; of one that has ended, what it leaves is wanted still."""
        dropped = [copy for copy in self._copies.values() if copy.running.is_of(request, attempt)]
        dropped = [copy for copy in dropped if not copy.has_ended]
        for copy in dropped:
            copy.wanted = False
        return [copy.running for copy in dropped]

    def pool_lost(self) -> list[Running]:
        """Its pages are gone; who was being copied to them and is wanted.

        It may come back in the same life, with these pages leased to us still: as an ask would have it lease
        them to others, none is sent before the copies that write to them have ended.
        """
        for lease in self._leases.values():
            lease.lost()
        self._copies_before |= {number: copy.pool for number, copy in self._copies.items()}
        again = [copy.running for copy in self._copies.values() if copy.wanted and not copy.has_ended]
        self._copies = {number: replace(copy, pages=()) for number, copy in self._copies.items() if not copy.wanted}
        return again

    def _in_copies(self, service: ServiceClass) -> tuple[int, ...]:
        return tuple(page for copy in self._copies.values() if copy.lease is service for page in copy.pages)
