"""Calls that are a function's name with its arguments in JSON after it, between markers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.text.calls.grammar import GrammarWriter, Schema
from alignedserve.text.calls.json_calls import JsonCalls
from alignedserve.text.calls.literals import to_json
from alignedserve.text.calls.scanning import JsonEnd
from alignedserve.text.calls.tape import NoCall, Reading, Tape

_OBJECTS = JsonCalls()
_MOST_HEADER = 256  # characters between a name and its arguments


def _read_arguments(tape: Tape, name: str, *closings: str) -> Reading[None]:
    """Read an object, or nothing before a closing marker; the call begins with it."""
    yield from tape.skip()
    if (yield from tape.peek()) == "{":
        tape.begin_call(name)
        yield from tape.value(JsonEnd(), tape.add)
    elif closings and (yield from tape.take(*closings)):
        tape.begin_call(name)
    else:
        raise NoCall
    tape.end_call()


class NamedCalls(ABC):
    """Calls in each of which JSON stands between two texts, of which the first has the name."""

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        before, after = self._around(name)
        return f"{before}{to_json(arguments)}{after}"

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str | None:
        before, after = map(grammar.text, self._around(name))
        return f"{before} {grammar.json(parameters)} {after}"

    @abstractmethod
    def _around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""


@dataclass(frozen=True)
class SectionCalls(NamedCalls):
    """Reads a section of calls, each with a marker before its name, another before its arguments, and one at its end.

    DeepSeek V3 writes `function` where others have the name, then the name, and the arguments as a block of code."""

    section: tuple[str, str]
    begins: str
    parts: str
    ends: str
    shape: tuple[str, str]  # what stands before and after the arguments, with NAME for the name

    def _around(self, name: str) -> tuple[str, str]:
        before, after = self.shape
        return before.replace("NAME", name), after

    def read(self, tape: Tape, marker: str) -> Reading[None]:
        if marker == self.section[0]:
            yield from tape.skip()
            yield from tape.expect(self.begins)
        while True:
            yield from self._read_call(tape)
            yield from tape.skip()
            if (yield from tape.take(self.begins, self.section[1])) != self.begins:
                return
            tape.begin_attempt(self.begins)

    def _read_call(self, tape: Tape) -> Reading[None]:
        yield from tape.skip()
        name = yield from tape.name("_.-:")
        yield from tape.skip()
        yield from tape.expect(self.parts)
        yield from tape.skip()
        if (yield from tape.peek()) not in ("{", self.ends[0]):
            name = yield from tape.name()
            yield from tape.skip()
            yield from tape.take("```json")
        yield from _read_arguments(tape, _bare(name), self.ends)
        yield from tape.skip()
        yield from tape.take("```")
        yield from tape.skip()
        yield from tape.take(self.ends)


def _bare(name: str) -> str:
    """Return the name without what Kimi writes around it, `functions.NAME:0`."""
    return name.removeprefix("functions.").partition(":")[0]


@dataclass(frozen=True)
class MistralCalls(NamedCalls):
    """Reads a list of objects, which older models write, or a name, perhaps the call's id, and arguments."""

    older: JsonCalls = _OBJECTS

    def _around(self, name: str) -> tuple[str, str]:
        return f"{name}[ARGS]", ""

    def read(self, tape: Tape, marker: str) -> Reading[None]:
        yield from tape.skip()
        if (yield from tape.peek()) in ("[", "{"):
            yield from self.older.read(tape, marker)
            return
        name = yield from tape.name()
        yield from tape.skip()
        if (yield from tape.take("[CALL_ID]")):
            yield from tape.name()
        yield from tape.take("[ARGS]")
        yield from _read_arguments(tape, name)


@dataclass(frozen=True)
class HarmonyCalls(NamedCalls):
    """Reads a message to a function: `functions.NAME<|message|>{...}<|call|>`, perhaps with a type before the body."""

    def _around(self, name: str) -> tuple[str, str]:
        return f"functions.{name} <|constrain|>json<|message|>", ""

    def rule(self, name: str, parameters: Schema, grammar: GrammarWriter) -> str | None:
        """Return no rule: a grammar holds for answers, and such calls are in a channel of their own."""
        return None

    def read(self, tape: Tape, _: str) -> Reading[None]:
        yield from tape.take("functions.")
        name = yield from tape.name()
        header = yield from tape.text_until("<|message|>")
        if len(header) > _MOST_HEADER or "\n" in header:
            raise NoCall
        tape.begin_call(name)
        yield from tape.until("<|call|>", "<|end|>", pass_on=tape.add)
        tape.end_call()
