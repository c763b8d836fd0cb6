"""A worker's pages of the pool: what it asks for, and what it gives back with an ask."""

from __future__ import annotations

from alignedserve.worker.pool import Lease
from tests.prefill_worker.asks import firm, leased, spare


def having(*pages: int) -> Lease:
    """Return a lease with these spare pages at hand."""
    lease = Lease()
    lease.ask_for_spare(len(pages), ())
    lease.take_answer(leased(pages, 1))
    return lease


def test_spare_pages_are_asked_for_as_more_are_wanted() -> None:
    lease = having(5)
    assert lease.ask_for_spare(1, ()) is None
    assert lease.ask_for_spare(3, (9,)) == spare(2, 2, kept=(9, 5))
    assert lease.take(1) == (5,)


def test_spare_pages_that_are_asked_for_again_are_given_back_first() -> None:
    """An ask for zero pages says that no pages are at hand: the pool no longer asks for them back."""
    lease = having(5)
    lease.note_handed_on()
    lease.ask_again()
    assert lease.ask_for_spare(0, ()) == spare(0, 2)
    assert lease.pages == []


def test_a_firm_ask_gives_back_what_is_at_hand() -> None:
    """A worker that keeps some pages and waits for more blocks others."""
    lease = having(5)
    assert lease.ask_firmly(2, (9,)) == firm(2, 2, kept=(9,))
    assert lease.ask_firmly(2, (9,)) is lease.ask_firmly(1, (9,)) is None
    assert lease.give_back((9,)) == firm(2, 3, kept=(9,)), "which is what another worker waits for"
    lease.ask_again()
    assert lease.ask_firmly(2, ()) == firm(2, 4)
    assert lease.ask_firmly(3, ()) == firm(3, 5)


def test_pages_of_a_firm_ask_that_nobody_needs_become_spare_ones() -> None:
    """The pool can have spare pages back."""
    lease = Lease()
    lease.ask_firmly(2, ())
    assert lease.ask_for_spare(1, ()) == spare(1, 2), "before the answer has come"
    lease.ask_firmly(2, ())
    lease.take_answer(leased((5, 6), 3))
    assert lease.ask_for_spare(0, ()) == spare(0, 4), "and after it"
    assert lease.pages == []


def test_the_answer_to_an_earlier_ask_is_none() -> None:
    lease = Lease()
    lease.ask_firmly(1, ())
    lease.ask_firmly(2, ())
    lease.take_answer(leased((5,), 1))
    assert lease.pages == []
