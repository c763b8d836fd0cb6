"""The questions that every client asks besides plain chats, and what each script reports of the answers."""

from __future__ import annotations

import json
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 99}, "word": {"enum": ["odd", "even"]}},
    "required": ["number", "word"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}}
DEMANDED = {"type": "function", "function": {"name": "weather"}}


def call(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
