"""Read values that are written in JSON or in Python, and write them in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>[-+]?[\d.][\w.+-]*)|(?P<word>[A-Za-z]+)|(?P<sign>.))""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MOST_DEPTH = 64
_MOST_CODE = 0x10FFFF


class NoValue(ValueError):
    """The text is no value of this language."""


def read_value(written: str) -> Any:
    """Return the value of a JSON text or of a Python literal."""
    try:
        return json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return read_literal(written)


def read_literal(written: str) -> Any:
    """Return the value of a Python literal, in which JSON's words count too."""
    reader = _Literal(written.strip())
    value = reader.read(_MOST_DEPTH)
    if reader.kind:
        raise NoValue
    return value


def to_json(value: Any) -> str:
    """Return the value in JSON; a number that JSON does not have becomes a text."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(str(value))
    return written if is_unicode(written) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Return whether the text has no half of a character, which no answer could hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class _Literal:
    """Reads a literal token by token. Nothing is evaluated, and the depth is limited."""

    def __init__(self, written: str) -> None:
        self._written, self._at = written, 0
        self.kind, self._token = "", ""
        self._next()

    def _next(self) -> None:
        found = _TOKEN.match(self._written, self._at)
        self.kind, self._token = (found.lastgroup or "", found[0].strip()) if found else ("", "")
        self._at = found.end() if found else self._at

    def read(self, depth: int) -> Any:
        if not depth:
            raise NoValue
        if self.kind == "text":
            return self._read_text()
        kind, token = self.kind, self._token
        self._next()
        if kind == "number":
            return _number(token)
        if kind == "word" and token.lower() in _WORDS:
            return _WORDS[token.lower()]
        if token not in _CLOSING:
            raise NoValue
        items = list(self._read_items(_CLOSING[token], depth - 1))
        return dict(items) if token == "{" else items[0] if token == "(" and len(items) == 1 else items

    def _read_text(self) -> str:
        """Read strings beside each other, which are one."""
        text = ""
        while self.kind == "text":
            text += _ESCAPE.sub(lambda found: _character(found[0]), self._token[1:-1])
            self._next()
        return text

    def _read_items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while self._token != closing or self.kind != "sign":
            item = self.read(depth)
            items.append((_key(item), self._read_after(":", depth)) if closing == "}" else item)
            if self.kind == "sign" and self._token == ",":
                self._next()
            elif self._token != closing or self.kind != "sign":
                raise NoValue
        self._next()
        return items

    def _read_after(self, sign: str, depth: int) -> Any:
        if self.kind != "sign" or self._token != sign:
            raise NoValue
        self._next()
        return self.read(depth)


def _number(token: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            pass
    raise NoValue


def _key(value: Any) -> str:
    if isinstance(value, list | dict):
        raise NoValue
    return value if isinstance(value, str) else to_json(value)


def _character(escape: str) -> str:
    mark = escape[1]
    if mark in "xuU" and len(escape) > 2:
        return chr(code) if (code := int(escape[2:], 16)) <= _MOST_CODE else escape
    return _ESCAPED.get(mark, mark if mark in "\\'\"" else escape)


def _refuse(word: str) -> None:
    raise ValueError(word)
