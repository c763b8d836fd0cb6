"""The fields of a body about tools: which tools there are, and whether the model must call a tool.

If a call is demanded, the output must have the form of Llama 3's calls, whatever the model's own form is, because that
form needs no special token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from alignedserve.gateway.openai.errors import UNSUPPORTED
from alignedserve.gateway.openai.formats import Format, Schema
from alignedserve.gateway.openai.strict import ListOf, Strict
from alignedserve.text.closed_schema import closed
from alignedserve.text.syntax import JSON_SPACES

MOST_TOOLS = 128
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Typed(Strict):
    type: str

    @model_validator(mode="after")
    def _check_type(self) -> _Typed:
        if self.type != "function":
            message = "only tools of the type function are supported yet"
            raise PydanticCustomError(UNSUPPORTED, message, {"field": "type"})
        return self


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(_Typed):
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as a chat template receives it."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


class NamedFunction(Strict):
    name: Name


class NamedTool(_Typed):
    function: NamedFunction


class CalledFunction(Strict):
    name: str = Field(min_length=1)
    arguments: str


class CalledTool(_Typed):
    """A call that the assistant made earlier in the conversation."""

    id: str
    index: int | None = None  # some clients leave it there from a stream
    function: CalledFunction

    @property
    def shown(self) -> dict[str, Any]:
        """The call as a chat template receives it, with its arguments as an object."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}

    @model_validator(mode="after")
    def _check_arguments(self) -> CalledTool:
        try:
            arguments = from_json(self.function.arguments or "{}")  # this parser limits the depth, as for bodies
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            message = "arguments must be the text of a JSON object"
            raise PydanticCustomError("no_object", message, {"field": "function"})
        return self


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(Strict):
    """A choice among some of the tools: the others are as if they were not there."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        return "allowed" if choice.get("type") == "allowed_tools" else "named"
    if isinstance(choice, AllowedTools):
        return "allowed"
    return "named" if isinstance(choice, NamedTool) else "word"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_kind_of_choice),
]


def calls_format(tools: Sequence[Tool], choice: ToolChoice | None, several: bool) -> Format | None:
    """Return the form of an output that must be calls, or None if no call is demanded."""
    if choice in (None, "none", "auto"):
        return None
    name = choice.function.name if isinstance(choice, NamedTool) else None
    wanted = [tool.function for tool in tools if name in (None, tool.function.name)]
    return Format("tool_choice", rules=_rules(wanted, several and name is None))


def _rules(functions: Sequence[Function], several: bool) -> str:
    calls = [f"call_{number}" for number in range(len(functions))]
    more = ' ("; " call)*' if several else ""
    each = [_call(name, function) for name, function in zip(calls, functions, strict=True)]
    return "\n".join([f"start: call{more}", f"call: {' | '.join(calls)}", *each])


def _call(rule: str, function: Function) -> str:
    schema = _NO_PARAMETERS if function.parameters is None else closed(function.parameters)
    options = {"x-guidance": {"whitespace_pattern": JSON_SPACES, "lenient": False, "coerce_one_of": False}}
    beginning = f'{{"name": {json.dumps(function.name)}, "parameters": '
    return f'{rule}: {json.dumps(beginning)} %json {json.dumps({**schema, **options})} "}}"'
