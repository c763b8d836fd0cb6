"""Values that models write in JSON, in Python or as plain text, and the JSON that a function's schema makes of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<word>[A-Za-z]+)|(?P<sign>.))""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_BEFORE = ("", "[", "(", "{", ",", ":")  # a value follows these alone: nothing is a sum, a call or an index
# An escape that Python knows; any other backslash, and what Python would not read in a text, is escaped itself.
_KNOWN = r"x[\da-fA-F]{2}|u[\da-fA-F]{4}|U(?:000[\da-fA-F]|0010)[\da-fA-F]{4}|0[0-7]{0,2}|[ntrbfva\\'\"\n]"
_ESCAPE = re.compile(rf"(\\(?:{_KNOWN}))|[\\\n\r\0]")
_ESCAPED = {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\0": r"\x00"}
_ZEROS = re.compile(r"^([-+]?)[0_]+(?=\d)")  # before a number: models write 08, which Python refuses
_MOST_DEPTH, _MOST_TOKENS = 64, 20_000  # Python takes 0.5 kB for a token: 10 MB at most


class NoValue(ValueError):
    """The text is no value of this language."""


def read_value(written: str) -> Any:
    """Return the value of a JSON text or of a Python literal."""
    try:
        return json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return read_literal(written)


def read_literal(written: str) -> Any:
    """Return the value of a Python literal as JSON has it; JSON's words count too.

    Python reads it, once each token is known to be a literal's, none lies deeper than _MOST_DEPTH, and there are at
    most _MOST_TOKENS."""
    tokens, depth = [""], 0
    for found in _TOKEN.finditer(written.strip()):
        kind, token = found.lastgroup, found[0].strip()
        if kind == "text":
            token = _ESCAPE.sub(lambda escape: escape[1] or _ESCAPED[escape[0]], token)
        elif kind == "number":
            token = _ZEROS.sub(r"\1", token)
        elif kind == "word":
            token = _WORDS.get(token.lower(), "")
        elif kind == "sign":
            depth += (token in "([{") - (token in ")]}")
            is_within = token in "([{}])" or (token in ",:" and depth > 0)
            token = token if is_within and depth <= _MOST_DEPTH else ""
        follows = kind == "text" and tokens[-1][:1] in ("'", '"')  # texts beside each other are one
        if not token or len(tokens) > _MOST_TOKENS or not (token in "}]),:" or follows or tokens[-1] in _BEFORE):
            raise NoValue
        tokens.append(token)
    try:
        return json.loads(json.dumps(ast.literal_eval(" ".join(tokens).strip())))
    except (SyntaxError, ValueError, TypeError):
        raise NoValue from None


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
