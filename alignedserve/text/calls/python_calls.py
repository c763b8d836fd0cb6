"""Calls in Python: a list of functions with named arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.text.calls.coercion import coerced, parameter_types
from alignedserve.text.calls.grammar import GrammarWriter, Schema
from alignedserve.text.calls.json_calls import JsonCalls
from alignedserve.text.calls.literals import NoValue, read_literal, to_json
from alignedserve.text.calls.scanning import PythonEnd
from alignedserve.text.calls.tape import NoCall, Reading, Tape

_OBJECTS = JsonCalls(known_only=True)


@dataclass(frozen=True)
class PythonCalls:
    """Reads `[f(a=1), g()]`. Only the name of a tool makes it a call: brackets begin many texts."""

    closings: tuple[str, ...] = ()
    or_json: JsonCalls = _OBJECTS  # what Llama 4 writes where it is asked to

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str | None:
        """Return no rule: grammars are made of JSON."""
        return None

    def read(self, tape: Tape, marker: str) -> Reading[None]:
        yield from tape.skip()
        if (yield from tape.peek()) == "{":
            yield from self.or_json.read(tape, marker)
        else:
            yield from self._read_list(tape)
        if self.closings:
            yield from tape.skip()
            yield from tape.take(*self.closings)

    def _read_list(self, tape: Tape) -> Reading[None]:
        yield from tape.expect("[")
        follows = ","
        while follows == ",":
            tape.begin_attempt()
            yield from tape.skip()
            yield from self._read_call(tape)
            yield from tape.skip()
            follows = yield from tape.take(",", "]")

    def _read_call(self, tape: Tape) -> Reading[None]:
        name = yield from tape.name()
        yield from tape.expect("(")
        if name not in tape.tools:
            raise NoCall
        yield from tape.skip()
        if (yield from tape.take(")")):
            tape.begin_call(name)
        else:
            key = yield from _read_key(tape)
            tape.begin_call(name)
            yield from _read_arguments(tape, name, key)
            tape.add("}")
        tape.end_call()


def _read_key(tape: Tape) -> Reading[str]:
    key = yield from tape.name("_")
    yield from tape.skip()
    yield from tape.expect("=")
    return key


def _read_arguments(tape: Tape, name: str, key: str) -> Reading[None]:
    """Read all arguments of a call, whose first key has been read; each is passed on when it is complete."""
    before = "{"
    while True:
        pieces: list[str] = []
        yield from tape.value(PythonEnd(), pieces.append)
        value = _value("".join(pieces), parameter_types(tape.tools[name], key))
        tape.add(f"{before}{to_json(key)}: {to_json(value)}")
        before = ", "
        if (yield from tape.take(",")):
            yield from tape.skip()
        if (yield from tape.take(")")):
            return
        try:
            key = yield from _read_key(tape)
        except NoCall:
            tape.add("}")  # what came before are arguments all the same
            raise


def _value(written: str, types: frozenset[str] | None) -> Any:
    """Return an argument's value; some models write numbers as texts."""
    try:
        value = read_literal(written)
    except NoValue:
        return written.strip()
    return coerced(value, types) if isinstance(value, str) and types and "string" not in types else value
