"""Calls of tools in what a model writes, found as the text comes.

A call is a JSON object with `name`, and `arguments` or `parameters`, in any order. Where calls stand differs:

    Hermes   <tool_call>{...}</tool_call>, anywhere in the text: Qwen's way too
    Llama 3  {...}; {...}, and nothing else

Arguments are handed on as they are written, once the name is known. What looks like a call and is none, is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import uuid4

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class CallFormat(str, Enum):
    HERMES = "hermes"
    LLAMA3 = "llama3"


@dataclass(frozen=True)
class CallPart:
    """What is new of a call: its beginning has an id and a name, what follows has more of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Found:
    """In some text: what is no call, and what is."""

    text: str = ""
    parts: tuple[CallPart, ...] = ()

    def __add__(self, other: Found) -> Found:
        return Found(self.text + other.text, joined_parts([*self.parts, *other.parts]))


def joined_parts(parts: list[CallPart]) -> tuple[CallPart, ...]:
    """One part for each call, in their order."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        before = whole.get(part.index)
        if before is not None:
            part = CallPart(part.index, before.arguments + part.arguments, before.id, before.name)
        whole[part.index] = part
    return tuple(whole.values())


class _Object:
    """The JSON object of one call, character by character."""

    def __init__(self, index: int) -> None:
        self.raw = ""
        self.name: str | None = None
        self.ended = False
        self._index, self._depth = index, 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that comes or is there
        self._member = ""  # since the last comma or brace of the object itself
        self._arguments = ""  # not handed on yet
        self._streams = False  # whether they are an object, whose text is handed on as it is
        self._begun = False  # whether the name has been handed on

    def feed(self, text: str) -> tuple[str, CallPart | None]:
        """What is left once the object has ended, and what is new of the call."""
        for used, character in enumerate(text, 1):
            self.raw += character
            self._read(character)
            if self.ended:
                return text[used:], self._part()
        return "", self._part()

    def _read(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif character in "]}":
            self._depth -= 1
            self.ended = self._depth == 0
        if self._depth <= 1 and not self._in_string:
            if character == ":" and self._key is None:
                self._key, self._member = _value(self._member), ""
                return
            if character == "," or self.ended:
                self._end_member()
                return
        self._take(character)

    def _take(self, character: str) -> None:
        """Of a key or a value. Arguments that are an object are handed on at once, others when they have ended."""
        if self._streams:
            self._arguments += character
            return
        self._member += character
        if self._key in _ARGUMENTS and self._member.lstrip() == "{":
            self._streams, self._arguments = True, "{"

    def _end_member(self) -> None:
        key, self._key = self._key, None
        member, self._member = self._member.strip(), ""
        streamed, self._streams = self._streams, False
        value = _value(member)
        if key == "name" and isinstance(value, str):
            self.name = value
        elif key in _ARGUMENTS and not streamed:
            self._arguments = value if isinstance(value, str) else "{}" if value is None else member

    def _part(self) -> CallPart | None:
        if self.name is None or (self._begun and not self._arguments):
            return None
        arguments, self._arguments = self._arguments, ""
        begun, self._begun = self._begun, True
        if begun:
            return CallPart(self._index, arguments)
        return CallPart(self._index, arguments, f"call_{uuid4().hex[:24]}", self.name)


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return None


class CallReader(ABC):
    """Of one output."""

    def __init__(self, most: int | None = None) -> None:
        """Of more than `most` calls, the others are left out."""
        self._most = most
        self._num_calls = 0
        self._object: _Object | None = None
        self._held = ""

    def feed(self, text: str) -> Found:
        """What the text brings; some may be held back until it is clear what it is."""
        text, self._held = self._held + text, ""
        found = Found()
        for one in self._read(text):
            found += one
        return found

    def flush(self) -> Found:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        if self._object is not None and self._object.name is None:
            held = self._object.raw + held
        self._object = None
        return Found("" if self._num_calls and not held.strip("; \n") else held)

    @abstractmethod
    def _read(self, text: str) -> Iterator[Found]:
        """All of the text; what is to be held back goes to `_held`."""

    def _begin(self) -> None:
        self._object = _Object(self._num_calls)

    def _in_object(self, text: str) -> tuple[str, Found]:
        """What follows the object, and what is found in it."""
        one = self._object
        assert one is not None
        rest, part = one.feed(text)
        if one.ended:
            self._object = None
            self._num_calls += one.name is not None
        if one.ended and one.name is None:
            return rest, Found(one.raw)
        wanted = part is not None and (self._most is None or part.index < self._most)
        return rest, Found("", (part,) if part is not None and wanted else ())


class HermesCalls(CallReader):
    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._inside = False  # between the two tags

    def _read(self, text: str) -> Iterator[Found]:
        while text:
            if self._object is not None:
                text, found = self._in_object(text)
                yield found
            else:
                text, found = self._between(text) if self._inside else self._outside(text)
                yield found

    def flush(self) -> Found:
        if self._inside and self._object is None:
            self._held = ""  # of the tag that closes
        return super().flush()

    def _outside(self, text: str) -> tuple[str, Found]:
        before, tag, after = text.partition(_OPEN)
        if tag:
            self._inside = True
            return after, self._plain(before)
        self._held = _begun(text, _OPEN)
        if not self._held and self._num_calls and not text.strip():
            self._held = text  # between two calls, as it seems
        return "", self._plain(text[: len(text) - len(self._held)])

    def _between(self, text: str) -> tuple[str, Found]:
        """The tags: to the object's brace, or behind the tag that closes."""
        if (stripped := text.lstrip()).startswith("{"):
            self._begin()
            return stripped, Found()
        if not stripped:
            self._held = text
            return "", Found()
        before, tag, after = text.partition(_CLOSE)
        if tag:
            self._inside = False
            return after, Found(before if before.strip() else "")
        self._held = _begun(text, _CLOSE)
        seen = text[: len(text) - len(self._held)]
        return "", Found(seen if seen.strip() else "")

    def _plain(self, text: str) -> Found:
        """White space between calls is not part of the answer."""
        return Found("" if self._num_calls and not text.strip() else text)


class Llama3Calls(CallReader):
    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._is_text = False  # no call comes any more

    def _read(self, text: str) -> Iterator[Found]:
        while text:
            if self._is_text:
                yield Found(text)
                return
            if self._object is not None:
                text, found = self._in_object(text)
                self._is_text = bool(found.text)
                yield found
                continue
            before = text.lstrip("; \n" if self._num_calls else " \n")
            if not before:
                self._held = text
                return
            if before.startswith("{"):
                self._begin()
                text = before
            else:
                self._is_text = True


def _begun(text: str, tag: str) -> str:
    """The end of the text with which a tag begins."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((text[-length:] for length in lengths if tag.startswith(text[-length:])), "")


READERS: dict[CallFormat, Callable[[int | None], CallReader]] = {
    CallFormat.HERMES: HermesCalls,
    CallFormat.LLAMA3: Llama3Calls,
}


def format_of(template: str) -> CallFormat | None:
    """In which a model calls, as its chat template shows earlier calls to it; None where it is none of these."""
    if _OPEN in template and "<function=" not in template:
        return CallFormat.HERMES
    if "tool_calls" in template and '"parameters"' in template:
        return CallFormat.LLAMA3
    return None
