"""What a worker has to compress for the pool: one order at a time, a page after the other.

The pool repeats an order that it has no answer to. So an order whose number is known is not done twice, since its pages
may be somebody else's by now: if it is done, its answer is said again.
"""

from __future__ import annotations

from alignedserve.protocol.commands import CompressPage
from alignedserve.protocol.events import PageCompressed
from alignedserve.protocol.messages import Compress, Compressed

_WEIGHT = 0.1  # of the newest page in the mean


class Compressing:
    def __init__(self) -> None:
        self._pool = ""  # the holder that orders
        self._order: Compress | None = None  # the last one
        self._done: list[bool] = []  # of its pages
        self._in_hand = False
        self.page_s = 0.0  # that a page takes

    def met(self, pool: str) -> None:
        """One that is in another life knows nothing of what its last life has ordered."""
        if pool != self._pool:
            self._pool, self._order, self._done, self._in_hand = pool, None, [], False

    @property
    def has_work(self) -> bool:
        return self._order is not None and not self._in_hand and len(self._done) < len(self._order.pages)

    def ordered(self, order: Compress) -> Compressed | None:
        """An answer, if there is one."""
        known = -1 if self._order is None else self._order.number
        if order.number > known:
            self._order, self._done = order, []
        return self._answer if order.number == known else None

    def next_page(self) -> CompressPage:
        assert self._order is not None, "there is work"
        self._in_hand = True
        at = len(self._done)
        return CompressPage(self._order.number, self._pool, self._order.pages[at], self._order.into[at])

    def page_done(self, one: PageCompressed) -> Compressed | None:
        """An answer, with the last page."""
        if one.pool != self._pool or self._order is None:
            return None
        self._in_hand = False
        self.page_s += (_WEIGHT if self.page_s else 1.0) * (one.seconds - self.page_s)
        self._done.append(one.done)
        return self._answer

    @property
    def _answer(self) -> Compressed | None:
        order = self._order
        return Compressed(order.number, tuple(self._done)) if order and len(self._done) == len(order.pages) else None
