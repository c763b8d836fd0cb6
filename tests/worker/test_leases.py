"""A worker's pages of the pool: what it asks for, and what it gives back with an ask."""

from __future__ import annotations

from alignedserve.core import ServiceClass
from alignedserve.protocol.messages import SPARE, AskPages, LeasePages
from alignedserve.worker.pool import Lease, Need


def test_an_ask_gives_back_what_is_not_spoken_for() -> None:
    lease = Lease(ServiceClass.BE)
    assert lease.ask(Need(2, most=4), ()) == AskPages(2, 1, (), ServiceClass.BE, 4)
    assert lease.take_answer(LeasePages((5, 6, 7), 1))
    assert lease.ask(Need(kept=3), ()) is None
    assert lease.ask(Need(kept=1), (9,)) == AskPages(0, 2, (9, 5), ServiceClass.BE)
    assert lease.pages == [5]


def test_spare_pages_that_are_asked_for_again_are_given_back_first() -> None:
    """An ask for zero pages says that no pages are at hand: the pool no longer asks for them back."""
    lease = Lease(SPARE)
    assert lease.ask_for_spare(1, ()) == AskPages(1, 1, (), SPARE, is_spare=True)
    assert lease.take_answer(LeasePages((5,), 1))
    lease.note_handed_on()
    lease.ask_again()
    assert lease.ask_for_spare(0, ()) == AskPages(0, 2, (), SPARE, is_spare=True)
    assert lease.pages == []


def test_the_answer_to_an_earlier_ask_is_none() -> None:
    lease = Lease(ServiceClass.RT)
    lease.ask(Need(1), ())
    lease.ask(Need(2), ())
    assert not lease.take_answer(LeasePages((5,), 1))
    assert lease.pages == []
