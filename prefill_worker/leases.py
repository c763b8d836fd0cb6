"""Pages of the pool that a prefill worker may write to, of one class, and its asks for them.

    ask ──▶ LeasePages ──▶ pages at hand ──▶ a copy's ──▶ committed
              (of the last ask only)  └── with the next ask: given back, or kept

An ask says which pages are kept, so it puts right what a lost frame has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import ServiceClass
from alignedserve.messages import AskPages, LeasePages


@dataclass(frozen=True, slots=True)
class Need:
    """Of pages, at this moment."""

    pages: int = 0  # without which nobody can go on
    kept: int = 0  # of those at hand, that are spoken for
    is_ahead: bool = False  # of the prompt: others behind it could use some, too


class Lease:
    def __init__(self, service: ServiceClass) -> None:
        self._service = service
        self.pages: list[int] = []  # at hand
        self._asks = 0
        self._asked: int | None = None  # pages of the ask that is not answered yet
        self._committed = False  # since the last ask: if a Commit was lost, only an ask frees its pages

    @property
    def is_awaited(self) -> bool:
        """Whether the pool is to be asked again some time, should it say nothing."""
        return self._asked is not None or self._committed

    def answered(self, lease: LeasePages) -> bool:
        """False where a later ask was sent: with it these pages went back."""
        if lease.number != self._asks:
            return False
        self.pages += lease.pages
        self._asked = None
        return True

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many of those at hand, if there are."""
        if count > len(self.pages):
            return None
        return tuple(self.pages.pop() for _ in range(count))

    def is_to_ask(self, need: Need) -> bool:
        """For pages, or to give some back."""
        if self._asked is not None:
            return self._asked < need.pages
        return need.pages > 0 or len(self.pages) > need.kept

    def ask(self, need: Need, in_copies: Sequence[int], most: int) -> AskPages:
        """For all that is needed. What is not spoken for goes back: who keeps some and waits for more blocks others."""
        del self.pages[need.kept :]
        self._committed = False
        self._asks += 1
        self._asked = need.pages
        return AskPages(need.pages, self._asks, (*in_copies, *self.pages), self._service, most)

    def committed(self) -> None:
        self._committed = True

    def ask_again(self) -> None:
        """As after an ask for less than nothing: what is needed, and what is given back, is said anew."""
        if self.is_awaited:
            self._asked = -1

    def lost(self) -> None:
        """With its pool; what that leased to us the next one, or the same that comes back, is to hear of."""
        self.pages.clear()
        self._asked, self._committed = (-1 if self._asks else None), False
