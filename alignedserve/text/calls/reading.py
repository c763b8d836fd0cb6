"""Find the tool calls in a model's output while its text arrives.

A call is a JSON object with `name`, and `arguments` or `parameters`, in any order. Formats place calls differently:

    Hermes   <tool_call>{...}</tool_call>, anywhere in the text; Qwen uses this too
    Llama 3  {...}; {...}, and no other text

Arguments are passed on while they are written, once the name is known. A text that looks like a call but is none stays
text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from alignedserve.text.calls.parts import CallPart, CallText

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class _CallObject:
    """The JSON object of one call, read character by character."""

    def __init__(self, index: int) -> None:
        self.raw = ""
        self.name: str | None = None
        self.ended = False
        self._index, self._depth = index, 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # the key whose value is being read, or comes next
        self._member = ""  # the text since the object's own last comma or brace
        self._arguments = ""  # read, but not passed on yet
        self._streams = False  # whether the arguments are an object, whose text is passed on unchanged
        self._begun = False  # whether the name has been passed on

    def feed(self, text: str) -> tuple[str, CallPart | None]:
        """Read the text; return what remains after the object's end, and the call's new part if there is one."""
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
        """Take a character of a key or a value.

        Arguments that are an object are passed on at once, other arguments when they are complete."""
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
    """Finds the calls in one output."""

    def __init__(self, most: int | None = None) -> None:
        """`most` is how many calls are passed on; the calls after them are dropped."""
        self._most = most
        self._num_calls = 0
        self._object: _CallObject | None = None
        self._held = ""

    def feed(self, text: str) -> CallText:
        """Take the text apart; its end may be held back until more text shows what it is."""
        text, self._held = self._held + text, ""
        return sum(self._read(text), CallText())

    def flush(self) -> CallText:
        """Return the held text, when no more text comes."""
        held, self._held = self._held, ""
        if self._object is not None and self._object.name is None:
            held = self._object.raw + held
        self._object = None
        return CallText("" if self._num_calls and not held.strip("; \n") else held)

    @abstractmethod
    def _read(self, text: str) -> Iterator[CallText]:
        """Take the whole text apart; text that must be held back goes to `_held`."""

    def _begin(self) -> None:
        self._object = _CallObject(self._num_calls)

    def _read_object(self, text: str) -> tuple[str, CallText]:
        """Read on in the open object; return the text after it, and what was found in it."""
        call = self._object
        assert call is not None
        rest, part = call.feed(text)
        if call.ended:
            self._object = None
            self._num_calls += call.name is not None
        if call.ended and call.name is None:
            return rest, CallText(call.raw)
        wanted = part is not None and (self._most is None or part.index < self._most)
        return rest, CallText("", (part,) if part is not None and wanted else ())


class HermesCalls(CallReader):
    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._inside = False  # between the two tags

    def _read(self, text: str) -> Iterator[CallText]:
        while text:
            if self._object is not None:
                text, found = self._read_object(text)
            elif self._inside:
                text, found = self._read_inside(text)
            else:
                text, found = self._read_outside(text)
            yield found

    def flush(self) -> CallText:
        if self._inside and self._object is None:
            self._held = ""  # the beginning of the closing tag
        return super().flush()

    def _read_outside(self, text: str) -> tuple[str, CallText]:
        before, tag, after = text.partition(_OPEN)
        if tag:
            self._inside = True
            return after, self._plain(before)
        self._held = _tag_beginning(text, _OPEN)
        if not self._held and self._num_calls and not text.strip():
            self._held = text  # white space that may stand between two calls
        return "", self._plain(text[: len(text) - len(self._held)])

    def _read_inside(self, text: str) -> tuple[str, CallText]:
        """Read between the tags, up to the object's brace or past the closing tag."""
        if (stripped := text.lstrip()).startswith("{"):
            self._begin()
            return stripped, CallText()
        if not stripped:
            self._held = text
            return "", CallText()
        before, tag, after = text.partition(_CLOSE)
        if tag:
            self._inside = False
            return after, CallText(before if before.strip() else "")
        self._held = _tag_beginning(text, _CLOSE)
        seen = text[: len(text) - len(self._held)]
        return "", CallText(seen if seen.strip() else "")

    def _plain(self, text: str) -> CallText:
        """Return the text, but drop white space between calls, which is not part of the answer."""
        return CallText("" if self._num_calls and not text.strip() else text)


class Llama3Calls(CallReader):
    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._is_text = False  # whether all that follows is plain text

    def _read(self, text: str) -> Iterator[CallText]:
        while text:
            if self._is_text:
                yield CallText(text)
                return
            if self._object is not None:
                text, found = self._read_object(text)
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


def _tag_beginning(text: str, tag: str) -> str:
    """Return the longest end of the text that may be the beginning of the tag."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((text[-length:] for length in lengths if tag.startswith(text[-length:])), "")
