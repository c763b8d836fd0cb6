"""Write grammars of calls in the format of a model, over its tokens: calls alone, or beside other answers.

A grammar of free text with calls lets a model write what it likes, until it writes the marker of a call:

    start: (lead call)* TEXT       lead is any text up to the marker, the shortest

Where calls are JSON without a marker, as the whole of an answer, a text must not begin as they do:

    start: calls | TEXT            TEXT does not begin with a brace
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from alignedserve.text.calls.formats import CallFormat
from alignedserve.text.calls.layouts import GrammarWriter
from alignedserve.text.calls.values import Schema
from alignedserve.text.syntax import JSON_SPACES, closed, lark_syntax

_OPTIONS = {"x-guidance": {"whitespace_pattern": JSON_SPACES, "lenient": False, "coerce_one_of": False}}


class BesideCalls(Enum):
    """What an output may be instead of calls."""

    NOTHING = "nothing"
    SCHEMA = "schema"
    TEXT = "text"  # which may also stand before calls and after them


class Writer(GrammarWriter):
    """Writes the parts of rules in Lark's language, as llguidance reads it."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.rules: list[str] = []  # that the parts need besides
        self._specials = specials
        self._any = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")

    def text(self, literal: str) -> str:
        parts, at = [], 0
        for found in self._any.finditer(literal):
            parts += [_quoted(literal[at : found.start()]), f"<[{self._specials[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in [*parts, _quoted(literal[at:])] if part)

    def text_before(self, marker: str) -> str:
        name = f"text_{len(self.rules)}"
        if (token := self._any.search(marker)) is None:
            self.rules.append(f"{name}[suffix={_quoted(marker)}]: /(?s:.*)/")
        else:  # no text has the token's characters; what stands before it in the marker ends the text
            before, rest = marker[: token.start()], marker[token.start() :]
            self.rules += [f"{name}: {name.upper()} {self.text(rest)}", f"{name.upper()}: /(?s:.*)/ {_quoted(before)}"]
        return name

    def json(self, schema: Any) -> str:
        inner = closed(schema)
        return f"%json {json.dumps({**inner, **_OPTIONS} if isinstance(inner, Mapping) else inner)}"


def can_write(form: CallFormat, functions: Mapping[str, Schema]) -> bool:
    """Return whether a grammar can say calls of these functions in this format."""
    writer = Writer({})
    return not form.stands_aside and all(form.layout.rule(*function, writer) for function in functions.items())


def call_syntax(
    form: CallFormat,
    functions: Mapping[str, Schema],
    several: bool,
    specials: Mapping[str, int],
    beside: BesideCalls = BesideCalls.NOTHING,
    schema: Any = None,
) -> str:
    """Return the syntax of calls of these functions, or of what may stand `beside` them."""
    writer = Writer(specials)
    before, between, after = form.frame
    bodies = [form.layout.rule(name, parameters, writer) for name, parameters in functions.items()]
    names = [f"call_{number}" for number in range(len(bodies))]
    if beside is BesideCalls.TEXT and form.has_mark:
        marker = next(opening for opening in form.openings if before.startswith(opening))
        between = between.partition(marker)[0]  # the marker begins the next round
        token, begins = writer.text(marker), writer.text(before.removeprefix(marker))
        starts = [  # each call has the marker and its own two ends
            f"start: {'round* rest' if several else 'round | rest'}",
            f"round: lead {begins} call {writer.text(after)}",
            f"lead[lazy]: TEXT {token}" if token.startswith('"') else f"lead: TEXT {token}",
            "rest: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    else:
        more = f" ({writer.text(between)} call)*" if several else ""
        starts = [f"start: calls{'' if beside is BesideCalls.NOTHING else ' | answer'}"]
        starts.append(f"calls: {writer.text(before)} call{more} {writer.text(after)}")
    if beside is BesideCalls.SCHEMA:
        starts.append(f"answer: {writer.json(schema)}")
    elif beside is BesideCalls.TEXT and not form.has_mark:
        markers = [f".*{re.escape(marker)}.*" for marker in form.openings if marker not in specials]
        unlike = [f"~/(?s:{pattern})/" for pattern in (r"\s*\[?\s*\{.*", *markers)]  # JSON, or a marker of calls
        starts += ["answer: TEXT", " & ".join(["TEXT: /(?s:.*)/", *unlike])]
    each = [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return lark_syntax("\n".join([*starts, f"call: {' | '.join(names)}", *each, *writer.rules]))


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
