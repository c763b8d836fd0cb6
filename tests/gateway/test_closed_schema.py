"""Tests of schemas whose objects are closed: nothing that a schema asks for is lost, and nothing else comes."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from alignedserve.text.syntax import closed

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
BOTH = {"age": 5, "name": "Ada"}


def allows(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "own", "with_more"),
    [
        (AGE, {"age": 5}, BOTH),
        ({"type": "array", "items": AGE}, [{"age": 5}], [BOTH]),
        ({"properties": {"person": AGE}}, {"person": {"age": 5}}, {"person": BOTH}),
        ({"anyOf": [AGE, {"type": "null"}]}, {"age": 5}, BOTH),
        ({"$ref": "#/$defs/Age", "$defs": {"Age": AGE}}, {"age": 5}, BOTH),
        ({"allOf": [{"$ref": "#/$defs/Age"}], "$defs": {"Age": AGE}}, {"age": 5}, BOTH),
        ({"prefixItems": [AGE], "items": False}, [{"age": 5}], [BOTH]),
        ({"type": "object", "additionalProperties": AGE}, {"x": {"age": 5}}, {"x": BOTH}),
    ],
)
def test_an_object_has_no_other_properties(schema: Any, own: Any, with_more: Any) -> None:
    assert allows(schema, with_more)
    assert allows(closed(schema), own)
    assert not allows(closed(schema), with_more)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**AGE, "additionalProperties": True},
        {**AGE, "patternProperties": {"^n": {"type": "string"}}},
        {"allOf": [AGE, NAME]},
        {"allOf": [{"$ref": "#/$defs/Age"}, NAME], "$defs": {"Age": AGE}},
        {**NAME, "allOf": [{"$ref": "#/$defs/Age"}], "$defs": {"Age": AGE}},
        {**NAME, "$ref": "#/$defs/Age", "$defs": {"Age": AGE}},
        True,
    ],
)
def test_what_speaks_of_others_itself_stays_open(schema: Any) -> None:
    assert allows(schema, BOTH)
    assert allows(closed(schema), BOTH)


def test_closing_takes_time_as_the_schema_is_long() -> None:
    """It took a minute when each member copied all the others."""
    assert closed({"anyOf": [1] * 30_000, "properties": {f"p{n}": {} for n in range(9_000)}})["anyOf"] == [1] * 30_000
