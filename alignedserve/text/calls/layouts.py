"""The ways in which one call is written: each layout reads calls, writes one, and says as a grammar how one is written.

JsonCalls     {"name": "f", "arguments": {...}}, alone or in a list
SectionCalls  a name and its arguments in JSON, each call between markers; MistralCalls, HarmonyCalls: likewise
TaggedCalls   arguments between tags, each as a plain text, which becomes JSON by the function's schema
PythonCalls   [f(a=1), g()]
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from alignedserve.text.calls.scanning import CallReader, NoCall, Reading
from alignedserve.text.calls.values import Schema, coerced, is_text, is_unicode, parameter_types, python_value, to_json

_MOST_HEADER = 256  # characters between a name and its arguments
# What a schema of parameters may say besides; any other word rules several parameters together.
_PLAIN_WORDS = {"type", "properties", "required", "$defs", "definitions", "$schema", "title", "description"}


class GrammarWriter(Protocol):
    """Writes the parts of a rule."""

    def text(self, literal: str) -> str:
        """Return the part that a text stands for, in which special tokens are tokens."""

    def text_before(self, marker: str) -> str:
        """Return the part of any text up to a marker, and of the marker."""

    def json(self, schema: Any) -> str:
        """Return the part of a JSON value of the schema."""


class CallLayout(ABC):
    """The way in which one call is written; by default as JSON arguments between two texts; the first has the name."""

    @abstractmethod
    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        """Read what follows a marker that begins calls."""

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""
        raise NotImplementedError  # a layout that writes calls otherwise has its own `write`, and is not asked

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return one call."""
        before, after = self.around(name)
        return f"{before}{to_json(arguments)}{after}"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str | None:
        """Return the rule of a call in a grammar; None if a grammar cannot say it."""
        before, after = map(grammar.text, self.around(name))
        return f"{before} {grammar.json(parameters)} {after}"


@dataclass(frozen=True)
class JsonCalls(CallLayout):
    """Objects with a name and arguments, alone or in a list, perhaps up to a closing marker.

    All of the keys are read; the first of them are written. Without a marker, where a call is the answer, perhaps in a
    block of code, only the name of a tool makes an object a call."""

    closings: tuple[str, ...] = ()
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    known_only: bool = False  # whether only the name of a tool makes an object a call

    def around(self, name: str) -> tuple[str, str]:
        return f'{{"{self.name_keys[0]}": {to_json(name)}, "{self.argument_keys[0]}": ', "}"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str:
        before, after = self.around(name)  # the brace is a part of its own, since other JSON may begin with it too
        parts = grammar.text(before[0]), grammar.text(before[1:]), grammar.json(parameters), grammar.text(after)
        return " ".join(parts)

    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        known_only = self.known_only or not marker
        fence = "" if marker else (yield from reader.accept("```json", "```"))
        in_list = bool((yield from reader.accept("[")))
        yield from self._read_object(reader, known_only)
        while True:
            yield from reader.skip(", ;\t\r\n")
            if in_list and (yield from reader.take("]")):
                in_list = False
            elif (yield from reader.peek()) == "{":
                reader.begin_attempt()
                yield from self._read_object(reader, known_only)
            else:
                break
        if fence:
            yield from reader.take("```")
        elif marker and self.closings:
            yield from reader.say_until(*self.closings)

    def _read_object(self, reader: CallReader, known_only: bool) -> Reading[None]:
        yield from reader.expect("{")
        name, arguments, is_told, follows = "", "", False, "{"
        while follows != "}":
            if (yield from reader.skip()) != '"':
                raise NoCall
            key = str(_parsed((yield from reader.json_text())))
            yield from reader.expect(":")
            yield from reader.skip()
            is_wanted = key in self.argument_keys and not is_told
            if is_wanted and name and (yield from reader.peek()) == "{":
                is_told = True
                yield from reader.value(reader.add)  # arguments are passed on while they are written
            else:
                value = _parsed(written := (yield from reader.json_text()))
                if key in self.name_keys and not name:
                    name = value if isinstance(value, str) and value.isprintable() else ""
                    if not name or (known_only and name not in reader.tools):
                        raise NoCall
                    reader.begin_call(name)
                elif is_wanted and not arguments and value is not None:
                    arguments = value if isinstance(value, str) and is_unicode(value) else written
                if name and arguments and not is_told:
                    is_told = True
                    reader.add(arguments)
            follows = yield from reader.expect(",", "}")
        if not name:
            raise NoCall
        reader.end_call()


def _parsed(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


# --- Names with arguments in JSON after them


def _read_call(reader: CallReader, name: str, *closings: str) -> Reading[None]:
    """Read a call's arguments: an object, or nothing before a closing marker."""
    if (yield from reader.skip()) == "{":
        reader.begin_call(name)
        yield from reader.value(reader.add)
    elif closings and (yield from reader.take(*closings)):
        reader.begin_call(name)
    else:
        raise NoCall
    reader.end_call()


@dataclass(frozen=True)
class SectionCalls(CallLayout):
    """Reads a section of calls, each with a marker before its name, another before its arguments, and one at its end.

    DeepSeek V3 writes `function` where others have the name, then the name, and the arguments as a block of code."""

    opens: str  # of the section
    closes: str
    begins: str  # of a call
    parts: str
    ends: str
    shape: tuple[str, str]  # what stands before and after the arguments, with NAME for the name

    def around(self, name: str) -> tuple[str, str]:
        return self.shape[0].replace("NAME", name), self.shape[1]

    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        if marker == self.opens:
            yield from reader.expect(self.begins)
        while True:
            yield from reader.skip()
            name = yield from reader.name("_.-:")
            yield from reader.expect(self.parts)
            if (yield from reader.skip()) not in ("{", self.ends[0]):
                name = yield from reader.name()
                yield from reader.accept("```json")
            # Kimi writes functions.NAME:0
            yield from _read_call(reader, name.removeprefix("functions.").partition(":")[0], self.ends)
            yield from reader.accept("```")
            yield from reader.accept(self.ends)
            if (yield from reader.accept(self.begins, self.closes)) != self.begins:
                return
            reader.begin_attempt(self.begins)


class MistralCalls(CallLayout):
    """Reads a list of objects, which older models write, or a name, perhaps the call's id, and arguments."""

    def around(self, name: str) -> tuple[str, str]:
        return f"{name}[ARGS]", ""

    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        if (yield from reader.skip()) in ("[", "{"):
            yield from JsonCalls().read(reader, marker)
            return
        name = yield from reader.name()
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.name()
        yield from reader.take("[ARGS]")
        yield from _read_call(reader, name)


class HarmonyCalls(CallLayout):
    """Reads a message to a function: `functions.NAME<|message|>{...}<|call|>`, perhaps with a type before the body."""

    def around(self, name: str) -> tuple[str, str]:
        return f"functions.{name} <|constrain|>json<|message|>", ""

    def read(self, reader: CallReader, _: str) -> Reading[None]:
        yield from reader.take("functions.")
        name = yield from reader.name()
        header = yield from reader.text_until("<|message|>")
        if len(header) > _MOST_HEADER or "\n" in header:
            raise NoCall
        reader.begin_call(name)
        yield from reader.until("<|call|>", "<|end|>", pass_on=reader.add)
        reader.end_call()


@dataclass(frozen=True)
class TaggedCalls(CallLayout):
    """Reads one call: its name, and a key and a value for each argument.

    `opens_name` may be the marker that begins the call. A new line beside a value belongs to the tags, where
    `has_lines` says so."""

    opens_name: str
    ends_name: str
    opens_key: str
    ends_key: str
    opens_value: str
    ends_value: str
    ends_call: str
    closing: str = ""
    has_lines: bool = False

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        line = "\n" if self.has_lines else ""
        written = [
            f"{self._before(key)}{line}{value if isinstance(value, str) else to_json(value)}{line}{self.ends_value}\n"
            for key, value in arguments.items()
        ]
        return f"{self.opens_name}{name}{self.ends_name}\n{''.join(written)}{self.ends_call}"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str | None:
        """Return the rule of a call with the parameters in their order; None if the schema does not list them."""
        properties = parameters.get("properties") or {}
        if not isinstance(properties, Mapping) or parameters.keys() - {"additionalProperties", *_PLAIN_WORDS}:
            return None
        if not properties and parameters.get("additionalProperties") is not False:
            return None
        required = parameters.get("required") or ()
        shared = {word: parameters[word] for word in ("$defs", "definitions") if word in parameters}
        line = "\n" if self.has_lines else ""
        after, rules = f"{line}{self.ends_value}\n", []
        for key, schema in properties.items():
            if not is_text(parameter_types(parameters, key)):
                value = f"{grammar.json({**schema, **shared})} {grammar.text(after)}"
            elif choices := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
                value = f"({' | '.join(map(grammar.text, choices))}) {grammar.text(after)}"
            else:
                value = grammar.text_before(after)
            rule = f"{grammar.text(self._before(key) + line)} {value}"
            rules.append(rule if key in required else f"({rule})?")
        begin, end = grammar.text(f"{self.opens_name}{name}{self.ends_name}\n"), grammar.text(self.ends_call)
        return " ".join([begin, *rules, end])

    def _before(self, key: str) -> str:
        return f"{self.opens_key}{key}{self.ends_key}" + (f"\n{self.opens_value}" if self.opens_value else "")

    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        if self.opens_name and marker != self.opens_name:
            yield from reader.expect(self.opens_name)
        yield from reader.skip()
        name = yield from reader.name()
        if self.ends_name:
            yield from reader.expect(self.ends_name)
        follows = yield from reader.expect(self.opens_key, self.ends_call)
        reader.begin_call(name)
        before, parameters = "{", reader.tools.get(name) or {}
        while follows == self.opens_key:
            key = yield from reader.text_until(self.ends_key)
            if self.opens_value:
                yield from reader.expect(self.opens_value)
            reader.add(f"{before}{to_json(key.strip())}: ")
            yield from self._read_value(reader, parameter_types(parameters, key.strip()))
            before, follows = ", ", (yield from reader.accept(self.opens_key, self.ends_call))
        if before != "{":
            reader.add("}")
        if not follows:
            raise NoCall
        reader.end_call()
        if self.closing:
            yield from reader.accept(self.closing)

    def _read_value(self, reader: CallReader, types: frozenset[str] | None) -> Reading[None]:
        """Read one value; a text is passed on while it is written, other values when they are complete."""
        ends: tuple[str, ...] = (self.ends_value,)
        if self.has_lines:
            yield from reader.take("\n")
            ends = (f"\n{self.ends_value}", self.ends_value)
        if is_text(types):
            reader.add('"')
            if not (yield from reader.until(*ends, pass_on=lambda piece: reader.add(_escaped(piece)))):
                raise NoCall
            reader.add('"')
        else:
            reader.add(to_json(coerced((yield from reader.text_until(*ends)), types)))


def _escaped(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class PythonCalls(CallLayout):
    """Reads `[f(a=1), g()]`. Only the name of a tool makes it a call: brackets begin many texts."""

    closings: tuple[str, ...] = ()

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> None:
        """Return no rule: grammars are made of JSON."""

    def read(self, reader: CallReader, marker: str) -> Reading[None]:
        if (yield from reader.skip()) == "{":  # what Llama 4 writes where it is asked to
            yield from JsonCalls(known_only=True).read(reader, marker)
        else:
            yield from reader.expect("[")
            follows = ","
            while follows == ",":
                reader.begin_attempt()
                yield from self._read_call(reader)
                follows = yield from reader.accept(",", "]")
        if self.closings:
            yield from reader.accept(*self.closings)

    def _read_call(self, reader: CallReader) -> Reading[None]:
        yield from reader.skip()
        name = yield from reader.name()
        if not (yield from reader.take("(")) or name not in reader.tools:
            raise NoCall
        if (yield from reader.accept(")")):
            reader.begin_call(name)
        else:
            yield from self._read_arguments(reader, name)
        reader.end_call()

    def _read_arguments(self, reader: CallReader, name: str) -> Reading[None]:
        """Read all arguments of a call, which begins with its first key; each is passed on when it is complete."""
        before = "{"
        while before == "{" or not (yield from reader.accept(")")):
            try:
                key = yield from reader.name("_")
                yield from reader.expect("=")
            except NoCall:
                if before != "{":
                    reader.add("}")  # what came before are arguments all the same
                raise
            if before == "{":
                reader.begin_call(name)
            pieces: list[str] = []
            yield from reader.value(pieces.append, in_python=True)
            value = python_value("".join(pieces), parameter_types(reader.tools[name], key))
            reader.add(f"{before}{to_json(key)}: {to_json(value)}")
            before = ", "
            yield from reader.take(",")
        reader.add("}")
