"""Random JSON schemas that use what is supported here, short enough for an answer to end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

WORDS = "name age city open price kind tags note unit count".split()


def schema(draw: Random, depth: int = 0) -> dict[str, Any]:
    """Draw an object, as clients ask for; its members may be of any kind."""
    names = draw.sample(WORDS, draw.randint(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _value(draw, depth + 1) for name in names}}
    made["required"] = names if draw.random() < 0.7 else draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.8:
        made["additionalProperties"] = False
    return made


def _value(draw: Random, depth: int) -> dict[str, Any]:
    plain: list[Callable[[Random], dict[str, Any]]] = [_text, _number, _enum, _simple, _pattern, _either]
    if depth < 3:
        plain += [_array, lambda draw: schema(draw, depth)]
    return draw.choice(plain)(draw)


def _simple(draw: Random) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null"])}


def _text(draw: Random) -> dict[str, Any]:
    return {"type": "string", "maxLength": draw.randint(0, 12)}


def _pattern(draw: Random) -> dict[str, Any]:
    patterns = [r"^[a-z]{2,5}$", r"^(yes|no)$", r"^[0-9]{4}-[0-9]{2}$", r"^#[0-9a-f]{6}$"]
    formats = ["date", "time", "uuid", "ipv4"]
    if draw.random() < 0.3:
        return {"type": "string", "format": draw.choice(formats)}
    return {"type": "string", "pattern": draw.choice(patterns)}


def _number(draw: Random) -> dict[str, Any]:
    lowest = draw.randint(-100, 100)
    bounds = {"minimum": lowest, "maximum": lowest + draw.randint(0, 1000)}
    return {"type": "integer", **(bounds if draw.random() < 0.6 else {"multipleOf": draw.choice([2, 5, 10]), **bounds})}


def _enum(draw: Random) -> dict[str, Any]:
    values: list[Any] = ["red", 'a "b"', "ünï", 3, None, True, 1.5]
    return {"enum": draw.sample(values, draw.randint(1, 4))} if draw.random() < 0.8 else {"const": draw.choice(values)}


def _either(draw: Random) -> dict[str, Any]:
    return {"anyOf": [_text(draw), _number(draw)]}


def _array(draw: Random) -> dict[str, Any]:
    fewest = draw.randint(0, 2)
    return {"type": "array", "items": _value(draw, 3), "minItems": fewest, "maxItems": fewest + draw.randint(0, 2)}
