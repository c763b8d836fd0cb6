"""The text of one output while it arrives, and what readers of calls have found in it.

A reader of a format is a generator that takes text off the tape, and waits (`yield`) where it needs more of it. Text
that it has taken for the beginning of a call is remembered until the call's name is known:

    See: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    said ^attempt          ^ the call begins: from here on nothing is text again

If it turns out to be no call (`NoCall`), all of the attempt is said as text, and is not read a second time: so the work
is linear in the length of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Schema: TypeAlias = Mapping[str, Any]
T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
_MOST_NAME = 256  # characters of a function's name


@dataclass(frozen=True)
class CallPart:
    """The new part of a call: the first part has its id and name, later parts add to its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class CallText:
    """A piece of output taken apart: its plain text, and the parts of calls in it."""

    text: str = ""
    parts: tuple[CallPart, ...] = ()

    def __add__(self, other: CallText) -> CallText:
        return CallText(self.text + other.text, join_parts([*self.parts, *other.parts]))


def join_parts(parts: list[CallPart]) -> tuple[CallPart, ...]:
    """Return one part for each call, in the order of the calls."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        before = whole.get(part.index)
        if before is not None:
            part = CallPart(part.index, before.arguments + part.arguments, before.id, before.name)
        whole[part.index] = part
    return tuple(whole.values())


def find_first(text: str, markers: Iterable[str], start: int = 0, is_whole: bool = False) -> tuple[int, str] | None:
    """Return where the first marker stands and which it is, the longest of several.

    Return None if there is none, or if more text may make a longer one of it. `is_whole`: no more text comes."""
    marks = tuple(markers)
    found = [(at, -len(marker), marker) for marker in marks if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return (at, marker) if is_whole or at < len(text) - num_unsettled(text, marks, start) else None


def num_unsettled(text: str, markers: Iterable[str], start: int = 0) -> int:
    """Return how many characters at the end of the text, from `start` on, may begin a marker."""
    marks = tuple(markers)
    longest = min(max(map(len, marks), default=1) - 1, len(text) - start)
    return next((length for length in range(longest, 0, -1) if _begins(text[-length:], marks)), 0)


def _begins(end: str, markers: Iterable[str]) -> bool:
    return any(len(end) < len(marker) and marker.startswith(end) for marker in markers)


class ValueEnd:
    """Finds the end of one value. Each text continues the text before.

    A JSON value ends after its closing bracket or quote, or before a comma, a bracket or white space where it has none.
    A Python argument ends before the comma or the bracket that follows it."""

    def __init__(self, in_python: bool = False) -> None:
        self._quotes, self._follows = ("\"'", ",)]}") if in_python else ('"', ",]} \t\r\n")
        self._encloses = False if in_python else None  # whether the value has a closing bracket or quote of its own
        self._in_python, self._quote, self._escaped, self._depth = in_python, "", False, 0

    def find(self, text: str, start: int) -> int | None:
        """Return where the value ends, which has not ended before `start`; None if it goes on after the text."""
        for at in range(start, len(text)):
            character = text[at]
            if self._encloses is None:
                self._encloses = character in '"{['
            if not self._encloses and not self._quote and not self._depth and character in self._follows:
                return at
            if self._encloses or self._in_python:
                self._follow(character)
            if self._encloses and not self._quote and not self._depth:
                return at + 1
        return None

    def _follow(self, character: str) -> None:
        """Follow strings and brackets."""
        if self._quote:
            if not self._escaped and character == self._quote:
                self._quote = ""
            self._escaped = not self._escaped and character == "\\"
        elif character in self._quotes:
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1


class NoCall(Exception):
    """The text is no call of this format."""


class Enough(Exception):
    """As many calls have been found as were wanted."""


class Tape:
    def __init__(
        self,
        tools: Mapping[str, Schema],
        make_id: Callable[[], str],
        most: int | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        """`tools` maps the names of functions to the schemas of their parameters.

        `most` is how many calls are wanted. `hidden` are special tokens, which are no part of a text."""
        self.tools = tools
        self._make_id, self._most, self._hidden = make_id, most, tuple(hidden)
        self._text, self._at, self._num_arrived, self._ended = "", 0, 0, False
        self._attempt: int | None = None  # where the text begins that may still turn out to be no call
        self._texts: list[str] = []
        self._parts: list[CallPart] = []
        self._blank = ""  # white space that may stand beside a call, where it is no part of the text
        self._speaks = False  # whether text has been said since the last call
        self._num_calls, self._has_arguments = 0, False

    # --- What arrives, and what was found

    def feed(self, text: str) -> None:
        start = self._at if self._attempt is None else self._attempt
        self._text, self._at = self._text[start:] + text, self._at - start
        self._attempt = None if self._attempt is None else 0
        self._num_arrived += len(text)

    def end(self) -> None:
        """Learn that no more text comes."""
        self._ended = True

    def take_found(self) -> CallText:
        """Return what was found since this was asked last."""
        if self._ended and not self._num_calls:
            self._texts.append(self._blank)
            self._blank = ""
        found = CallText("".join(self._texts), join_parts(self._parts))
        self._texts, self._parts = [], []
        return found

    # --- Taking text

    def wait(self) -> Reading[bool]:
        """Wait for more text; return whether more has come."""
        before = self._num_arrived
        while self._num_arrived == before and not self._ended:
            yield
        return self._num_arrived > before

    def peek(self) -> Reading[str]:
        """Return the next character, or nothing at the end."""
        while self._at >= len(self._text):
            if not (yield from self.wait()):
                return ""
        return self._text[self._at]

    def skip(self, characters: str = " \t\r\n") -> Reading[str]:
        """Skip white space; return the next character, or nothing at the end."""
        while (next_one := (yield from self.peek())) and next_one in characters:
            self._at += 1
        return next_one

    def take(self, *markers: str) -> Reading[str]:
        """Take the longest marker with which the text goes on, and return it; return nothing if there is none."""
        longest = max(map(len, markers))
        while True:
            ahead = self._text[self._at : self._at + longest]
            is_open = any(len(ahead) < len(marker) and marker.startswith(ahead) for marker in markers)
            if not is_open or not (yield from self.wait()):
                break
        found = max((marker for marker in markers if ahead.startswith(marker)), key=len, default="")
        self._at += len(found)
        return found

    def accept(self, *markers: str) -> Reading[str]:
        """Skip white space, then take a marker as `take` does."""
        yield from self.skip()
        return (yield from self.take(*markers))

    def expect(self, *markers: str) -> Reading[str]:
        """Skip white space, then take a marker, which must be there."""
        if not (found := (yield from self.accept(*markers))):
            raise NoCall
        return found

    def until(self, *markers: str, pass_on: Callable[[str], None]) -> Reading[str]:
        """Pass the text on up to the first marker; take that, and return it. Return nothing at the end of the text."""
        is_whole = False
        while (found := find_first(self._text, markers, self._at, is_whole)) is None and not is_whole:
            self._pass(len(self._text) - num_unsettled(self._text, markers, self._at), pass_on)
            is_whole = not (yield from self.wait())
        at, marker = found or (len(self._text), "")
        self._pass(at, pass_on)
        self._at += len(marker)
        return marker

    def say_until(self, *markers: str) -> Reading[str]:
        """Say the text up to the first marker; take that, and return it. Return nothing at the end of the text."""
        while (found := (yield from self.until(*markers, *self._hidden, pass_on=self.say))) not in (*markers, ""):
            pass
        return found

    def text_until(self, *markers: str) -> Reading[str]:
        """Take the text up to the first of the markers, and that too; return the text."""
        pieces: list[str] = []
        if not (yield from self.until(*markers, pass_on=pieces.append)):
            raise NoCall
        return "".join(pieces)

    def name(self, more: str = "_.-") -> Reading[str]:
        """Take the name of a function."""
        name = ""
        while (next_one := (yield from self.peek())) and (next_one.isalnum() or next_one in more):
            name += next_one
            self._at += 1
        if not 0 < len(name) <= _MOST_NAME:
            raise NoCall
        return name

    def value(self, pass_on: Callable[[str], None], in_python: bool = False) -> Reading[None]:
        """Pass one value on while it arrives."""
        end = ValueEnd(in_python)
        while True:
            at = end.find(self._text, self._at)
            self._pass(len(self._text) if at is None else at, pass_on)
            if at is not None:
                return
            if not (yield from self.wait()):
                raise NoCall

    def json_text(self) -> Reading[str]:
        """Take one JSON value, and return its text."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    def _pass(self, end: int, pass_on: Callable[[str], None]) -> None:
        if end > self._at:
            pass_on(self._text[self._at : end])
            self._at = end

    # --- Attempts, calls and text

    def begin_attempt(self, marker: str = "") -> None:
        """Remember the text from here on, and the marker that was just taken, unless an attempt is open."""
        if self._attempt is None:
            self._attempt = self._at - len(marker)

    def end_attempt(self) -> None:
        """Say what was read since the attempt began, unless a call has begun."""
        if self._attempt is not None:
            start, self._attempt = self._attempt, None
            self.say(self._text[start : self._at])

    def begin_call(self, name: str) -> None:
        self._attempt, self._blank, self._speaks, self._has_arguments = None, "", False, False
        self._parts.append(CallPart(self._num_calls, "", self._make_id(), name))
        self._num_calls += 1

    def add(self, arguments: str) -> None:
        self._has_arguments = True
        self._parts.append(CallPart(self._num_calls - 1, arguments))

    def end_call(self) -> None:
        if not self._has_arguments:
            self.add("{}")
        if self._num_calls == self._most:
            raise Enough

    def say(self, text: str) -> None:
        """Pass on text, without special tokens, and without white space that only parts a call from what is around."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        if not self._speaks and not text.strip():
            self._blank += text
            return
        self._texts.append(self._blank + text)
        self._blank, self._speaks = "", True
