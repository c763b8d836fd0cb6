"""Values that models write in JSON, in Python or as plain text, and the JSON that a function's schema makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from alignedserve.text.calls.scanning import Schema

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>[-+]?[\d.][\w.+-]*)|(?P<word>[A-Za-z]+)|(?P<sign>.))""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_END = None, ""  # comes after the last token
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
    """Return the value of a Python literal, in which JSON's words count too. Nothing is evaluated."""
    left = _Tokens((found.lastgroup, found[0].strip()) for found in _TOKEN.finditer(written.strip()))
    value = _read(left, _MOST_DEPTH)
    if left.head != _END:
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


class _Tokens:
    """The tokens that are left. None is looked for before its turn: behind an open quote each next one would take time
    for all that follows."""

    def __init__(self, tokens: Iterator[tuple[str | None, str]]) -> None:
        self._tokens = tokens
        self.head = next(tokens, _END)

    def pop(self) -> tuple[str | None, str]:
        token, self.head = self.head, next(self._tokens, _END)
        return token


def _read(left: _Tokens, depth: int) -> Any:
    """Take a value off the tokens that are left."""
    kind, token = left.pop()
    if not depth:
        raise NoValue
    if kind == "text":
        text = _unescaped(token)
        while left.head[0] == "text":  # texts beside each other are one
            text += _unescaped(left.pop()[1])
        return text
    if kind == "number":
        return _number(token)
    if kind == "word" and token.lower() in _WORDS:
        return _WORDS[token.lower()]
    if token not in _CLOSING:
        raise NoValue
    items, closing = list[Any](), ("sign", _CLOSING[token])
    while left.head != closing:
        item = _read(left, depth - 1)
        if token == "{":
            if left.pop() != ("sign", ":"):
                raise NoValue
            item = _key(item), _read(left, depth - 1)
        items.append(item)
        if left.head == ("sign", ","):
            left.pop()
        elif left.head != closing:
            raise NoValue
    left.pop()
    return dict(items) if token == "{" else items[0] if token == "(" and len(items) == 1 else items


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


def _unescaped(token: str) -> str:
    return _ESCAPE.sub(lambda found: _character(found[0]), token[1:-1])


def _character(escape: str) -> str:
    mark = escape[1]
    if mark in "xuU" and len(escape) > 2:
        return chr(code) if (code := int(escape[2:], 16)) <= _MOST_CODE else escape
    return _ESCAPED.get(mark, mark if mark in "\\'\"" else escape)


def _refuse(word: str) -> None:
    raise ValueError(word)


# --- What a schema says

_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_MOST_REFERENCES = 8  # that lead from one to the next


def parameter_types(parameters: Schema, name: str) -> frozenset[str] | None:
    """Return the JSON types that a parameter may have; None if its schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return None if schema is None else _types(schema, parameters, _MOST_REFERENCES)


def is_text(types: frozenset[str] | None) -> bool:
    return types == frozenset({"string"})


def coerced(written: str, types: frozenset[str] | None) -> Any:
    """Return the value that a text stands for: of the types that there are, a text comes last."""
    try:
        value = read_value(written)
    except NoValue:
        return written
    if isinstance(value, str):  # its quotes are a part of the text
        return written
    fits = types is None or any(kind in types for kind in _TYPES[type(value)])
    return value if fits or "string" not in (types or ()) else written


def _types(schema: Any, root: Schema, most: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping):
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, most - 1) if most else None
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(str(one) for one in kind)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return frozenset(name for value in values for name in _TYPES[type(value)])
    branches: list[Any] = next(
        (schema[word] for word in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(word), list)), []
    )
    found = [_types(branch, root, most - 1) if most else None for branch in branches]
    known = [types for types in found if types is not None]
    return frozenset().union(*known) if known and len(known) == len(found) else None


def _resolved(reference: str, root: Schema) -> Any:
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def python_value(written: str, types: frozenset[str] | None) -> Any:
    """Return the value of an argument in Python; some models write numbers as texts."""
    try:
        value = read_literal(written)
    except NoValue:
        return written.strip()
    return coerced(value, types) if isinstance(value, str) and types and "string" not in types else value
