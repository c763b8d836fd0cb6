"""The subjects of documents: senders, receivers, goods, prices and dates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta

from demo_corpus.sample import Draw
from demo_corpus.vocabulary import address, firm, person, town

Facts = dict[str, str]  # by the names of their fields

_MONTHS = "January February March April May June July August September October November December".split()
_MONEY = ("{:,.2f} EUR", "{:,.2f} USD", "${:,.2f}")
_STATES = "on schedule|delayed|on hold|nearly finished|ahead of schedule|under review|at an early stage".split("|")
_MADE_OF = (
    "oak pine steel glass cotton paper plastic leather copper rubber wool brass clay silk bamboo cork "
    "maple walnut iron tin jute linen cedar birch foam bronze chrome nylon hemp slate rattan wax"
).split()
_GOODS = (
    "shelves chairs tables lamps boxes bottles bags hooks panels trays buckets covers frames blankets pots mats "
    "belts brushes handles folders benches baskets doors rings ropes lids pipes bowls plates cups racks tiles "
    "ladders carts stools screens"
).split()
_CONCERNS = (
    "the repair of the|changes to the|a question about the|the opening of the|problems with the|the price of the|"
    "the plans for the|access to the|the sale of the|the cleaning of the|a complaint about the|the use of the"
).split("|")
_THINGS = (
    "roof|garden|library|parking area|heating|sports hall|kitchen|lift|front door|meeting room|water pipes|"
    "old boiler|playground|back office|fence|swimming pool|car park|reading room|bicycle shed|lecture hall"
).split("|")
_WORKS = (
    "bridge school harbour library tunnel station hospital market museum road river airport theatre park canal "
    "tower warehouse factory"
).split()
_WORK_KINDS = "repair extension survey upgrade inspection lighting drainage cleaning redesign renewal".split()


def letter_facts(draw: Draw) -> Facts:
    sender = person(draw)
    day, reply = _two_dates(draw)
    return {
        "sender": sender,
        "recipient": _other(lambda: person(draw), sender),
        "date": day,
        "place": town(draw),
        "subject": _joined(draw, _CONCERNS, _THINGS),
        "reference": _number(draw, ("REF-", "L-", "AZ-", "F-")),
        "reply date": reply,
    }


def invoice_facts(draw: Draw) -> Facts:
    seller = firm(draw)
    day, due = _two_dates(draw)
    return {
        "invoice number": _number(draw, ("INV-", "RE-", "R", "A-")),
        "date": day,
        "seller": seller,
        "customer": _other(lambda: _buyer(draw), seller),
        "item": _joined(draw, _MADE_OF, _GOODS),
        "quantity": _count(draw, 2, 250),
        "total": _money(draw, 900, 900_000),
        "due date": due,
    }


def order_facts(draw: Draw) -> Facts:
    day, delivery = _two_dates(draw)
    return {
        "order number": _number(draw, ("PO-", "ORD-", "B", "K-")),
        "date": day,
        "customer": _buyer(draw),
        "address": address(draw),
        "item": _joined(draw, _MADE_OF, _GOODS),
        "quantity": _count(draw, 2, 250),
        "total": _money(draw, 900, 900_000),
        "delivery date": delivery,
    }


def report_facts(draw: Draw) -> Facts:
    day, review = _two_dates(draw)
    return {
        "author": person(draw),
        "date": day,
        "project": _joined(draw, _WORKS, _WORK_KINDS),
        "site": town(draw),
        "status": draw.choose(_STATES),
        "team size": _count(draw, 3, 200),
        "budget": _money(draw, 90_000, 9_000_000),
        "next review": review,
    }


def _other(make: Callable[[], str], than: str) -> str:
    """Return a value that has no word in common with `than`: a model copies a name by the words before it."""
    while set((value := make()).split()) & set(than.split()):
        pass
    return value


def _number(draw: Draw, prefixes: Sequence[str]) -> str:
    return f"{draw.choose(prefixes)}{draw.fresh(lambda: _unlike_digits(draw, 1000, 99_999))}"


def _money(draw: Draw, low: int, high: int) -> str:
    return draw.choose(_MONEY).format(draw.fresh(lambda: _unlike_digits(draw, low, high)) / 100)


def _unlike_digits(draw: Draw, low: int, high: int) -> int:
    """Return a number with no digit twice: a small model, which reads digit by digit, confuses equal digits."""
    while True:
        number = draw.integer(low, high)
        if len(set(str(number))) == len(str(number)):
            return number


def _count(draw: Draw, low: int, high: int) -> str:
    return str(draw.fresh(lambda: draw.integer(low, high)))


def _joined(draw: Draw, starts: Sequence[str], ends: Sequence[str]) -> str:
    return draw.fresh(lambda: f"{draw.choose(starts)} {draw.choose(ends)}")


def _two_dates(draw: Draw) -> tuple[str, str]:
    """Return a day and a later day, in words: the model confuses two rows of digits."""
    first = draw.fresh(lambda: date(2015, 1, 1) + timedelta(draw.integer(0, 6000)))
    second = draw.fresh(lambda: _later(draw, first))
    return _long_date(first), _long_date(second)


def _later(draw: Draw, first: date) -> date:
    """Return a later date in another month and on another day of the month."""
    while True:
        later = first + timedelta(draw.integer(5, 150))
        if later.day != first.day and later.month != first.month:
            return later


def _long_date(day: date) -> str:
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def _buyer(draw: Draw) -> str:
    return person(draw) if draw.chance(0.5) else firm(draw)
