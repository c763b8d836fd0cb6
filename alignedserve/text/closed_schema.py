"""JSON schemas closed: an object has no other properties than the schema names, unless the schema says so.

JSON Schema leaves objects open, so a weak model may write properties of its own until its length ends the answer. An
object stays as it is where it names no properties, speaks of others itself (`additionalProperties` and such), or is a
part of an `allOf` with several members, each of which names only some of the properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_ONE = ("items", "contains", "additionalProperties")  # keywords with one schema
_OF_SEVERAL = ("prefixItems", "anyOf", "oneOf", "allOf")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SPEAKS_OF_OTHERS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"}


def closed(schema: Any) -> Any:
    """Return the schema with its objects closed."""
    return _closed(schema, frozenset(_shared_references(schema)))


def _closed(schema: Any, shared: frozenset[str], at: str = "#") -> Any:
    if not isinstance(schema, Mapping):
        return schema
    new: dict[str, Any] = {key: held.copy() if isinstance(held, list | dict) else held for key, held in schema.items()}
    for keyword, place, inner in _parts(schema):
        if keyword == "allOf" and len(schema[keyword]) > 1:
            continue
        if place is None:
            new[keyword] = _closed(inner, shared, f"{at}/{keyword}")
        else:
            new[keyword][place] = _closed(inner, shared, f"{at}/{keyword}/{place}")
    if schema.get("properties") and at not in shared and not _SPEAKS_OF_OTHERS & schema.keys():
        new["additionalProperties"] = False
    return new


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Yield the schemas in a schema: keyword, place in what it holds, schema."""
    for keyword, held in schema.items():
        if keyword in _OF_ONE:
            yield keyword, None, held
        elif keyword in _OF_SEVERAL and isinstance(held, list):
            for place, inner in enumerate(held):
                yield keyword, place, inner
        elif keyword in _OF_NAMED and isinstance(held, Mapping):
            for name, inner in held.items():
                yield keyword, name, inner


def _shared_references(schema: Any) -> Iterator[str]:
    """Yield the references that stand beside properties, or in an allOf beside other members."""
    if isinstance(schema, Mapping):
        if schema.get("properties"):
            yield from _reference(schema)
        members = schema.get("allOf", ())
        if isinstance(members, list) and (len(members) > 1 or schema.get("properties")):
            for member in members:
                yield from _reference(member)
        for _, _, inner in _parts(schema):
            yield from _shared_references(inner)


def _reference(schema: Any) -> Iterator[str]:
    """Yield the schema's reference, if it has one; one that is no text is left for llguidance to refuse."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str):
        yield reference
