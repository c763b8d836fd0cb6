"""Tasks about a pasted document: extract its fields, summarise it, say what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo_corpus import documents
from demo_corpus.documents import Document, Size
from demo_corpus.sample import Draw, Sample, Split, Turn

AFTER_SHARE = 0.2  # how often the instruction follows the document
ABSENT_SHARE = 0.12  # how often a field is asked for that the document does not have
NOT_GIVEN = "not given"
MOST_FURTHER = 4  # tasks that training adds about a document that it has read anyway

_SIZES, _SIZE_SHARES = (Size.SHORT, Size.MEDIUM, Size.LONG), (60, 28, 12)

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
    "letter": "This is a letter from {sender} to {recipient} about {subject}.",
    "invoice": "This is an invoice from {seller} to {customer} for {item}.",
    "order": "This is an order from {customer} for {item}, wanted by {delivery date}.",
    "report": "This is a report by {author} on the {project} in {site}.",
}
# A sentence states one fact, and a summary names one person: a model of this size confuses two names.
_FIVE_SENTENCES = {
    "letter": (
        "This is a letter. It is from {sender}. It was written on {date}. "
        "It is about {subject}. An answer is needed by {reply date}."
    ),
    "invoice": (
        "This is an invoice. It is from {seller}. It is for {item}. The total is {total}. It is due by {due date}."
    ),
    "order": (
        "This is an order. It is from {customer}. It is for {item}. "
        "The total is {total}. Delivery is wanted by {delivery date}."
    ),
    "report": (
        "This is a report. It is by {author}. It is about the {project}. "
        "The status is {status}. The next review is on {next review}."
    ),
}

# Fields that a document of the type does not have and that cannot be confused with its fields.
_ABSENT = {
    "letter": ("invoice number", "order number", "total", "quantity", "budget", "team size"),
    "invoice": ("budget", "team size", "subject", "next review", "reply date", "status"),
    "order": ("budget", "team size", "subject", "next review", "reply date", "status"),
    "report": ("invoice number", "order number", "total", "quantity", "subject", "reply date"),
}
_ALWAYS_ABSENT = ("phone number", "email", "tax number", "bank account")


def extract_lines(draw: Draw) -> Sample:
    return _about_a_document(draw, "extract_lines")


def extract_json(draw: Draw) -> Sample:
    return _about_a_document(draw, "extract_json")


def summary_one(draw: Draw) -> Sample:
    return _about_a_document(draw, "summary_one")


def summary_five(draw: Draw) -> Sample:
    return _about_a_document(draw, "summary_five")


def classify(draw: Draw) -> Sample:
    return _about_a_document(draw, "classify")


def drawn_document(draw: Draw) -> Document:
    return documents.document(draw, draw.random.choices(_SIZES, _SIZE_SHARES)[0])


def pasted(instruction: str, document: Document, after: bool = False) -> str:
    """Return the message of a person: the instruction and the document, in this order unless `after`."""
    parts = (document.text, instruction) if after else (instruction, document.text)
    return "\n\n".join(parts)


def picked_fields(draw: Draw, document: Document, low: int = 1, high: int = 4) -> tuple[str, ...]:
    """Return some of the document's fields, in the order in which they are asked for."""
    return draw.fresh(lambda: tuple(draw.random.sample(sorted(document.facts), draw.integer(low, high))))


def extraction(
    draw: Draw,
    document: Document,
    as_json: bool,
    fields: Sequence[str] | None = None,
    after: bool = False,
) -> tuple[str, str]:
    """Return the instruction and the answer, for `fields` or for drawn fields."""
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
    """Return the fields as a phrase: the seller, the total and the date."""
    *most, last = (f"the {field}" for field in fields)
    return f"{', '.join(most)} and {last}" if most else last


@dataclass(frozen=True)
class _Task:
    instruction: str
    answer: str
    asked: int | None = None  # lines, keys or sentences


def _lines_task(draw: Draw, told: Document, after: bool) -> _Task:
    return _extraction_task(draw, told, after, as_json=False)


def _json_task(draw: Draw, told: Document, after: bool) -> _Task:
    return _extraction_task(draw, told, after, as_json=True)


def _extraction_task(draw: Draw, told: Document, after: bool, as_json: bool) -> _Task:
    fields = picked_fields(draw, told)
    if draw.chance(ABSENT_SHARE):
        place = draw.integer(0, len(fields))
        fields = (*fields[:place], draw.choose(_ABSENT[told.type] + _ALWAYS_ABSENT), *fields[place:])
    return _Task(*extraction(draw, told, as_json, fields, after), asked=len(fields))


def _one_sentence_task(draw: Draw, told: Document, after: bool) -> _Task:
    instruction = draw.choose(_IN_ONE).format(this=_reference(draw, told.type, after))
    return _Task(instruction, one_sentence(told), asked=1)


def _five_sentences_task(draw: Draw, told: Document, after: bool) -> _Task:
    instruction = draw.choose(_IN_FIVE).format(this=_reference(draw, told.type, after))
    return _Task(instruction, five_sentences(told), asked=5)


def _classify_task(draw: Draw, told: Document, after: bool) -> _Task:
    return _Task(draw.choose(_CLASSIFY).format(this=_reference(draw, None, after)), told.type)


_TASKS: dict[str, Callable[[Draw, Document, bool], _Task]] = {
    "extract_lines": _lines_task,
    "extract_json": _json_task,
    "summary_one": _one_sentence_task,
    "summary_five": _five_sentences_task,
    "classify": _classify_task,
}
# Tasks that are hard to learn come more often.
_FURTHER = ("extract_lines", "extract_lines", "extract_json", "extract_json", "summary_one", "summary_five", "classify")


def _about_a_document(draw: Draw, kind: str) -> Sample:
    """Return a conversation about a document: one task, or several in training, where reading is the expensive part."""
    told = drawn_document(draw)
    after = draw.chance(AFTER_SHARE)
    task = _TASKS[kind](draw, told, after)
    turns = [Turn(pasted(task.instruction, told, after), task.answer)]
    if draw.split is Split.TRAIN:
        for _ in range(draw.integer(0, MOST_FURTHER)):
            further = _TASKS[draw.choose(_FURTHER)](draw, told, True)  # by then it stands above
            turns.append(Turn(further.instruction, further.answer))
    return Sample(kind, tuple(turns), asked=task.asked)


def _reference(draw: Draw, type_: str | None, after: bool) -> str:
    """Return the words by which the instruction names the document; without a type they do not give the type away."""
    side = "above" if after else "below"
    noun = draw.choose(("document", "text")) if type_ is None or draw.chance(0.4) else type_
    return draw.choose((f"this {noun}", f"the {noun} {side}", f"the {noun}"))
