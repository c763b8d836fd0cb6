"""Calls that are JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.text.calls.grammar import GrammarWriter, Schema
from alignedserve.text.calls.literals import is_unicode, to_json
from alignedserve.text.calls.scanning import JsonEnd
from alignedserve.text.calls.tape import NoCall, Reading, Tape


@dataclass(frozen=True)
class JsonCalls:
    """Objects with a name and arguments, alone or in a list, perhaps up to a closing marker.

    All of the keys are read; the first of them are written."""

    closings: tuple[str, ...] = ()
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    known_only: bool = False  # whether only the name of a tool makes an object a call

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self._before(name)}{to_json(arguments)}}}"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str:
        before = self._before(name)[1:]  # the brace is a part of its own, since other JSON may begin with it too
        return f"{grammar.text('{')} {grammar.text(before)} {grammar.json(parameters)} {grammar.text('}')}"

    def _before(self, name: str) -> str:
        return f'{{"{self.name_keys[0]}": {to_json(name)}, "{self.argument_keys[0]}": '

    def read(self, tape: Tape, _: str) -> Reading[None]:
        """Read what follows a marker of calls."""
        yield from tape.skip()
        in_list = bool((yield from tape.take("[")))
        yield from self._read_object(tape)
        while True:
            yield from tape.skip(", ;\t\r\n")
            if in_list and (yield from tape.take("]")):
                in_list = False
            elif (yield from tape.peek()) == "{":
                tape.begin_attempt()
                yield from self._read_object(tape)
            else:
                break
        if self.closings:
            yield from tape.say_until(*self.closings)

    def _read_object(self, tape: Tape) -> Reading[None]:
        yield from tape.skip()
        yield from tape.expect("{")
        name, arguments, follows = "", "", "{"
        while follows != "}":
            key = yield from _read_key(tape)
            if key in self.name_keys and not name:
                name = self._check(_parsed((yield from tape.json_text())), tape)
                tape.begin_call(name)
                if arguments:
                    tape.add(arguments)
            elif key in self.argument_keys:
                arguments = yield from _read_arguments(tape, streams=bool(name))
            else:
                yield from tape.json_text()
            yield from tape.skip()
            follows = yield from tape.expect(",", "}")
        if not name:
            raise NoCall
        tape.end_call()

    def _check(self, name: Any, tape: Tape) -> str:
        if not isinstance(name, str) or not name.isprintable() or (self.known_only and name not in tape.tools):
            raise NoCall
        return name


def _read_key(tape: Tape) -> Reading[str]:
    yield from tape.skip()
    if (yield from tape.peek()) != '"':
        raise NoCall
    key = _parsed((yield from tape.json_text()))
    yield from tape.skip()
    yield from tape.expect(":")
    yield from tape.skip()
    return str(key)


def _read_arguments(tape: Tape, streams: bool) -> Reading[str]:
    """Read arguments, and pass them on if `streams`; return what has not been passed on."""
    if streams and (yield from tape.peek()) == "{":
        yield from tape.value(JsonEnd(), tape.add)
        return ""
    written = yield from tape.json_text()
    value = _parsed(written)
    arguments = value if isinstance(value, str) and is_unicode(value) else "{}" if value is None else written
    if streams:
        tape.add(arguments)
    return arguments


def _parsed(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None
