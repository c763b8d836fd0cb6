"""Pages of the pool that a worker may write to, for requests of one class, and its asks for them.

    ask ──▶ LeasePages ──▶ pages at hand ──▶ a copy's ──▶ handed on to the pool
              (of the last ask only)  └── with the next ask: given back, or kept

An ask says which pages are kept, so it puts right what a lost frame has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import ServiceClass
from alignedserve.protocol.messages import AskPages, LeasePages


@dataclass(frozen=True, slots=True)
class Need:
    """The pages that a worker needs at this moment."""

    pages: int = 0  # without which no request can go on
    kept: int = 0  # of the pages at hand, those that are spoken for
    most: int = 0  # where this is more: up to so many, which others could use


class Lease:
    def __init__(self, service: ServiceClass) -> None:
        self._service = service
        self.pages: list[int] = []  # at hand
        self._asks = 0
        self._asked: int | None = None  # pages of the ask that is not answered yet
        self._handed_on = False  # pages, since the last ask: if that frame was lost, only an ask frees them
        self._had = 0  # spare pages that were wanted when the last answer came: it said how many there were

    @property
    def is_awaited(self) -> bool:
        """Return whether the pool is to be asked again some time if it does not answer."""
        return self._asked is not None or self._handed_on

    @property
    def is_unanswered(self) -> bool:
        return self._asked is not None

    def take_answer(self, lease: LeasePages) -> bool:
        """Take the pages of an answer; return False where a later ask was sent, with which these pages went back."""
        if lease.number != self._asks:
            return False
        self.pages += lease.pages
        self._had, self._asked = max(self._asked or 0, 0), None
        return True

    def take(self, count: int) -> tuple[int, ...]:
        """Take so many of the pages at hand, which must be enough."""
        self._had = 0
        return tuple(self.pages.pop() for _ in range(count))

    def ask(self, need: Need, in_copies: Sequence[int]) -> AskPages | None:
        """Return an ask for all that is needed, or to give some back.

        A worker that keeps some pages and waits for more blocks others.
        """
        if self._asked is not None:
            enough = self._asked >= need.pages
        else:
            enough = not need.pages and len(self.pages) <= need.kept
        if enough:
            return None
        del self.pages[need.kept :]
        return self._ask(need.pages, need.pages, in_copies, most=need.most)

    def ask_if_any(self, wanted: int, in_copies: Sequence[int]) -> AskPages | None:
        """Return an ask for up to so many pages, if they are free at once; None while another ask is not answered.

        No request waits for them, and they keep no other worker waiting.
        """
        if self._asked is not None or len(self.pages) >= wanted:
            return None
        return self._ask(0, 0, in_copies, most=wanted - len(self.pages))

    def ask_for_spare(self, wanted: int, in_copies: Sequence[int]) -> AskPages | None:
        """Return an ask to have so many pages at hand; None if the pool's last answer is enough, as until some pages
        are used or more are wanted."""
        if (self._had if self._asked is None else self._asked) >= wanted:
            return None
        is_anew = self._asked == -1
        if is_anew:  # an ask for none says that none are at hand
            self.pages.clear()
        more = max(0, wanted - len(self.pages))
        return self._ask(wanted, more, in_copies, is_spare=True) if more or is_anew else None

    def give_back(self, in_copies: Sequence[int]) -> AskPages:
        """Return an ask that gives all spare pages at hand back, though they are asked for again."""
        self.pages.clear()
        self._had = 0
        return self._ask(0, 0, in_copies, is_spare=True)

    def note_handed_on(self) -> None:
        """Note that pages were handed on to the pool."""
        self._handed_on = True

    def ask_again(self) -> None:
        """Prepare to ask anew, as after an ask for less than nothing: for what is needed, with what is given back."""
        if self.is_awaited:
            self._asked = -1

    def lose(self) -> None:
        """Forget the pages of a pool that is lost. The next pool, or the same one when it is back, is to hear what was
        leased."""
        self.pages.clear()
        self._had = 0
        self._asked, self._handed_on = (-1 if self._asks else None), False

    def _ask(self, wanted: int, more: int, in_copies: Sequence[int], most: int = 0, is_spare: bool = False) -> AskPages:
        self._handed_on = False
        self._asks += 1
        self._asked = wanted
        return AskPages(more, self._asks, (*in_copies, *self.pages), self._service, most, is_spare)
