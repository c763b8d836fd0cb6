"""Tasks about a pasted document: extract its fields, summarise it, say what it is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from demo_corpus import documents
from demo_corpus.documents import Document, Size
from demo_corpus.sample import Draw, Sample, Split, Turn

AFTER_SHARE = 0.2  # how often the instruction follows the document
ABSENT_SHARE = 0.12  # how often a field is asked for that the document does not have
NOT_GIVEN = "not given"

_SIZES = (Size.SHORT, Size.MEDIUM, Size.LONG)
READING_MIX = {Split.TRAIN: (60, 30, 10), Split.HELD_OUT: (40, 35, 25)}
CLASSIFY_MIX = {Split.TRAIN: (65, 30, 5), Split.HELD_OUT: (40, 35, 25)}

_AS_LINES = (
    "Give me these fields as `field: value` lines: {list}.",
    "Give me these fields of {this} as `field: value` lines: {list}.",
    "List {the} from {this}, one `field: value` line each.",
    "Extract {the} from {this} as `field: value` lines.",
    "Extract these fields from {this}, one per line as `field: value`: {list}.",
    "What are {the} in {this}? Answer with `field: value` lines.",
    "Read {this} and write down {the}, one `field: value` line for each.",
    "Pull {the} out of {this}. Use one line per field: `field: value`.",
    "From {this}, I need {the}. Please use the format `field: value`, one per line.",
    "Find {the} in {this} and give them as lines of the form `field: value`.",
    "Please copy {the} from {this} into `field: value` lines.",
    "Fields: {list}. Fill them in from {this}, one `field: value` line per field.",
    "Can you get {the} from {this}? One line each, as `field: value`.",
    "Extract from {this}: {list}. Format: field: value, one per line.",
)
_AS_JSON = (
    "Extract {the} from {this} as JSON.",
    "Give me {the} from {this} as JSON.",
    "Return {the} of {this} as a JSON object.",
    "Extract these fields from {this} as JSON: {list}.",
    "Read {this} and answer in JSON with these keys: {list}.",
    "From {this}, put {the} into JSON.",
    "Turn {this} into JSON with the keys {list}.",
    "JSON with {list} from {this}, please.",
    "What are {the} in {this}? Answer in JSON.",
    "Find {the} in {this} and write them as one JSON object.",
    "I need {the} from {this}. Reply with JSON only.",
    "Please pull {the} out of {this} as JSON on one line.",
    "Fill in this list of keys from {this} and return JSON: {list}.",
    "Can you get {the} from {this}? Give me JSON.",
)
_IN_ONE = (
    "Summarise {this} in one sentence.",
    "Summarize {this} in one sentence.",
    "Summarise this in one sentence.",
    "Summarize this in one sentence.",
    "Sum up {this} in one sentence.",
    "Give me a one-sentence summary of {this}.",
    "Write a summary of {this} in a single sentence.",
    "Tell me in one sentence what {this} says.",
    "What does {this} say? One sentence, please.",
    "Please summarise {this} in a single sentence.",
    "Please summarize {this}. Use one sentence.",
    "In one sentence, what is {this} about?",
    "Shorten {this} to one sentence.",
    "One-sentence summary of {this}, please.",
)
_IN_FIVE = (
    "Summarise {this} in five sentences.",
    "Summarize {this} in five sentences.",
    "Summarise this in five sentences.",
    "Summarize this in 5 sentences.",
    "Sum up {this} in five sentences.",
    "Give me a five-sentence summary of {this}.",
    "Write a summary of {this} in exactly five sentences.",
    "Tell me in five sentences what {this} says.",
    "What does {this} say? Five sentences, please.",
    "Please summarise {this}. Use five sentences.",
    "Please summarize {this} in 5 short sentences.",
    "In five sentences, what is {this} about?",
    "Shorten {this} to five sentences.",
    "Five-sentence summary of {this}, please.",
)
_CLASSIFY = (
    "What kind of document is this?",
    "What kind of document is this? Answer with letter, invoice, order or report.",
    "Classify this document as letter, invoice, order or report: one word.",
    "Classify {this}: letter, invoice, order or report?",
    "Is this a letter, an invoice, an order or a report?",
    "Is {this} a letter, an invoice, an order or a report? One word.",
    "What type of document is {this}? Give one word.",
    "Which type of document is this: letter, invoice, order or report?",
    "Name the type of {this} in one word.",
    "Tell me what kind of document this is, in one word.",
    "Categorise {this} as letter, invoice, order or report.",
    "Categorize {this} as letter, invoice, order or report.",
    "Say in one word what {this} is: letter, invoice, order or report.",
    "Please classify {this} with one word.",
    "Document type?",
)

_ONE_SENTENCE = {
    "letter": "This is a letter from {sender} to {recipient} about {subject}, and an answer is needed by {reply date}.",
    "invoice": "This is an invoice from {seller} to {customer} for {item}, and {total} is due by {due date}.",
    "order": "This is an order from {customer} for {quantity} {item}, and delivery is wanted by {delivery date}.",
    "report": "This is a report by {author} on the {project} in {site}, and the status is {status}.",
}
_FIVE_SENTENCES = {
    "letter": (
        "This is a letter from {sender}. It is addressed to {recipient}. It was written in {place} on {date}. "
        "It is about {subject}. An answer is needed by {reply date}."
    ),
    "invoice": (
        "This is invoice {invoice number} of {date}. The seller is {seller}. The customer is {customer}. "
        "It is for {quantity} {item}. The total of {total} is due by {due date}."
    ),
    "order": (
        "This is order {order number} of {date}. The customer is {customer}. The goods go to {address}. "
        "The order is for {quantity} {item}. The total is {total}, and delivery is wanted by {delivery date}."
    ),
    "report": (
        "This is a report by {author} of {date}. It is about the {project} in {site}. The status is {status}. "
        "The team has {team size} people and a budget of {budget}. The next review is on {next review}."
    ),
}

# Fields that a document of the type does not have and that nobody could take for one that it has.
_ABSENT = {
    "letter": ("invoice number", "order number", "total", "quantity", "budget", "team size"),
    "invoice": ("budget", "team size", "subject", "next review", "reply date", "status"),
    "order": ("budget", "team size", "subject", "next review", "reply date", "status"),
    "report": ("invoice number", "order number", "total", "quantity", "subject", "reply date"),
}
_ALWAYS_ABSENT = ("phone number", "email", "tax number", "bank account")


def extract_lines(draw: Draw) -> Sample:
    return _extract(draw, as_json=False)


def extract_json(draw: Draw) -> Sample:
    return _extract(draw, as_json=True)


def summary_one(draw: Draw) -> Sample:
    return _summary(draw, "summary_one", _IN_ONE, 1)


def summary_five(draw: Draw) -> Sample:
    return _summary(draw, "summary_five", _IN_FIVE, 5)


def classify(draw: Draw) -> Sample:
    told = drawn_document(draw, CLASSIFY_MIX)
    after = draw.chance(AFTER_SHARE)
    instruction = draw.choose(_CLASSIFY).format(this=_reference(draw, None, after))
    return Sample("classify", (Turn(pasted(instruction, told, after), told.type),))


def drawn_document(draw: Draw, mix: dict[Split, tuple[int, int, int]] = READING_MIX) -> Document:
    """A document whose size follows the shares (short, medium, long) of the draw's side."""
    return documents.document(draw, draw.random.choices(_SIZES, mix[draw.split])[0])


def pasted(instruction: str, document: Document, after: bool = False) -> str:
    """What a person sends: the instruction and the document, in this order unless `after`."""
    parts = (document.text, instruction) if after else (instruction, document.text)
    return "\n\n".join(parts)


def picked_fields(draw: Draw, document: Document, low: int = 2, high: int = 6) -> tuple[str, ...]:
    """Some of the document's fields, in the order in which they are asked for."""
    return draw.fresh(lambda: tuple(draw.random.sample(sorted(document.facts), draw.integer(low, high))))


def further_field(draw: Draw, document: Document, asked: Sequence[str]) -> str:
    """A field that is not among the `asked` ones."""
    return draw.choose(sorted(set(document.facts) - set(asked)))


def extraction(
    draw: Draw,
    document: Document,
    as_json: bool,
    fields: Sequence[str] | None = None,
    after: bool = False,
) -> tuple[str, str]:
    """The instruction and the answer, for `fields` or for some that are drawn."""
    asked = picked_fields(draw, document) if fields is None else fields
    phrase = draw.choose(_AS_JSON if as_json else _AS_LINES)
    this = _reference(draw, document.type, after)
    instruction = phrase.format(this=this, list=", ".join(asked), the=enumerated(asked))
    return instruction, (json_answer if as_json else lines_answer)(document, asked)


def lines_answer(document: Document, fields: Sequence[str]) -> str:
    return "\n".join(f"{field}: {_fact(document, field)}" for field in fields)


def json_answer(document: Document, fields: Sequence[str]) -> str:
    return json.dumps({field: _fact(document, field) for field in fields}, ensure_ascii=False)


def _fact(document: Document, field: str) -> str:
    return document.facts.get(field, NOT_GIVEN)


def one_sentence(document: Document) -> str:
    return _ONE_SENTENCE[document.type].format_map(document.facts)


def five_sentences(document: Document) -> str:
    return _FIVE_SENTENCES[document.type].format_map(document.facts)


def enumerated(fields: Sequence[str]) -> str:
    """The fields as a phrase: the seller, the total and the date."""
    *most, last = (f"the {field}" for field in fields)
    return f"{', '.join(most)} and {last}" if most else last


def _extract(draw: Draw, as_json: bool) -> Sample:
    told = drawn_document(draw)
    fields = picked_fields(draw, told)
    if draw.chance(ABSENT_SHARE):
        place = draw.integer(0, len(fields))
        fields = (*fields[:place], draw.choose(_ABSENT[told.type] + _ALWAYS_ABSENT), *fields[place:])
    after = draw.chance(AFTER_SHARE)
    instruction, answer = extraction(draw, told, as_json, fields, after)
    kind = "extract_json" if as_json else "extract_lines"
    return Sample(kind, (Turn(pasted(instruction, told, after), answer),), asked=len(fields))


def _summary(draw: Draw, kind: str, phrasings: Sequence[str], sentences: int) -> Sample:
    told = drawn_document(draw)
    after = draw.chance(AFTER_SHARE)
    instruction = draw.choose(phrasings).format(this=_reference(draw, told.type, after))
    answer = one_sentence(told) if sentences == 1 else five_sentences(told)
    return Sample(kind, (Turn(pasted(instruction, told, after), answer),), asked=sentences)


def _reference(draw: Draw, type_: str | None, after: bool) -> str:
    """How the instruction points at the document; without a type it does not give the type away."""
    side = "above" if after else "below"
    noun = draw.choose(("document", "text")) if type_ is None or draw.chance(0.4) else type_
    return draw.choose((f"this {noun}", f"the {noun} {side}", f"the {noun}"))
