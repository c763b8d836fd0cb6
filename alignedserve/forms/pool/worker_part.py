"""A worker's part in compressing pages for the pool: one after the other, beside its steps."""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.forms.messages import Compress, Compressed
from alignedserve.forms.orders import CompressPage
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import MemberJoined, PageCompressed, Received
from alignedserve.worker.part import Events, FormPart, Worker

_WEIGHT = 0.1  # of the newest page in the mean


class Compressing:
    """Carry out one order of the pool at a time, a page after the other.

    The pool repeats an order that it has no answer to. An order with a known number is not done twice, since other
    requests may use the pages by now: if the order is done, the answer is sent again.
    """

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


class PageRewriting(FormPart):
    """Compresses pages for the pool, beside the steps."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._orders = Compressing()

    @property
    def events(self) -> Events:
        return {
            Compress: (self._ordered,),
            PageCompressed: (self._page_done,),
            (MemberJoined, Role.POOL): (self._pool_joined,),
        }

    def _ordered(self, order: Compress, frame: Received, now: float) -> list[Command]:
        return self._send(self._orders.take(order))

    def _page_done(self, page: PageCompressed, now: float) -> list[Command]:
        return self._send(self._orders.end_page(page))

    def _pool_joined(self, event: MemberJoined, now: float) -> None:
        self._orders.meet(event.member.holder)

    def act(self, now: float) -> list[Command]:
        """Compress a page where no step is due: none runs, or no request is late if the next one begins later."""
        if self._pool.member is None or not self._orders.has_work or not self._can_wait(self._orders.page_s, now):
            return []
        return [self._orders.next_page()]

    def _can_wait(self, seconds: float, now: float) -> bool:
        """Return whether all next tokens are in time even if the next step begins `seconds` later."""
        if self._steps.running is None:
            return True
        bound = now + 2 * self._pace.times.most_s + seconds
        promises = (running.promise for running in self._here.occupants())
        return all(promise.due_at(now) > bound for promise in promises if promise.is_rt)

    def _send(self, answer: Compressed | None) -> list[Command]:
        return [] if answer is None else self._pool.send(answer)
