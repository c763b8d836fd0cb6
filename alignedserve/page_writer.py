"""What a worker writes to the pool: the pages that it has leased, the copies to them, and their names.

    ask ──▶ at hand ──▶ in a copy ──▶ handed on to the pool (Commit, Keep)
               ▲            └── nobody wants it any more: at hand again

A prefill worker waits for pages, and asks for as many as the first who waits needs. A decode worker never waits: it
asks for some to have at hand (spare ones), which the pool takes from it as soon as anybody waits.

Copies and steps are done in the order in which they are ordered: whatever is written to the pairs of a copy by what is
ordered after it, is written when the copy has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from alignedserve.kvpool.pages import more_hashes
from alignedserve.messages import AskPages, Command, CopyOut, LeasePages, Member, Send
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
    pool: str  # its holder
    wanted: bool = True
    has_ended: bool = False  # the request, as the copy began: only its full pages are written


class PageWriter:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._at_hand: list[int] = []  # pages of the pool that are ours to write to
        self._copies: dict[int, Copy] = {}
        self._copies_before: dict[int, str] = {}  # still under way, to a pool that was lost: number -> its holder
        self._copy_number = 0
        self._asks = 0
        self._asked: int | None = None  # pages of the ask that is not answered yet
        self._handed_on = False  # since the last ask: if that frame was lost, only an ask frees its pages
        self._had = 0  # spare pages that were wanted when the last answer came: it said how many there were

    @property
    def num_at_hand(self) -> int:
        return len(self._at_hand)

    @property
    def leased(self) -> tuple[int, ...]:
        return (*self._at_hand, *self._in_copies)

    @property
    def copies(self) -> list[Copy]:
        return list(self._copies.values())

    @property
    def awaits_the_pool(self) -> bool:
        return self._asked is not None or self._handed_on

    def may_write(self, pool: Member) -> bool:
        """Not before all copies to an earlier meeting with it have ended: their pages may be somebody else's."""
        return pool.holder not in self._copies_before.values()

    def pages_for(self, running: Running, tokens: int) -> int:
        """That the pool lacks of the first tokens."""
        return units_for(tokens, self._page_size) - len(running.known)

    # --- Leases

    def leased_more(self, lease: LeasePages) -> None:
        if lease.number == self._asks:  # an earlier ask's pages went back with the later ask
            self._at_hand += lease.pages
            self._had, self._asked = max(self._asked or 0, 0), None

    def ask(self, pool: Member, wanted: int) -> list[Command]:
        """For all pages that are needed, giving back those at hand: who keeps some and waits for more blocks others."""
        enough = not (wanted or self._at_hand) if self._asked is None else self._asked >= wanted
        if enough:
            return []
        self._at_hand.clear()
        return [self._ask(pool, wanted, wanted, is_spare=False)]

    def ask_for_spare(self, pool: Member, wanted: int) -> list[Command]:
        """To have so many at hand. Whatever the pool had is enough, until some were used or more are wanted."""
        if (self._had if self._asked is None else self._asked) >= wanted:
            return []
        more = max(0, wanted - len(self._at_hand))
        return [self._ask(pool, wanted, more, is_spare=True)] if more or self._asked == -1 else []

    def give_back(self, pool: Member) -> Command:
        """Somebody waits for pages: all at hand, though they are asked for again."""
        self._at_hand.clear()
        self._had = 0
        return self._ask(pool, 0, 0, is_spare=True)

    def ask_again(self) -> None:
        """As after an ask for less than nothing: what is needed, and what is given back, is said anew."""
        if self.awaits_the_pool:
            self._at_hand.clear()
            self._asked = -1

    def _ask(self, pool: Member, wanted: int, more: int, *, is_spare: bool) -> Command:
        self._handed_on = False
        self._asks += 1
        self._asked = wanted
        return Send(pool.name, AskPages(more, self._asks, self.leased, is_spare))

    # --- Copies

    def begin(self, running: Running, pool: Member, tokens: int, has_ended: bool = False) -> CopyOut:
        """Of the tokens whose pages the pool lacks, to pages at hand, which must be enough."""
        pages = tuple(self._at_hand.pop() for _ in range(self.pages_for(running, tokens)))
        self._had = 0
        self._copy_number += 1
        self._copies[self._copy_number] = Copy(running, running.known, pages, pool.holder, has_ended=has_ended)
        start = len(running.known) * self._page_size
        return CopyOut(self._copy_number, pool.holder, running.pairs, pages, running.tokens(0, tokens), start)

    def ended(self, number: int) -> Copy | None:
        """The copy whose pages are to be handed on, or else taken back; nothing where its pool was lost."""
        self._copies_before.pop(number, None)
        return self._copies.pop(number, None)

    def handed_on(self) -> None:
        self._handed_on = True

    def take_back(self, copy: Copy) -> None:
        self._at_hand += copy.pages

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
        self._at_hand.clear()
        self._had = 0
        self._asked, self._handed_on = (-1 if self._asks else None), False  # what it leased to us it is to hear of
        self._copies_before |= {number: copy.pool for number, copy in self._copies.items()}
        again = [copy.running for copy in self._copies.values() if copy.wanted and not copy.has_ended]
        self._copies = {number: replace(copy, pages=()) for number, copy in self._copies.items() if not copy.wanted}
        return again

    @property
    def _in_copies(self) -> Iterator[int]:
        return (page for copy in self._copies.values() for page in copy.pages)
