"""The fields of a body about tools: which tools there are, and whether the model must call a tool."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from alignedserve.gateway.openai.errors import UNSUPPORTED
from alignedserve.gateway.openai.formats import Schema
from alignedserve.gateway.openai.strict import ListOf, Strict, fault, type_of

MOST_TOOLS = 128
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Typed(Strict):
    NO_OTHERS: ClassVar[str] = "are supported yet"

    type: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Refuse other types before their fields are looked at."""
        if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] != "function":
            raise fault("type", f"only tools of the type function {cls.NO_OTHERS}", UNSUPPORTED)
        return given


def as_function(**fields: Any) -> dict[str, Any]:
    """Return a function as chats have it, in tools, calls and choices; None counts as not set."""
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def object_in(arguments: str) -> dict[str, Any] | None:
    """Return the object that the arguments of a call are; None where they are none."""
    try:
        read = from_json(arguments or "{}")  # this parser limits the depth, as for bodies
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Typed):
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as a chat template receives it."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


class NamedFunction(Strict):
    name: Name


class NamedTool(Typed):
    function: NamedFunction


class CalledFunction(Strict):
    name: str = Field(min_length=1)
    arguments: str


class CalledTool(Typed):
    """A call that the assistant made earlier in the conversation."""

    id: str
    index: int | None = None  # some clients leave it there from a stream
    function: CalledFunction

    @property
    def shown(self) -> dict[str, Any]:
        """The call as a chat template receives it: its arguments as an object, or as text where they are no object.

        A model may have written what is no object, and an agent shows it that so that it can mend it."""
        written = self.function.arguments
        arguments = written if (read := object_in(written)) is None else read
        return {"id": self.id, **as_function(name=self.function.name, arguments=arguments)}


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(Strict):
    """A choice among some of the tools: the others are as if they were not there."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def _kind_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict | AllowedTools | NamedTool):
        return "word"
    return "allowed" if type_of(choice) == "allowed_tools" else "named"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_kind_of_choice),
    BeforeValidator(lambda choice: "required" if choice == "any" else choice),  # Mistral's word
]
