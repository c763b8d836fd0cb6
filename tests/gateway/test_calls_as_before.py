"""What is read, written and ruled in every format of calls stays as it was, to the byte: whole and streamed.

The cases are drawn from the marks of all formats, so most of them are broken in some way. Their answers are kept as one
digest for each format and kind. A change that is meant is written down by:

    python -m tests.gateway.test_calls_as_before
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.text.call_grammar import BesideCalls, call_syntax, can_write
from alignedserve.text.calls.formats import FORMATS, CallFormat
from alignedserve.text.calls.scanning import CallReader

KEPT = Path(__file__).with_name("calls_as_before.json")
NUM_CASES = 80
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "e": {"type": "string", "enum": ["x", "y"]},
        "n": {"type": ["integer", "null"]},
        "o": {"$ref": "#/$defs/deep"},
        "l": {"anyOf": [{"type": "array"}, {"type": "boolean"}]},
        "w": {"enum": [1, "1"]},
    },
    "required": ["s"],
    "$defs": {"deep": {"type": "object"}},
}
TOOLS = {"f": SCHEMA, "get_weather": {"type": "object"}, "a-b.c": SCHEMA}
VALUES: tuple[Any, ...] = (
    *("Rom", 'a "b"\n\\', "5", 5, -1.5, None, True, [1, {"x": "ü"}], {"k": [None]}, "</parameter", ""),
)
PIECES = (
    *sorted({mark for form in FORMATS for mark in (*form.markers, *form.frame) if mark}),
    *('{"name": "f", "arguments": {', '{"name": "f"', '"parameters": ', ": ", "{", "}", '"', "[", "]", "functions."),
    *("f", "f(", "f(s=", "n='5'", ")", "<parameter=s>", "</parameter>", "<arg_key>s</arg_key>", "\n", " ", ","),
    *("```json", "1", "é", "so", "\\", "<", "[CALL_ID]a1", "</function>", "'", "get_weather", "<|message|>", "a-b.c:0"),
    *("null", "```"),
)


def _text(draw: Random, form: CallFormat) -> str:
    """Return a text in which there may be calls of this format, with what else models write before and in it."""
    pieces = draw.choices((*PIECES, *form.markers * 6), k=draw.randint(0, 9))
    for _ in range(draw.randint(0, 2)):
        names = draw.sample(sorted(SCHEMA["properties"]), draw.randint(0, 3))
        calls = [
            (draw.choice(sorted(TOOLS)), {name: draw.choice(VALUES) for name in names})
            for _ in range(draw.randint(1, 2))
        ]
        pieces.insert(draw.randint(0, len(pieces)), form.write(calls))
    text = "".join(pieces)
    if draw.random() < 0.3 and text:
        text = text[: draw.randrange(len(text))]
    return text


def _read(
    form: CallFormat, text: str, sizes: Random | None, most: int | None, hidden: tuple[str, ...]
) -> Iterator[Any]:
    reader, at = CallReader(form, TOOLS, most, hidden), 0
    while at < len(text):
        size = sizes.randint(1, 9) if sizes else len(text)
        found, at = reader.feed(text[at : at + size]), at + size
        yield found.text, [(part.index, part.name, part.arguments, part.id is None) for part in found.parts]
    found = reader.flush()
    yield found.text, [(part.index, part.name, part.arguments, part.id is None) for part in found.parts], reader.is_over


def _reading(form: CallFormat, is_streamed: bool) -> Iterator[Any]:
    for seed in range(NUM_CASES):
        draw = Random(seed)
        text, most, hidden = _text(draw, form), draw.choice((None, 1)), draw.choice(((), form.markers))
        yield text, list(_read(form, text, Random(seed) if is_streamed else None, most, hidden))


def _syntaxes(form: CallFormat) -> Iterator[Any]:
    specials = {mark: number for number, mark in enumerate(sorted(form.markers)) if mark.startswith("<|")}
    if can_write(form, TOOLS | {"get_weather": {"additionalProperties": False}}):
        functions = TOOLS | {"get_weather": {"additionalProperties": False}}
        for beside in BesideCalls:
            yield call_syntax(form, functions, beside is not BesideCalls.NOTHING, specials, beside, {"type": "array"})


def answers(form: CallFormat) -> dict[str, str]:
    """Return a digest for each kind of answer of a format."""
    kinds = {"whole": _reading(form, False), "streamed": _reading(form, True), "syntaxes": _syntaxes(form)}
    return {name: sha256(json.dumps(list(cases)).encode()).hexdigest()[:16] for name, cases in kinds.items()}


def _named() -> dict[str, CallFormat]:
    return {f"{number} {form.name}": form for number, form in enumerate(FORMATS)}


@pytest.mark.parametrize("name", _named())
def test_a_format_answers_as_before(name: str) -> None:
    assert answers(_named()[name]) == json.loads(KEPT.read_text())[name]


if __name__ == "__main__":
    KEPT.write_text(json.dumps({name: answers(form) for name, form in _named().items()}, indent=1) + "\n")
