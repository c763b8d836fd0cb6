"""A worker's part in compressing pages for the pool."""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import MemberJoined, PageCompressed, Received
from alignedserve.protocol.form_messages import Compress, Compressed
from alignedserve.protocol.form_orders import CompressPage
from alignedserve.worker.part import Events, FormPart, Worker

_WEIGHT = 0.1  # of the newest page in the mean


class PageRewriting(FormPart):
    """Compresses pages for the pool where no step is due: one order of the pool at a time, a page after the other.

    The pool repeats an order that it has no answer to. An order with a known number is not done twice, since other
    requests may use the pages by now: if the order is done, the answer is sent again.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._giver = ""  # the holder of the pool that gives orders
        self._order: Compress | None = None  # the newest one
        self._done: list[bool] = []  # for each of its pages, whether it could be done
        self._in_hand = False
        self._page_s = 0.0  # seconds that steps wait for a page

    @property
    def events(self) -> Events:
        return {
            Compress: (self._ordered,),
            PageCompressed: (self._page_done,),
            (MemberJoined, Role.POOL): (self._pool_joined,),
        }

    def _ordered(self, order: Compress, frame: Received, now: float) -> list[Command]:
        known = -1 if self._order is None else self._order.number
        if order.number > known:
            self._order, self._done = order, []
        return self._answered if order.number == known else []

    def _page_done(self, page: PageCompressed, now: float) -> list[Command]:
        if page.pool != self._giver or self._order is None:
            return []
        self._in_hand = False
        self._page_s += (_WEIGHT if self._page_s else 1.0) * (page.seconds - self._page_s)
        self._done.append(page.done)
        return self._answered

    @property
    def _answered(self) -> list[Command]:
        """Return the answer to the order, if all its pages are done."""
        order = self._order
        is_done = order is not None and len(self._done) == len(order.pages)
        return self._pool.send(Compressed(order.number, tuple(self._done))) if order is not None and is_done else []

    def _pool_joined(self, event: MemberJoined, now: float) -> None:
        """Forget what another pool, or another life of this one, has ordered."""
        if event.member.holder != self._giver:
            self._giver, self._order, self._done, self._in_hand = event.member.holder, None, [], False

    def act(self, now: float) -> list[Command]:
        """Compress a page where no step is due: none runs, or no request is late if the next one begins later."""
        order, at = self._order, len(self._done)
        if self._pool.member is None or order is None or self._in_hand or at == len(order.pages):
            return []
        if not self._can_wait(self._page_s, now):
            return []
        self._in_hand = True
        return [CompressPage(order.number, self._giver, order.pages[at], order.into[at])]

    def _can_wait(self, seconds: float, now: float) -> bool:
        """Return whether all next tokens are in time even if the next step begins `seconds` later."""
        if self._steps.running is None:
            return True
        bound = now + 2 * self._pace.times.most_s + seconds
        promises = (running.promise for running in self._here.occupants())
        return all(promise.due_at(now) > bound for promise in promises if promise.is_rt)
