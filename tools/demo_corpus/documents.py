"""Synthetic letters, invoices, orders and reports whose facts are known.

A layout says how a document sets out its facts. It is written as parts, separated by slashes:

    title             one of the set pieces of the type (a heading, a greeting, a closing ...)
    colon:0123        groups of fields, in this order, as lines in the style named
    prose:23          groups of fields as sentences
    text              filler

A layout belongs to one side of the fence. Wordings and filler are common to both sides: a held-out
document is arranged in a new way and filled with new values, in the language that training uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum

from demo_corpus.sample import Draw, Split
from demo_corpus.vocabulary import address, firm, person, town

Facts = dict[str, str]


class Size(Enum):
    """The least and the most words that filler is added up to; one sentence may go over."""

    SHORT = (40, 80)
    MEDIUM = (95, 205)
    LONG = (225, 380)


@dataclass(frozen=True)
class Document:
    type: str
    text: str
    facts: Facts
    layout: str


@dataclass(frozen=True)
class _Kind:
    values: Callable[[Draw], Facts]
    labels: dict[str, tuple[str, ...]]
    groups: tuple[tuple[str, ...], ...]
    prose: tuple[tuple[str, ...], ...]
    pieces: dict[str, tuple[str, ...]]
    extras: tuple[tuple[str, str], ...]
    filler: tuple[str, ...]
    layouts: dict[Split, dict[str, str]]


_MONTHS = "January February March April May June July August September October November December".split()
_MONEY = ("{:,.2f} EUR", "{:,.2f} USD", "${:,.2f}")
_STATES = "on schedule|delayed|on hold|nearly finished|ahead of schedule|under review|at an early stage".split("|")
_MADE_OF = "oak pine steel glass cotton paper plastic leather copper rubber wool brass clay silk bamboo cork".split()
_GOODS = (
    "shelves chairs tables lamps boxes bottles bags hooks panels trays buckets covers frames blankets pots mats "
    "belts brushes handles folders benches baskets doors rings"
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


def document(draw: Draw, size: Size) -> Document:
    """A document of any type."""
    return document_of(draw, draw.choose(TYPES), size)


def document_of(draw: Draw, type_: str, size: Size) -> Document:
    kind = _KINDS[type_]
    facts = kind.values(draw)
    name = draw.choose(sorted(kind.layouts[draw.split]))
    parts = kind.layouts[draw.split][name].split(" / ")
    extras = [] if size is Size.SHORT else draw.random.sample(kind.extras, draw.integer(0, 2))
    rendered = [_part(draw, kind, facts, part, extras) for part in parts]
    text = "\n\n".join(_filled(draw, kind, rendered, size))
    return Document(type_, text, facts, f"{type_}/{name}")


def layouts(split: Split) -> dict[str, str]:
    """Every layout of one side: its name and its parts."""
    return {f"{type_}/{name}": parts for type_, kind in _KINDS.items() for name, parts in kind.layouts[split].items()}


def _part(draw: Draw, kind: _Kind, facts: Facts, part: str, extras: list[tuple[str, str]]) -> str | None:
    """The text of one part, or None where filler goes. The first labelled part takes the `extras`."""
    if part == "text":
        return None
    if part in kind.pieces:
        return draw.choose(kind.pieces[part]).format_map(facts)
    style, _, digits = part.partition(":")
    groups = [int(digit) for digit in digits]
    if style == "prose":
        return " ".join(draw.choose(kind.prose[group]).format_map(facts) for group in groups)
    fields = [field for group in groups for field in _shuffled(draw, kind.groups[group])]
    rows = [(draw.choose(kind.labels[field]), facts[field]) for field in fields]
    if style != "columns":
        rows += extras
        extras.clear()
    return _STYLES[style](rows)


def _shuffled(draw: Draw, fields: tuple[str, ...]) -> tuple[str, ...]:
    return fields if draw.chance(0.5) else fields[::-1]


def _filled(draw: Draw, kind: _Kind, rendered: Sequence[str | None], size: Size) -> list[str]:
    told = sum(len(part.split()) for part in rendered if part is not None)
    sentences = _filler(draw, kind, draw.integer(*size.value) - told)
    places = rendered.count(None)
    blocks: list[str] = []
    place = 0
    for part in rendered:
        if part is not None:
            blocks.append(part)
            continue
        start, end = (len(sentences) * step // places for step in (place, place + 1))
        blocks += _paragraphs(draw, sentences[start:end])
        place += 1
    return blocks


def _filler(draw: Draw, kind: _Kind, words: int) -> list[str]:
    """Different sentences that together have at least `words` words."""
    sentences: list[str] = []
    for sentence in draw.random.sample(kind.filler, len(kind.filler)):
        if words <= 0:
            break
        sentences.append(sentence)
        words -= len(sentence.split())
    return sentences


def _paragraphs(draw: Draw, sentences: Sequence[str]) -> list[str]:
    paragraphs: list[str] = []
    start = 0
    while start < len(sentences):
        end = start + draw.integer(2, 6)
        paragraphs.append(" ".join(sentences[start:end]))
        start = end
    return paragraphs


Rows = Sequence[tuple[str, str]]


def _lines(form: str) -> Callable[[Rows], str]:
    return lambda rows: "\n".join(form.format(label=label, value=value) for label, value in rows)


def _upper(rows: Rows) -> str:
    return "\n".join(f"{label.upper()}: {value}" for label, value in rows)


def _numbered(rows: Rows) -> str:
    return "\n".join(f"{number}. {label}: {value}" for number, (label, value) in enumerate(rows, 1))


def _semicolons(rows: Rows) -> str:
    return "; ".join(f"{label}: {value}" for label, value in rows)


def _columns(rows: Rows) -> str:
    heads, values = zip(*rows, strict=True)
    return f"| {' | '.join(heads)} |\n| {' | '.join(values)} |"


_STYLES: dict[str, Callable[[Rows], str]] = {
    "colon": _lines("{label}: {value}"),
    "dash": _lines("{label} - {value}"),
    "brackets": _lines("[{label}] {value}"),
    "upper": _upper,
    "pipes": _lines("| {label} | {value} |"),
    "bullets": _lines("- {label}: {value}"),
    "stars": _lines("* {label}: {value}"),
    "semicolons": _semicolons,
    "equals": _lines("{label} = {value}"),
    "stack": _lines("{label}\n  {value}"),
    "numbered": _numbered,
    "parentheses": _lines("{value} ({label})"),
    "columns": _columns,
}

_FORM_LAYOUTS = {
    Split.TRAIN: {
        "colon-a": "title / colon:0123 / text",
        "colon-b": "text / colon:3120 / text",
        "dash-a": "title / dash:1023 / text",
        "dash-b": "dash:2301 / text",
        "brackets-a": "title / text / brackets:0213",
        "upper-a": "upper:0132 / text",
        "upper-b": "title / text / upper:2013",
        "pipes-a": "title / pipes:0123 / text",
        "pipes-b": "text / pipes:1302 / text",
        "bullets-a": "title / text / bullets:1203 / text",
        "bullets-b": "bullets:3012 / text",
        "stars-a": "title / stars:0321 / text",
        "semicolons-a": "title / semicolons:0123 / text",
        "semicolons-b": "text / semicolons:2130",
        "equals-a": "title / equals:1320 / text",
        "stack-a": "title / stack:0312 / text",
        "numbered-a": "title / text / numbered:0231",
        "parentheses-a": "title / parentheses:1230 / text",
        "columns-a": "title / columns:01 / columns:23 / text",
        "columns-b": "title / columns:10 / text / colon:32",
        "prose-a": "title / prose:0123 / text",
        "prose-b": "text / prose:1023 / text",
        "prose-c": "prose:3120 / text",
        "prose-d": "title / prose:02 / text / prose:13",
        "two-part-a": "title / colon:01 / prose:23 / text",
        "two-part-b": "title / prose:10 / text / bullets:32",
        "two-part-c": "pipes:02 / text / prose:31",
        "two-part-d": "title / prose:20 / text / upper:13",
        "three-part-a": "title / dash:0 / prose:12 / text / colon:3",
        "three-part-b": "title / semicolons:1 / text / prose:30 / stars:2",
    },
    Split.HELD_OUT: {
        "prose-held": "title / text / prose:2031 / text",
        "bullets-prose-held": "title / bullets:20 / text / prose:13",
        "pipes-dash-held": "title / text / pipes:31 / text / dash:20",
        "semicolons-brackets-held": "semicolons:03 / text / brackets:12",
    },
}

_LETTER_LAYOUTS = {
    Split.TRAIN: {
        "classic-a": "dateline / dear / prose:2 / text / prose:3 / bye",
        "classic-b": "names / dateline / dear / text / prose:23 / bye",
        "classic-c": "sender line / dateline / subject line / dear / text / prose:3 / bye",
        "classic-d": "dear / prose:12 / text / prose:3 / bye",
        "classic-e": "dear / text / prose:2 / prose:3 / bye / dateline",
        "colon-a": "colon:0123 / dear / text / bye",
        "colon-b": "colon:21 / dear / text / prose:3 / bye",
        "colon-c": "dateline / colon:02 / dear / text / prose:3 / bye",
        "dash-a": "dash:1023 / text / bye",
        "dash-b": "dear / text / bye / dash:123",
        "brackets-a": "brackets:0213 / dear / text / bye",
        "upper-a": "upper:102 / dear / prose:3 / text / bye",
        "pipes-a": "pipes:0123 / dear / text / bye",
        "pipes-b": "pipes:13 / dear / prose:2 / text / bye",
        "bullets-a": "bullets:012 / dear / text / prose:3 / bye",
        "stars-a": "dear / text / stars:132 / bye",
        "semicolons-a": "semicolons:0123 / dear / text / bye",
        "semicolons-b": "dateline / dear / text / bye / semicolons:23",
        "equals-a": "equals:3012 / text / bye",
        "stack-a": "stack:012 / dear / text / prose:3 / bye",
        "numbered-a": "names / text / numbered:123",
        "parentheses-a": "parentheses:012 / dear / text / prose:3 / bye",
        "columns-a": "columns:01 / columns:23 / dear / text / bye",
        "prose-a": "prose:0123 / text / bye",
        "prose-b": "dear / prose:021 / text / prose:3",
        "prose-c": "text / prose:10 / text / prose:23",
    },
    Split.HELD_OUT: {
        "prose-held": "names / prose:3 / text / prose:21 / bye",
        "bullets-held": "dateline / dear / prose:3 / text / bye / bullets:2",
        "pipes-held": "names / pipes:21 / text / prose:3",
        "colon-held": "dear / text / colon:312 / bye",
    },
}

_LETTER_FILLER = """
Thank you for your kind message.
I hope that you and your family are well.
We were glad to hear from you again.
I have read your last message with great interest.
Please let me know if anything is unclear.
My colleagues and I have talked about this at length.
We would like to find a solution that works for everyone.
It would help us a great deal to know what you think.
I am sorry that it took me so long to write.
You can reach me in the office on most mornings.
If you prefer, we can also talk about it on the phone.
I will gladly send you more details if you need them.
Some of our neighbours have asked the same question.
We have not yet made a final decision.
The matter is not urgent, but we would like to settle it soon.
I have added a short note with the main points.
A copy of this letter is kept in our files.
We know that this may cause you some extra work.
There are a few things that we should discuss in person.
Several members of the group have offered to help.
So far, the costs have been lower than we feared.
The first ideas came from the people who live nearby.
I spoke with the manager, and she agrees with the plan.
We have looked at three offers and liked the second one best.
As far as I can see, there is no risk for you.
Please show this letter to anyone who may be interested.
The work should not disturb you very much.
We will of course keep you informed.
I remember our last meeting with pleasure.
Your advice was very useful to all of us.
It is important to me that nobody feels left out.
If you have any doubts, please tell me openly.
The rest of the papers will follow in a separate envelope.
We can also meet at a place that suits you better.
Last year we had a similar case, and it ended well.
I would be grateful for a short answer.
Please excuse the short notice.
The committee has asked me to thank you for your help.
You do not have to decide everything at once.
We are always glad to hear your ideas.
We value your opinion and will treat it with care.
For now, everything will stay as it is.
I have enclosed a small plan that shows the details.
Perhaps you know someone who could give us a hand.
It has been a busy season for all of us.
Whatever you decide, we will respect it.
"""

_INVOICE_FILLER = """
Thank you for your business.
Please quote the invoice number with your payment.
All goods remain our property until they are paid for.
Payment is possible by bank transfer or by card.
We do not accept cheques.
The goods were packed by hand and checked before they left our store.
Please tell us at once if anything is missing or damaged.
Our terms of sale are printed on the back of this page.
Prices include packing and delivery.
No discount was given on this sale.
Late payments may cause a small extra charge.
Please keep this document for your records.
If you have already paid, please ignore this message.
Our office is open from Monday to Friday.
Questions about this invoice can be sent to our accounts team.
A copy of this invoice was sent by email.
Unused goods may be returned in their original packing.
The goods were handed over in good condition.
We thank you for your trust and hope to serve you again.
Please check that your address is still correct.
Bank charges are to be paid by the buyer.
This invoice was made by a computer and is valid without a signature.
We offer a repair service for everything that we sell.
Our new catalogue is now available in the shop.
The warranty covers faults in material and work.
The warranty does not cover normal wear.
Damage caused by wrong use is not covered.
The delivery note was signed by a member of your staff.
Please do not send cash by post.
You will receive a receipt as soon as your payment has arrived.
We work with local makers wherever this is possible.
The packing can be returned to us free of charge.
Tax is included where it applies.
Regular buyers can ask us for a monthly account.
If you need the invoice in another form, please contact us.
The goods must be kept in a dry place.
Spare parts can be ordered at any time.
Our driver left the parcels at the main entrance.
You can also pay at the desk in our shop.
We are happy to answer any question on the phone.
Complaints should be made in writing.
Our bank details have not changed since last year.
Please use one transfer for each invoice.
The price was agreed in advance.
Partial payments are only possible if we have agreed to them.
Any balance in your favour will be paid back to you.
"""

_ORDER_FILLER = """
Please confirm this order in writing.
Please call before you deliver.
The entrance for deliveries is at the back of the building.
Someone will be there to receive the goods.
Please pack the goods in strong boxes.
We would like one delivery and not several small ones.
Please do not replace the goods with a similar product.
If something is out of stock, please tell us as soon as possible.
The goods should have the same quality as last time.
We have ordered from you before and were always satisfied.
The invoice should be sent by email.
Please put the order number on every box.
The driver can park in front of the main door.
There is a lift, but it is rather small.
A signature is needed when the goods are handed over.
We will check the goods when they arrive.
Damaged goods will be sent back.
Please use as little plastic packing as possible.
The colour should match the sample that you sent us.
We need the goods for a new room in our building.
Please let us know the name of the driver in advance.
This order was approved by our purchasing team.
The price was taken from your current list.
Shipping is included in the price.
Please do not leave the goods outside.
If nobody opens the door, please ring the bell next to it.
We can store the goods for a short time if needed.
Please include a delivery note.
Instructions for use should be in the box.
We may order more if the quality is good.
Changes to this order must be made in writing.
The order can be cancelled until the goods are sent.
We pay after the goods have arrived.
Please send a message when the parcel is on its way.
Our staff can help to unload the goods.
A pallet can be taken back at once.
Please keep the parts together in one parcel.
The goods are a gift, so please remove the price tags.
We do not need any spare parts at the moment.
The warehouse is closed at the weekend.
Please tell us how the goods should be cleaned.
All labels should be easy to read.
Heavy boxes should be marked clearly.
Thank you for your quick and friendly service.
The terms that we agreed on last year still apply.
We would also be glad to receive your new catalogue.
"""

_REPORT_FILLER = """
The weather was dry for most of the period.
No accidents were reported.
All safety rules were followed.
The team met every week to discuss open questions.
Most of the material was delivered without damage.
Some tools had to be replaced.
The neighbours were informed about the noise in good time.
A small leak was found and repaired at once.
The main risk is a lack of skilled workers.
The client visited us twice and asked for minor changes.
The drawings were updated after the last meeting.
Tests of the ground showed no surprises.
The cost of material has risen slightly.
The cost of labour has stayed the same.
All invoices were checked and paid.
A local company provides the machines.
The work on the outer walls went well.
The electrical system was tested and works as planned.
Several old parts could be used again.
Waste is collected and sorted every day.
The photographs show the current condition.
Access for visitors is limited for safety reasons.
The team used the quiet weeks to train new members.
We suggest that the plan is checked once more by an expert.
The results of the last tests are better than expected.
One supplier could not keep to the terms and was replaced.
The new supplier works quickly and carefully.
Traffic in the area was not disturbed.
Two short meetings were held with the local council.
The council supports the work and raised no objections.
Heavy rain stopped the outdoor work for a few days.
The indoor work went on without a break.
All permits have been granted.
The storage area is large enough for now.
A list of open tasks was sent to everyone.
The quality of the work was checked by an outside engineer.
The small faults that were found have been put right.
The workers asked for better lighting in the evening.
New lamps were installed near the entrance.
Energy use was lower than in the same period last year.
The plan for the coming weeks remains unchanged.
It is too early to judge the long-term effects.
The public has shown a lot of interest in the work.
The local newspaper printed a friendly article.
More details can be found in the files of the office.
The team thanks all partners for their support.
"""


def _other(make: Callable[[], str], than: str) -> str:
    while (value := make()) == than:
        pass
    return value


def _number(draw: Draw, prefixes: Sequence[str]) -> str:
    return f"{draw.choose(prefixes)}{draw.fresh(lambda: draw.integer(1000, 99999))}"


def _money(draw: Draw, low: int, high: int) -> str:
    return draw.choose(_MONEY).format(draw.fresh(lambda: draw.integer(low, high)) / 100)


def _count(draw: Draw, low: int, high: int) -> str:
    return str(draw.fresh(lambda: draw.integer(low, high)))


def _joined(draw: Draw, starts: Sequence[str], ends: Sequence[str]) -> str:
    return draw.fresh(lambda: f"{draw.choose(starts)} {draw.choose(ends)}")


def _two_dates(draw: Draw) -> tuple[str, str]:
    """A day and a later one, written in the same way."""
    first = draw.fresh(lambda: date(2015, 1, 1) + timedelta(draw.integer(0, 6000)))
    second = draw.fresh(lambda: first + timedelta(draw.integer(5, 150)))
    write = _long_date if draw.chance(0.6) else date.isoformat
    return write(first), write(second)


def _long_date(day: date) -> str:
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def _buyer(draw: Draw) -> str:
    return person(draw) if draw.chance(0.5) else firm(draw)


def _letter(draw: Draw) -> Facts:
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


def _invoice(draw: Draw) -> Facts:
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


def _order(draw: Draw) -> Facts:
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


def _report(draw: Draw) -> Facts:
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


_KINDS = {
    "letter": _Kind(
        values=_letter,
        labels={
            "sender": ("From", "Sender", "Written by"),
            "recipient": ("To", "Recipient", "For the attention of"),
            "date": ("Date", "Dated", "Written on"),
            "place": ("Place", "Written in", "Town"),
            "subject": ("Subject", "Re", "About"),
            "reference": ("Reference", "Our ref.", "File no."),
            "reply date": ("Reply by", "Please answer by", "Reply date"),
        },
        groups=(("sender", "recipient"), ("date", "place"), ("subject", "reference"), ("reply date",)),
        prose=(
            (
                "This is {sender}, writing to {recipient}.",
                "This letter is from {sender} and goes to {recipient}.",
                "I am {sender}, and I am sending this letter to {recipient}.",
                "My name is {sender}, and this letter is meant for {recipient}.",
            ),
            (
                "I am writing from {place} on {date}.",
                "Today is {date}, and I am writing from {place}.",
                "It is {date} here in {place}.",
                "This letter was written in {place} on {date}.",
            ),
            (
                "I am writing about {subject}, and our reference is {reference}.",
                "This letter is about {subject} (reference {reference}).",
                "Under the reference {reference}, I would like to raise {subject}.",
                "The subject is {subject}, and the file has the number {reference}.",
            ),
            (
                "Please reply by {reply date}.",
                "We need your answer by {reply date}.",
                "Please send me your reply no later than {reply date}.",
                "I would ask you to answer by {reply date}.",
            ),
        ),
        pieces={
            "dateline": ("{place}, {date}", "{place}, on {date}", "{date}, {place}"),
            "dear": ("Dear {recipient},", "Hello {recipient},", "Good day {recipient},"),
            "bye": (
                "Yours sincerely,\n{sender}",
                "Kind regards,\n{sender}",
                "Best wishes,\n{sender}",
                "Yours faithfully,\n{sender}",
            ),
            "names": ("From {sender}\nTo {recipient}", "{sender}\nto {recipient}", "To {recipient}\nFrom {sender}"),
            "sender line": ("{sender}", "From {sender}"),
            "subject line": (
                "Re: {subject}\nOur ref.: {reference}",
                "Subject: {subject} ({reference})",
                "Reference {reference}: {subject}",
            ),
        },
        extras=(
            ("Enclosures", "none"),
            ("Sent by", "post"),
            ("Copies", "one for our files"),
            ("Page", "1 of 1"),
            ("Registered", "no"),
        ),
        filler=tuple(_LETTER_FILLER.strip().splitlines()),
        layouts=_LETTER_LAYOUTS,
    ),
    "invoice": _Kind(
        values=_invoice,
        labels={
            "invoice number": ("Invoice no.", "Invoice number", "Our invoice"),
            "date": ("Date", "Invoice date", "Issued on"),
            "seller": ("Seller", "From", "Supplier"),
            "customer": ("Customer", "Bill to", "Client"),
            "item": ("Item", "Description", "Goods"),
            "quantity": ("Quantity", "Qty", "Units"),
            "total": ("Total", "Amount due", "Total to pay"),
            "due date": ("Due date", "Payment due", "Please pay by"),
        },
        groups=(("invoice number", "date"), ("seller", "customer"), ("item", "quantity"), ("total", "due date")),
        prose=(
            (
                "This is invoice {invoice number}, dated {date}.",
                "The invoice {invoice number} was issued on {date}.",
                "On {date}, the invoice with the number {invoice number} was written.",
                "The invoice number is {invoice number}, and the date is {date}.",
            ),
            (
                "The seller is {seller} and the customer is {customer}.",
                "{seller} has sold the goods to {customer}.",
                "The customer {customer} has bought the goods from {seller}.",
                "The bill goes to {customer} and comes from {seller}.",
            ),
            (
                "It covers {quantity} {item}.",
                "We delivered {quantity} {item}.",
                "The goods are {item}, and the quantity is {quantity}.",
                "The sale was for {item}: {quantity} pieces in all.",
            ),
            (
                "The total is {total}, due by {due date}.",
                "Please pay {total} by {due date}.",
                "Payment is due on {due date}, and the amount is {total}.",
                "The sum of {total} must be paid no later than {due date}.",
            ),
        ),
        pieces={"title": ("Invoice", "INVOICE", "Sales invoice", "Invoice for goods", "*** INVOICE ***")},
        extras=(
            ("Payment", "by bank transfer"),
            ("Discount", "none"),
            ("Tax", "included"),
            ("Page", "1 of 1"),
            ("Delivery", "free of charge"),
            ("Copies", "one for your records"),
        ),
        filler=tuple(_INVOICE_FILLER.strip().splitlines()),
        layouts=_FORM_LAYOUTS,
    ),
    "order": _Kind(
        values=_order,
        labels={
            "order number": ("Order no.", "Order number", "Our order"),
            "date": ("Date", "Order date", "Ordered on"),
            "customer": ("Customer", "Ordered by", "Buyer"),
            "address": ("Address", "Deliver to", "Shipping address"),
            "item": ("Item", "Description", "Goods"),
            "quantity": ("Quantity", "Qty", "Units"),
            "total": ("Total", "Order total", "Amount"),
            "delivery date": ("Delivery date", "Deliver by", "Wanted by"),
        },
        groups=(("order number", "date"), ("customer", "address"), ("item", "quantity"), ("total", "delivery date")),
        prose=(
            (
                "This is order {order number}, dated {date}.",
                "The order {order number} was placed on {date}.",
                "On {date}, the order with the number {order number} was written.",
                "The order number is {order number}, and the date is {date}.",
            ),
            (
                "The customer is {customer}, and the address is {address}.",
                "{customer} orders the goods for delivery to {address}.",
                "Please deliver to {customer} at {address}.",
                "The address for the goods is {address}, and the buyer is {customer}.",
            ),
            (
                "We order {quantity} {item}.",
                "Please send {quantity} {item}.",
                "The goods are {item}, and the quantity is {quantity}.",
                "The order is for {item}: {quantity} pieces in all.",
            ),
            (
                "The total is {total}, with delivery by {delivery date}.",
                "Delivery is expected by {delivery date} at a price of {total}.",
                "For {total}, the goods should arrive by {delivery date}.",
                "The goods are wanted by {delivery date}, and the total is {total}.",
            ),
        ),
        pieces={"title": ("Order", "ORDER", "Purchase order", "Order form", "*** PURCHASE ORDER ***")},
        extras=(
            ("Shipping", "by road"),
            ("Packing", "strong boxes"),
            ("Gift wrapping", "no"),
            ("Page", "1 of 1"),
            ("Payment", "after delivery"),
            ("Partial delivery", "not wanted"),
        ),
        filler=tuple(_ORDER_FILLER.strip().splitlines()),
        layouts=_FORM_LAYOUTS,
    ),
    "report": _Kind(
        values=_report,
        labels={
            "author": ("Author", "Written by", "Reported by"),
            "date": ("Date", "Report date", "Date of report"),
            "project": ("Project", "Project name", "Report on"),
            "site": ("Site", "Location", "Place of work"),
            "status": ("Status", "Current status", "State of the work"),
            "team size": ("Team size", "People on the team", "Staff"),
            "budget": ("Budget", "Approved budget", "Money available"),
            "next review": ("Next review", "Next review on", "To be reviewed on"),
        },
        groups=(("author", "date"), ("project", "site"), ("status", "team size"), ("budget", "next review")),
        prose=(
            (
                "This report was written by {author} on {date}.",
                "The author of this report is {author}, and the date is {date}.",
                "On {date}, {author} wrote this report.",
                "This report is by {author} and dated {date}.",
            ),
            (
                "The project is the {project} in {site}.",
                "The site is in {site}, where the {project} is carried out.",
                "In {site}, work on the {project} goes on.",
                "It deals with the {project} at the site in {site}.",
            ),
            (
                "The work is {status}, and the team has {team size} people.",
                "A team of {team size} people works on it, and the status is {status}.",
                "With {team size} people on the team, the project is {status}.",
                "The current status is {status}, with {team size} people at work.",
            ),
            (
                "The budget is {budget}, and the next review is on {next review}.",
                "A budget of {budget} was approved, and the next review will be on {next review}.",
                "The next review takes place on {next review}, and the budget is {budget}.",
                "There is {budget} to spend, and the work will be reviewed on {next review}.",
            ),
        ),
        pieces={"title": ("Report", "REPORT", "Project report", "Status report", "*** PROJECT REPORT ***")},
        extras=(
            ("Accidents", "none"),
            ("Weather", "mostly dry"),
            ("Copies", "one for the office"),
            ("Page", "1 of 1"),
            ("Language", "English"),
            ("Open questions", "none"),
        ),
        filler=tuple(_REPORT_FILLER.strip().splitlines()),
        layouts=_FORM_LAYOUTS,
    ),
}

TYPES = tuple(_KINDS)
