"""The questions that every client asks besides plain chats, and what each script reports of the answers."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, Literal

from pydantic import BaseModel, Field

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


class Number(BaseModel):
    """A number."""

    number: int = Field(ge=1, le=99)
    word: Literal["odd", "even"]


class Loose(BaseModel):
    """A number, or none."""

    number: int | None = None


FENCED = r'```json\n\{"number": [1-9], "word": "(odd|even)"\}\n```'


def at_once(url: str, signs: str) -> dict[str, int]:
    """Return a bias with which each of these signs comes as soon as it may: so small a model may write an object or a
    text that does not end."""
    return {str(_token(url, sign)): 100 for sign in signs}


def _token(url: str, text: str) -> int:
    asked = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    http = urllib.request.Request(f"{url.removesuffix('/v1')}/tokenize", asked, {"content-type": "application/json"})
    with urllib.request.urlopen(http) as answer:
        return int(json.load(answer)["tokens"][-1])


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"It rains in {city}."


def call(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
