"""Read the text of one output while it arrives: the scanner of such a text, and the reader of the calls in it.

A generator takes text from its scanner, and waits (`yield`) where it needs more. A layout reads calls so. Text that was
taken for the beginning of a call is remembered until the call's name is known:

    See: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    said ^attempt          ^ the call begins: from here on nothing is text again

If it turns out to be no call (`NoCall`), all of the attempt is said as text, and is not read a second time: so the work
is linear in the length of an output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from alignedserve.text.calls.values import Schema

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


class CallText(NamedTuple):
    """A piece of output taken apart: its plain text, and the parts of calls in it."""

    text: str
    parts: tuple[CallPart, ...]


def join_parts(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
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
    ends = (text[-length:] for length in range(longest, 0, -1))
    return next((len(end) for end in ends if any(end != mark and mark.startswith(end) for mark in marks)), 0)


class NoCall(Exception):
    """The text is no call of this format."""


class Enough(Exception):
    """As many calls have been found as were wanted."""


class Scanner(ABC):
    def __init__(self) -> None:
        self._text, self._at, self._has_ended = "", 0, False
        self._attempt: int | None = None  # where the text begins that may still turn out to be something else
        self._reading = self._read()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the output from its start."""

    def _advance(self, text: str, has_ended: bool = False) -> None:
        """Read on with more text, and stop where only later text can tell how to go on."""
        start = self._at if self._attempt is None else self._attempt
        self._text, self._at, self._has_ended = self._text[start:] + text, self._at - start, has_ended
        self._attempt = None if self._attempt is None else 0
        next(self._reading, None)

    def _wait(self) -> Reading[bool]:
        """Wait for more text; return whether more has come."""
        if not self._has_ended:
            yield
        return not self._has_ended

    def peek(self) -> Reading[str]:
        """Return the next character, or nothing at the end."""
        while self._at >= len(self._text) and (yield from self._wait()):
            pass
        return self._text[self._at : self._at + 1]

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
            if not is_open or not (yield from self._wait()):
                break
        found = max((marker for marker in markers if ahead.startswith(marker)), key=len, default="")
        self._at += len(found)
        return found

    def until(self, *markers: str, pass_on: Callable[[str], None]) -> Reading[str]:
        """Pass the text on up to the first marker; take that, and return it. Return nothing at the end of the text."""
        is_whole = False
        while (found := find_first(self._text, markers, self._at, is_whole)) is None and not is_whole:
            self._pass(len(self._text) - num_unsettled(self._text, markers, self._at), pass_on)
            is_whole = not (yield from self._wait())
        at, marker = found or (len(self._text), "")
        self._pass(at, pass_on)
        self._at += len(marker)
        return marker

    def _pass(self, end: int, pass_on: Callable[[str], None]) -> None:
        if end > self._at:
            pass_on(self._text[self._at : end])
            self._at = end


class ReadLayout(Protocol):
    """How the calls of a format are read (layouts.py)."""

    def read(self, reader: CallReader, marker: str) -> Reading[None]: ...


class ReadFormat(Protocol):
    """What the reader of calls needs of their format (formats.py)."""

    @property
    def openings(self) -> Sequence[str]: ...

    @property
    def begins_answer(self) -> bool: ...

    @property
    def layout(self) -> ReadLayout: ...

    def make_id(self) -> str: ...


class CallReader(Scanner):
    """Reads one output. Equal text gives equal calls and equal text, however it is cut into pieces."""

    def __init__(
        self, form: ReadFormat, tools: Mapping[str, Schema], most: int | None = None, hidden: Sequence[str] = ()
    ) -> None:
        """`tools` maps the names of functions to the schemas of their parameters. After `most` calls nothing follows,
        nor does a call that repeats an earlier one: it is left out, and the answer ends.

        `hidden` are markers that are special tokens: no text shows them."""
        super().__init__()
        self._form, self.tools, self._most, self._hidden = form, tools, most, tuple(hidden)
        self.is_over = False  # whether as many calls have been found as were wanted
        self._texts: list[str] = []
        self._parts: list[CallPart] = []
        self._blank = ""  # white space that may stand beside a call, where it is no part of the text
        self._speaks = False  # whether text has been said since the last call
        self._num_calls, self._has_arguments = 0, False
        self._written, self._num_written = list[str](), 0  # the call that is read: its name and its arguments
        self._whole: list[str] = []  # the calls before it, where they count
        self._repeated: list[str] = []  # those of them that begin as it does; its parts are held back meanwhile
        self._held: list[CallPart] = []

    def feed(self, text: str) -> CallText:
        """Take the text apart; its end may be held back until more text shows what it is."""
        self._advance(text)
        return self._take_found()

    def flush(self) -> CallText:
        """Return the held text, when no more text comes."""
        self._advance("", has_ended=True)
        if not self._num_calls:
            self._texts.append(self._blank)
            self._blank = ""
        return self._take_found()

    def _take_found(self) -> CallText:
        found = CallText("".join(self._texts), join_parts(self._parts))
        self._texts, self._parts = [], []
        return found

    def _read(self) -> Reading[None]:
        try:
            if self._form.begins_answer:
                yield from self._try_calls("")
            while marker := (yield from self.say_until(*self._form.openings)):
                yield from self._try_calls(marker)
        except Enough:
            self.is_over = True

    def _try_calls(self, marker: str) -> Reading[None]:
        self.begin_attempt(marker)
        try:
            yield from self._form.layout.read(self, marker)
        except NoCall:
            if self._attempt is None and not (self._has_arguments or self._has_ended):  # a call has begun
                self.add("{}")
        if self._attempt is not None:  # no call has begun since the attempt began
            start, self._attempt = self._attempt, None
            self.say(self._text[start : self._at])

    # --- Taking text

    def accept(self, *markers: str) -> Reading[str]:
        """Skip white space, then take a marker as `take` does."""
        yield from self.skip()
        return (yield from self.take(*markers))

    def expect(self, *markers: str) -> Reading[str]:
        """Skip white space, then take a marker, which must be there."""
        if not (found := (yield from self.accept(*markers))):
            raise NoCall
        return found

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
        """Pass one value on while it arrives.

        A JSON value ends after its closing bracket or quote, or before a comma, a bracket or white space where it has
        none. A Python argument ends before the comma or the bracket that follows it."""
        quotes, follows = ("\"'", ",)]}") if in_python else ('"', ",]} \t\r\n")
        closes = not in_python and (yield from self.peek()) in '"{['  # with a bracket or a quote of its own
        quote, is_escaped, depth = "", False, 0
        while True:
            for at in range(self._at, len(self._text)):
                character = self._text[at]
                if not closes and not quote and not depth and character in follows:
                    return self._pass(at, pass_on)
                if quote:
                    if not is_escaped and character == quote:
                        quote = ""
                    is_escaped = not is_escaped and character == "\\"
                elif not closes and not in_python:
                    continue
                elif character in quotes:
                    quote = character
                elif character in "([{":
                    depth += 1
                elif character in ")]}":
                    depth -= 1
                if closes and not quote and not depth:
                    return self._pass(at + 1, pass_on)
            self._pass(len(self._text), pass_on)
            if not (yield from self._wait()):
                raise NoCall

    def json_text(self) -> Reading[str]:
        """Take one JSON value, and return its text."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    # --- Attempts, calls and text

    def begin_attempt(self, marker: str = "") -> None:
        """Remember the text from here on, and the marker that was just taken, unless an attempt is open."""
        if self._attempt is None:
            self._attempt = self._at - len(marker)

    def begin_call(self, name: str) -> None:
        self._attempt, self._blank, self._speaks, self._has_arguments = None, "", False, False
        self._written, self._num_written, self._repeated, self._held = [], 0, self._whole, []
        self._hold(CallPart(self._num_calls, "", self._form.make_id(), name), f"{name}\n")
        self._num_calls += 1

    def add(self, arguments: str) -> None:
        self._has_arguments = True
        self._hold(CallPart(self._num_calls - 1, arguments), arguments)

    def _hold(self, part: CallPart, written: str) -> None:
        """Take a part of a call, and pass it on as soon as the call differs from all before it."""
        self._repeated = [call for call in self._repeated if call.startswith(written, self._num_written)]
        self._written.append(written)
        self._num_written += len(written)
        self._held.append(part)
        if not self._repeated:
            self._pass_call_on()

    def _pass_call_on(self) -> None:
        self._parts += self._held
        self._held = []

    def end_call(self) -> None:
        if not self._has_arguments:
            self.add("{}")
        if (written := "".join(self._written)) in self._repeated:
            raise Enough
        self._pass_call_on()
        if self._num_calls == self._most:
            raise Enough
        if self._most is not None:
            self._whole.append(written)

    def say(self, text: str) -> None:
        """Pass on text, without special tokens, and without white space that only parts a call from what is around."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        if not self._speaks and not text.strip():
            self._blank += text
            return
        self._texts.append(self._blank + text)
        self._blank, self._speaks = "", True
