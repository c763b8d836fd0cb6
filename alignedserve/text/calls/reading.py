"""Find the tool calls of one output while its text arrives, in the format of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from alignedserve.text.calls.formats import CallFormat
from alignedserve.text.calls.grammar import Schema
from alignedserve.text.calls.parts import CallText
from alignedserve.text.calls.tape import Enough, NoCall, Reading, Tape


class CallReader:
    """Reads one output. Equal text gives equal calls and equal text, however it is cut into pieces."""

    def __init__(
        self,
        form: CallFormat,
        tools: Mapping[str, Schema],
        most: int | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        """`tools` maps the names of functions to the schemas of their parameters. After `most` calls nothing follows.

        `hidden` are markers that are special tokens: no text shows them."""
        self._form, self._tape = form, Tape(tools, form.make_id, most, hidden)
        self.ends_answer = most is not None  # whether the answer ends with the calls that are wanted
        self._reading = self._read()
        self.is_over = False  # whether as many calls have been found as were wanted
        self._advance()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must be seen even if they are special tokens."""
        return self._form.markers

    def feed(self, text: str) -> CallText:
        """Take the text apart; its end may be held back until more text shows what it is."""
        self._tape.feed(text)
        return self._advance()

    def flush(self) -> CallText:
        """Return the held text, when no more text comes."""
        self._tape.end()
        return self._advance()

    def _advance(self) -> CallText:
        if not self.is_over:
            try:
                next(self._reading, None)
            except Enough:
                self.is_over = True
        return self._tape.take_found()

    def _read(self) -> Reading[None]:
        if self._form.begins_answer:
            yield from self._attempt("")
        while marker := (yield from self._tape.say_until(*self._form.openings)):
            yield from self._attempt(marker)

    def _attempt(self, marker: str) -> Reading[None]:
        self._tape.begin_attempt(marker)
        with suppress(NoCall):
            yield from self._form.layout.read(self._tape, marker)
        self._tape.end_attempt()
