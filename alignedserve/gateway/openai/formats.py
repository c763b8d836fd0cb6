"""The forms that a client may demand of its answer: JSON, a JSON schema, a pattern, a grammar, a choice of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field
from pydantic_core import PydanticCustomError

from alignedserve.core import Choice
from alignedserve.errors import ModelError
from alignedserve.gateway.openai.errors import invalid
from alignedserve.gateway.openai.strict import ListOf, Ruled, Strict, Usual, fault
from alignedserve.text.call_grammar import BesideCalls, call_syntax, can_write
from alignedserve.text.calls.formats import GENERAL, CallFormat
from alignedserve.text.syntax import closed, is_gbnf, json_syntax, lark_syntax, regex_syntax
from alignedserve.text.syntax_trial import Tried
from alignedserve.text.text_model import TextModel

MOST_CHARACTERS = 100_000  # of a syntax, which travels with its request from part to part

Choices = Annotated[ListOf[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
Pattern = Annotated[str, Field(min_length=1)]
Schema: TypeAlias = dict[str, Any]
ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True)
class WantedCalls:
    """The calls that an answer must or may be."""

    functions: Mapping[str, Schema]  # the schemas of their parameters, by their names
    several: bool
    beside: BesideCalls = BesideCalls.NOTHING

    def form(self, text: TextModel, schema: Any) -> CallFormat:
        """Return the model's own format of calls, or the general one where a grammar cannot say the model's own."""
        own = text.call_format
        if self._stand_aside(text):
            return own
        differs = {
            BesideCalls.NOTHING: True,
            BesideCalls.SCHEMA: own.has_mark or _has_no_name(schema),
            BesideCalls.TEXT: own.has_mark or own.is_whole_answer,
        }
        return own if differs[self.beside] and can_write(own, self.functions) else GENERAL

    def syntax(self, text: TextModel, schema: Any) -> str | None:
        """Return the syntax of the calls and of what may stand beside them; None if it holds for the latter alone."""
        if self._stand_aside(text):
            return None
        form = self.form(text, schema)
        tokens = text.grammar_tokens(form.markers)
        return call_syntax(form, self.functions, self.several, tokens, self.beside, schema)

    def _stand_aside(self, text: TextModel) -> bool:
        """Return whether calls stand apart from the answer, where nothing limits them."""
        return text.call_format.stands_aside and text.reasoning is not None and self.beside is BesideCalls.SCHEMA


def _has_no_name(schema: Any) -> bool:
    """Return whether JSON of the schema surely differs from a call that is JSON itself, which begins with its name."""
    shape = closed(schema) if isinstance(schema, Mapping) else {}
    properties = shape.get("properties") or {}
    return bool(properties) and "name" not in properties and shape.get("additionalProperties") is False


@dataclass(frozen=True)
class Format:
    """The form of an answer, which a field of its body demands: choices, a schema, a regex, a grammar or calls."""

    field: str
    kind: str  # choice, json, regex, grammar or calls
    wanted: Any = None  # texts to choose from; a schema, or its text; a pattern; rules in Lark's language, or GBNF
    spaces: str | None = None  # a pattern of the white space between parts of JSON
    calls: WantedCalls | None = None  # which stand alone, or beside a schema

    def call_format(self, text: TextModel) -> CallFormat | None:
        """Return the format of the calls that the answer may be, if it may be any."""
        return None if self.calls is None else self.calls.form(text, self._whole_schema())

    def limits(self, text: TextModel, tried: Tried) -> tuple[Choice | None, str]:
        """Return what an output must follow, as lists of tokens or as a syntax; raise if nothing could follow it."""
        if self.kind == "choice":
            return self._choice(text), ""
        try:
            syntax = None if self.calls is None else self.calls.syntax(text, self._whole_schema())
            if self.kind == "regex":
                syntax = regex_syntax(_check_size(self.wanted))
            elif self.kind == "grammar":
                rules = _check_size(self.wanted)
                syntax = text.trial.of_gbnf(rules, tried) if is_gbnf(rules) else lark_syntax(rules)
            elif syntax is None:
                syntax = json_syntax(closed(self._whole_schema()), self.spaces)
            fault = text.trial.find_fault(_check_size(syntax), tried)
        except (ValueError, RecursionError, ModelError) as error:
            fault = " ".join(str(error).split())
        if fault is not None:
            said = f"{self.field} cannot be followed"
            raise invalid(f"{said}: {fault}", self.field, "invalid_value", logged=said)
        return None, syntax

    def _choice(self, text: TextModel) -> Choice:
        """Return the choices with the tokens that the tokenizer gives each text; no other spelling is allowed."""
        if sum(map(len, self.wanted)) > MOST_CHARACTERS:
            raise invalid(f"{self.field}: together they have more than {MOST_CHARACTERS} characters", self.field)
        outputs = tuple(tuple(text.answer_ids(choice)) for choice in self.wanted)
        if not all(outputs):
            raise invalid("a text to choose from has no tokens", self.field)
        return Choice(outputs)

    def _whole_schema(self) -> Any:
        schema = json.loads(_check_size(self.wanted)) if isinstance(self.wanted, str) else self.wanted
        _check_size(json.dumps(schema))  # the library needs hundreds of megabytes for a schema of megabytes
        return schema


def _check_size(syntax: str) -> str:
    if len(syntax) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    return syntax


class NamedSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    wanted: Schema | None = Field(None, alias="schema")
    strict: bool | None = None  # an answer always follows the schema


class ResponseFormat(Ruled):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    wanted: Schema | None = Field(None, alias="schema")  # llama.cpp's place for it

    def faults(self) -> Iterator[PydanticCustomError]:
        if (self.type == "json_schema") != (self.json_schema is not None):
            yield fault("json_schema", "must be there if type is json_schema, and only then")
        if self.wanted is not None and self.type != "json_object":
            yield fault("schema", "only allowed if type is json_object")

    @property
    def formats(self) -> list[Format]:
        if self.type == "text":
            return []
        wanted = self.json_schema.wanted if self.json_schema is not None else self.wanted
        return [Format("response_format", "json", ANY_OBJECT if wanted is None else wanted)]


class StructuredOutputs(Strict):
    UNSUPPORTED: ClassVar[Usual] = {"disable_additional_properties": (False,), "structural_tag": ()}
    WHERE = "structured_outputs."

    choice: Choices | None = None
    wanted: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    grammar: Pattern | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Pattern | None = None

    @property
    def formats(self) -> list[Format]:
        spaces = "" if self.disable_any_whitespace else self.whitespace_pattern
        wanted = {"choice": self.choice, "json": self.wanted, "regex": self.regex, "grammar": self.grammar}
        formats = vllm_formats(self.WHERE, wanted, spaces)
        if self.json_object:
            formats.append(Format("structured_outputs.json_object", "json", ANY_OBJECT, spaces))
        return formats


def vllm_formats(prefix: str, wanted: Mapping[str, Any], spaces: str | None = None) -> list[Format]:
    """Return the forms of those of vLLM's fields that are set, by kind; their names begin with the prefix."""
    return [Format(prefix + kind, kind, value, spaces) for kind, value in wanted.items() if value is not None]
