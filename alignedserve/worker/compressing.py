"""Compress pages for the pool: one order at a time, a page after the other.

The pool repeats an order that it has no answer to. So an order whose number is known is not done twice, since its pages
may be in use for other requests by now: if it is done, its answer is sent again.
"""

from __future__ import annotations

from alignedserve.protocol.commands import CompressPage
from alignedserve.protocol.events import PageCompressed
from alignedserve.protocol.messages import Compress, Compressed

_WEIGHT = 0.1  # of the newest page in the mean


class Compressing:
    def __init__(self) -> None:
        self._pool = ""  # the holder that gives orders
        self._order: Compress | None = None  # the newest one
        self._done: list[bool] = []  # for each of its pages, whether it could be done
        self._in_hand = False
        self.page_s = 0.0  # seconds that a page takes

    def meet(self, pool: str) -> None:
        """Forget what another pool, or another life of this one, has ordered."""
        if pool != self._pool:
            self._pool, self._order, self._done, self._in_hand = pool, None, [], False

    @property
    def has_work(self) -> bool:
        return self._order is not None and not self._in_hand and len(self._done) < len(self._order.pages)

    def take(self, order: Compress) -> Compressed | None:
        """Take an order, and return the answer where it is done already."""
        known = -1 if self._order is None else self._order.number
        if order.number > known:
            self._order, self._done = order, []
        return self._answer if order.number == known else None

    def next_page(self) -> CompressPage:
        """Return the command to compress the next page."""
        assert self._order is not None, "there is work"
        self._in_hand = True
        at = len(self._done)
        return CompressPage(self._order.number, self._pool, self._order.pages[at], self._order.into[at])

    def end_page(self, page: PageCompressed) -> Compressed | None:
        """Note that a page is done, and return the answer with the last page."""
        if page.pool != self._pool or self._order is None:
            return None
        self._in_hand = False
        self.page_s += (_WEIGHT if self.page_s else 1.0) * (page.seconds - self.page_s)
        self._done.append(page.done)
        return self._answer

    @property
    def _answer(self) -> Compressed | None:
        order = self._order
        return Compressed(order.number, tuple(self._done)) if order and len(self._done) == len(order.pages) else None
