"""Calls whose arguments stand between tags, each as a plain text, which becomes JSON by the function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.text.calls.coercion import coerced, is_text, parameter_types
from alignedserve.text.calls.grammar import GrammarWriter, Schema
from alignedserve.text.calls.literals import to_json
from alignedserve.text.calls.tape import NoCall, Reading, Tape

# What a schema of parameters may say besides; any other word rules several parameters together.
_PLAIN_WORDS = {"type", "properties", "required", "$defs", "definitions", "$schema", "title", "description"}


@dataclass(frozen=True)
class TaggedCalls:
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
        rules = []
        for key, schema in properties.items():
            types = parameter_types(parameters, key)
            rule = self._argument_rule(key, schema, shared, types, grammar)
            rules.append(rule if key in required else f"({rule})?")
        begin, end = grammar.text(f"{self.opens_name}{name}{self.ends_name}\n"), grammar.text(self.ends_call)
        return " ".join([begin, *rules, end])

    def _argument_rule(
        self, key: str, schema: Any, shared: Schema, types: frozenset[str] | None, grammar: GrammarWriter
    ) -> str:
        line = "\n" if self.has_lines else ""
        before, after = grammar.text(self._before(key) + line), f"{line}{self.ends_value}\n"
        if not is_text(types):
            return f"{before} {grammar.json({**schema, **shared})} {grammar.text(after)}"
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
        if choices:
            return f"{before} ({' | '.join(map(grammar.text, choices))}) {grammar.text(after)}"
        return f"{before} {grammar.text_before(after)}"

    def _before(self, key: str) -> str:
        return f"{self.opens_key}{key}{self.ends_key}" + (f"\n{self.opens_value}" if self.opens_value else "")

    def read(self, tape: Tape, marker: str) -> Reading[None]:
        if self.opens_name and marker != self.opens_name:
            yield from tape.skip()
            yield from tape.expect(self.opens_name)
        yield from tape.skip()
        name = yield from tape.name()
        yield from tape.skip()
        if self.ends_name:
            yield from tape.expect(self.ends_name)
            yield from tape.skip()
        follows = yield from tape.expect(self.opens_key, self.ends_call)
        tape.begin_call(name)
        yield from self._read_arguments(tape, follows, tape.tools.get(name) or {})
        tape.end_call()
        if self.closing:
            yield from tape.skip()
            yield from tape.take(self.closing)

    def _read_arguments(self, tape: Tape, follows: str, parameters: Schema) -> Reading[None]:
        """Read arguments up to the end of the call; `follows` is the tag that was read last."""
        before = "{"
        while follows == self.opens_key:
            key = yield from tape.text_until(self.ends_key)
            if self.opens_value:
                yield from tape.skip()
                yield from tape.expect(self.opens_value)
            tape.add(f"{before}{to_json(key.strip())}: ")
            yield from self._read_value(tape, parameter_types(parameters, key.strip()))
            yield from tape.skip()
            before, follows = ", ", (yield from tape.take(self.opens_key, self.ends_call))
        if before != "{":
            tape.add("}")
        if not follows:
            raise NoCall

    def _read_value(self, tape: Tape, types: frozenset[str] | None) -> Reading[None]:
        """Read one value; a text is passed on while it is written, other values when they are complete."""
        ends: tuple[str, ...] = (self.ends_value,)
        if self.has_lines:
            yield from tape.take("\n")
            ends = (f"\n{self.ends_value}", self.ends_value)
        if is_text(types):
            tape.add('"')
            found = yield from tape.until(*ends, pass_on=lambda piece: tape.add(_escaped(piece)))
            if not found:
                raise NoCall
            tape.add('"')
        else:
            tape.add(to_json(coerced((yield from tape.text_until(*ends)), types)))


def _escaped(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]
