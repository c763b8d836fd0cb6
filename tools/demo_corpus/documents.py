"""Synthetic letters, invoices, orders and reports whose facts are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from demo_corpus.document_facts import Facts, invoice_facts, letter_facts, order_facts, report_facts
from demo_corpus.document_filler import INVOICE_FILLER, LETTER_FILLER, ORDER_FILLER, REPORT_FILLER
from demo_corpus.document_layouts import FORM_LAYOUTS, LETTER_LAYOUTS, Layouts
from demo_corpus.document_wordings import INVOICE_WORDING, LETTER_WORDING, ORDER_WORDING, REPORT_WORDING, Wording
from demo_corpus.sample import Draw, Split


class Size(Enum):
    """The least and the most words of a document with filler; one sentence may go over."""

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
    facts: Callable[[Draw], Facts]
    wording: Wording
    filler: tuple[str, ...]
    layouts: Layouts


_KINDS = {
    "letter": _Kind(letter_facts, LETTER_WORDING, LETTER_FILLER, LETTER_LAYOUTS),
    "invoice": _Kind(invoice_facts, INVOICE_WORDING, INVOICE_FILLER, FORM_LAYOUTS),
    "order": _Kind(order_facts, ORDER_WORDING, ORDER_FILLER, FORM_LAYOUTS),
    "report": _Kind(report_facts, REPORT_WORDING, REPORT_FILLER, FORM_LAYOUTS),
}


def document(draw: Draw, size: Size) -> Document:
    """Return a document of any type."""
    type_ = draw.choose(tuple(_KINDS))
    kind = _KINDS[type_]
    facts = kind.facts(draw)
    name = draw.choose(sorted(kind.layouts[draw.split]))
    parts = kind.layouts[draw.split][name].split(" / ")
    extras = [] if size is Size.SHORT else draw.random.sample(kind.wording.extras, draw.integer(0, 2))
    rendered = [_part(draw, kind.wording, facts, part, extras) for part in parts]
    text = "\n\n".join(_filled(draw, kind.filler, rendered, size))
    return Document(type_, text, facts, f"{type_}/{name}")


def layouts(split: Split) -> dict[str, str]:
    """Return the layouts of one side: names and parts."""
    return {f"{type_}/{name}": parts for type_, kind in _KINDS.items() for name, parts in kind.layouts[split].items()}


def _part(draw: Draw, wording: Wording, facts: Facts, part: str, extras: list[tuple[str, str]]) -> str | None:
    """Return the text of a part, or None where filler goes. The first labelled part takes the `extras`."""
    if part == "text":
        return None
    if part in wording.pieces:
        return draw.choose(wording.pieces[part]).format_map(facts)
    style, _, digits = part.partition(":")
    groups = [int(digit) for digit in digits]
    if style == "prose":
        return " ".join(draw.choose(wording.prose[group]).format_map(facts) for group in groups)
    fields = [field for group in groups for field in _shuffled(draw, wording.groups[group])]
    rows = [(draw.choose(wording.labels[field]), facts[field]) for field in fields]
    if style != "columns":
        rows += extras
        extras.clear()
    return _STYLES[style](rows)


def _shuffled(draw: Draw, fields: tuple[str, ...]) -> tuple[str, ...]:
    return fields if draw.chance(0.5) else fields[::-1]


def _filled(draw: Draw, filler: Sequence[str], rendered: Sequence[str | None], size: Size) -> list[str]:
    """Return the document's paragraphs: the rendered parts, and filler shared out over the places that are None."""
    told = sum(len(part.split()) for part in rendered if part is not None)
    sentences = _picked(draw, filler, draw.integer(*size.value) - told)
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


def _picked(draw: Draw, filler: Sequence[str], words: int) -> list[str]:
    """Return different sentences that together have at least `words` words."""
    sentences: list[str] = []
    for sentence in draw.random.sample(filler, len(filler)):
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


_Rows = Sequence[tuple[str, str]]  # labels and values


def _lines(form: str) -> Callable[[_Rows], str]:
    return lambda rows: "\n".join(form.format(label=label, value=value) for label, value in rows)


def _upper(rows: _Rows) -> str:
    return "\n".join(f"{label.upper()}: {value}" for label, value in rows)


def _numbered(rows: _Rows) -> str:
    return "\n".join(f"{number}. {label}: {value}" for number, (label, value) in enumerate(rows, 1))


def _semicolons(rows: _Rows) -> str:
    return "; ".join(f"{label}: {value}" for label, value in rows)


def _columns(rows: _Rows) -> str:
    heads, values = zip(*rows, strict=True)
    return f"| {' | '.join(heads)} |\n| {' | '.join(values)} |"


_STYLES: dict[str, Callable[[_Rows], str]] = {
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
