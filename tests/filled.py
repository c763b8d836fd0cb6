"""Bodies of the API that have one field as long as may be, made from the OpenAPI document.

Every field that can be long is found: texts, lists, objects whose names are the client's, and all that may stand in
them; and every whole number, which can be large. A schema that is not understood here ends the walk, so that no new
field is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.openapi import document

Schema = Mapping[str, Any]
Fill = Callable[[int], Any]  # a number of bytes -> a value of about that size as JSON

_REF = "#/components/schemas/"
_LONG = 1024  # characters: a text that must be shorter is not long
_MOST_NAMES = 2048  # of an object
_ANNOTATIONS = {"title", "default", "description"}
_SCHEMAS = {"guided_json", "json", "schema", "parameters", "input_schema"}  # objects that are JSON schemas themselves
_SYNTAX: dict[str, str] = {  # what a text is around what makes it long
    **dict.fromkeys(("regex", "guided_regex", "whitespace_pattern"), "{}"),
    **dict.fromkeys(("grammar", "guided_grammar"), 'start: "{}"'),
    "arguments": '{{"a": "{}"}}',
}
USUAL: dict[str, Any] = {  # values that rules ask for, and no schema tells
    **dict.fromkeys(("grammar", "guided_grammar"), 'start: "a"'),
    "model": "demo",
    "content": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "type": "function",
    "arguments": "{}",
    "logit_bias": {"7": 1.0},
    "completion_window": "24h",
}
_TOOL = {"type": "function", "function": {"name": "a"}}
WITH: dict[str, dict[str, Any]] = {  # a field -> what must stand beside it
    **{name: {"role": "assistant"} for name in ("tool_calls", "reasoning", "reasoning_content", "refusal")},
    "tool_call_id": {"role": "tool"},
    "json_schema": {"type": "json_schema"},
    "tool_choice": {"tools": [_TOOL]},
    **{one: {many: ["a"] * 500} for one, many in (("text_1", "text_2"), ("queries", "items"), ("query", "documents"))},
    **{many: {one: "a"} for one, many in (("text_1", "text_2"), ("queries", "items"))},
    "top_logprobs": {"logprobs": True},
}
_WORDS = "the sea is calm 1984 - naïve 東京 "


@dataclass(frozen=True)
class Place:
    """A field of a body that can be long, and how it is filled."""

    path: str  # of the route
    name: str  # such as messages[].content
    make: Fill

    def __str__(self) -> str:
        return f"{self.path} {self.name}"


class Walk:
    """Finds the places of all routes that take a body."""

    def __init__(self, vocab_size: int, of_numbers: bool = False) -> None:
        """Find the whole numbers where it is `of_numbers`, which are filled with a number, else what can be long."""
        self._of_numbers = of_numbers
        self._first_token, self._vocab_size = min(100_000, vocab_size // 2), vocab_size
        self._paths = document(with_jobs=True)["paths"]
        self._schemas: Schema = document(with_jobs=True)["components"]["schemas"]

    def bodies(self) -> Iterator[tuple[str, Schema]]:
        """Yield the path and the body's schema of each route; of routes that take the same body, of the first."""
        seen: list[Schema] = []
        for path, methods in self._paths.items():
            for method in methods.values():
                if (body := method.get("requestBody")) is None or body in seen:
                    continue
                seen.append(body)
                if path == "/v1/files":  # a form, whose file goes to disk
                    continue
                assert [*body["content"]] == ["application/json"], f"say here how the body of {path} is filled"
                yield path, body["content"]["application/json"]["schema"]

    def places(self) -> list[Place]:
        found = [Place(path, *filled) for path, schema in self.bodies() for filled in self._filled(schema, "", ())]
        return [*{str(place): place for place in found}.values()]

    def has(self, path: str, field: str) -> bool:
        """Return whether the body of a route has this field."""
        (schema,) = (schema for of, schema in self.bodies() if of == path)
        return field in self._resolve(schema)["properties"]

    def least(self, path: str) -> dict[str, Any]:
        """Return the smallest body of a route."""
        (schema,) = (schema for of, schema in self.bodies() if of == path)
        body: dict[str, Any] = self._minimal(schema)
        return body

    def _resolve(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].removeprefix(_REF)]
        return schema

    def _minimal(self, schema: Schema, field: str = "") -> Any:
        """Return the smallest value of a schema."""
        match self._resolve(schema):
            case {"const": value} | {"enum": [value, *_]}:
                return value
            case _ if field in USUAL:
                return USUAL[field]
            case {"anyOf": [option, *_]} | {"oneOf": [option, *_]}:
                return self._minimal(option, field)
            case {"type": "object", **more}:
                known = more.get("properties", {})
                named = {name: self._minimal(known[name], name) for name in more.get("required", ())}
                return {"content": "Hi", **named} if {"role", "content"} <= known.keys() else named
            case {"type": "array", **more}:
                return [self._minimal(more.get("items", {}))] * more.get("minItems", 0)
            case {"type": "integer" | "number", **more}:
                return more.get("minimum", 1)
            case {"type": "boolean"}:
                return False
            case {"type": "null"}:
                return None
            case other:
                assert other.get("type") == "string" or not other.keys() - _ANNOTATIONS, f"what is the least {other}?"
                return "a"

    def _filled(self, schema: Schema, name: str, within: tuple[str, ...]) -> Iterator[tuple[str, Fill]]:
        """Yield each place of a schema, with what makes a value of the schema that is long there."""
        if (ref := schema.get("$ref")) is not None:
            if ref not in within:  # a schema within itself has no new places
                yield from self._filled(self._resolve(schema), name, (*within, ref))
            return
        field = name.rpartition(".")[2].rstrip("[]{}")
        match schema:
            case {"anyOf": options} | {"oneOf": options}:
                for option in options:
                    yield from self._filled(option, name, within)
            case {"type": "integer"} if self._of_numbers:
                yield name, lambda number: number
            case {"const": _} | {"enum": _} | {"type": "boolean" | "integer" | "number" | "null"}:
                return
            case {"type": "string"} if self._of_numbers:
                return
            case {"type": "string", "pattern": pattern}:
                assert "}" in pattern, f"{name}: may a text of {pattern} be long? Say here how it is filled"
            case {"type": "string", **more}:
                if more.get("maxLength", _LONG) >= _LONG:
                    yield name, lambda size: _text(field, size)
            case {"type": "array", "items": items, **more}:
                least, most = max(1, more.get("minItems", 0)), more.get("maxItems")
                if not self._of_numbers:
                    yield f"{name}[{_kind(self._minimal(items))}s]", lambda size: self._list(items, size, most)
                for place, make in self._filled(items, f"{name}[]", within):
                    yield place, lambda size, make=make: [make(size // least)] * least
            case {"type": "object", **more}:
                yield from self._filled_object(schema, more, name, field, within)
            case other:
                assert not other.keys() - _ANNOTATIONS, f"{name}: how is {other} filled?"
                if not self._of_numbers:
                    yield name, lambda size: [_text("", size // 3), [7] * (size // 9), _names(size // 3, 0)]

    def _filled_object(
        self, schema: Schema, more: Schema, name: str, field: str, within: tuple[str, ...]
    ) -> Iterator[tuple[str, Fill]]:
        least, others = self._minimal(schema), more.get("additionalProperties", False)
        properties = more.get("properties", {})
        for one, described in properties.items():
            beside = {**least, **{name: value for name, value in WITH.get(one, {}).items() if name in properties}}
            for place, make in self._filled(described, f"{name}.{one}" if name else one, within):
                yield place, lambda size, make=make, one=one, beside=beside: {**beside, one: make(size)}
        if self._of_numbers:
            return
        if field in _SCHEMAS:
            for place, make in _SCHEMA_FILLS.items():
                yield f"{name}{place}", make
        elif others:
            values, most = {} if others is True else others, more.get("maxProperties", _MOST_NAMES)
            first = self._first_token if field == "logit_bias" else 0
            yield f"{name}{{}}", lambda size: _names(size, self._minimal(values), most, first)
            for place, make in self._filled(values, f"{name}{{}}", within):
                yield place, lambda size, make=make: {"a": make(size)}

    def _list(self, items: Schema, size: int, most: int | None) -> list[Any]:
        """Return a list of this size as JSON; of tokens, of some that pack badly."""
        one = self._minimal(items)
        number = max(1, min(most or size, size // (8 if isinstance(one, int) else len(json.dumps(one)) + 2)))
        if isinstance(one, int) and not isinstance(one, bool):
            tokens = range(self._first_token, self._vocab_size)
            return [tokens[7919 * at % len(tokens)] for at in range(number)]
        return [f"{one}{at}" for at in range(number)] if one == "a" else [one] * number


def _text(field: str, size: int) -> str:
    """Return a text of this size as JSON; where a field takes another language than people's, a text of that."""
    if (syntax := _SYNTAX.get(field)) is not None:
        return syntax.format("a" * max(1, size - 20))
    return (_WORDS * (size // len(json.dumps(_WORDS)) + 1))[: max(1, size)]


def _kind(value: Any) -> str:
    return {int: "number", str: "text", list: "list", dict: "object"}[type(value)]


def _names(size: int, value: Any, most: int = _MOST_NAMES, first: int = 0) -> dict[str, Any]:
    number = max(1, min(most, size // (len(json.dumps(value)) + 10)))
    return {str(first + at): value for at in range(number)}


def _properties(size: int) -> Any:
    return {"type": "object", "properties": _names(min(size, 40_000), {"type": "integer"})}


_SCHEMA_FILLS: dict[str, Fill] = {
    "{properties}": _properties,
    "{enum}": lambda size: {"type": "string", "enum": [f"{at:06}" for at in range(max(1, size // 10))]},
    "{description}": lambda size: {"type": "string", "description": _text("", size)},
    "{pattern}": lambda size: {"type": "string", "pattern": "a" * size},
}
