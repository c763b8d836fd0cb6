"""How documents word their facts: what they call them, and the sentences that tell them.

Both sides of the fence share the wordings, as they share the filler: a held-out document says new things,
arranged in a new way, in the language that training uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """The words of one type of document; in braces stands the name of a field."""

    labels: dict[str, tuple[str, ...]]  # what a field may be called
    groups: tuple[tuple[str, ...], ...]  # fields that stand together; layouts count them from 0
    prose: tuple[tuple[str, ...], ...]  # sentences that tell a group
    pieces: dict[str, tuple[str, ...]]  # headings, greetings, closings
    extras: tuple[tuple[str, str], ...]  # labels and values that nobody asks for


LETTER_WORDING = Wording(
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
)

INVOICE_WORDING = Wording(
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
)

ORDER_WORDING = Wording(
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
)

REPORT_WORDING = Wording(
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
)
