"""Turn values that a model wrote as plain text or as Python into the JSON that a function's schema asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignedserve.text.calls.grammar import Schema
from alignedserve.text.calls.literals import NoValue, read_value

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
