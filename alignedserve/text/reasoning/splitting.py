"""Part an output's text into its reasoning and its answer while it arrives.

    OPEN ── start marker ──▶ REASONING ── end marker ──▶ ANSWER
    OPEN ── any other text ─────────────────────────────▶ ANSWER

Markers and the white space beside them belong to neither. Text that may begin a marker is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from alignedserve.text.calls.scanning import Reading, Scanner


class ReasoningPhase(Enum):
    OPEN = "open"  # it is not known yet whether the output begins with reasoning
    REASONING = "reasoning"
    ASIDE = "aside"  # a part that is neither, such as a call in a channel of its own
    ANSWER = "answer"


class SplitText(NamedTuple):
    """A new part of the reasoning, and of the text that is left for the answer and its calls."""

    reasoning: str
    text: str


class Splitter(Scanner):
    """Parts one output. Equal text gives equal parts, however it is cut into pieces."""

    def __init__(self, inside: bool) -> None:
        """`inside`: the output begins within the reasoning, since the prompt ends with the start marker."""
        super().__init__()
        self.phase = ReasoningPhase.REASONING if inside else ReasoningPhase.OPEN
        self._reasoning = self._text_left = ""  # that have been found, and not been returned

    def feed(self, text: str) -> SplitText:
        """Part the text; its end may be held back until more text shows what it is."""
        return self._part(text)

    def flush(self) -> SplitText:
        """Return the held text, when no more text comes."""
        return self._part("", has_ended=True)

    def _part(self, text: str, has_ended: bool = False) -> SplitText:
        self._reasoning = self._text_left = ""
        self._advance(text, has_ended)
        return SplitText(self._reasoning, self._text_left)


class MarkedSplitter(Splitter):
    """Parts an output whose reasoning comes first, between two markers."""

    def __init__(
        self, starts: Sequence[str], ends: Sequence[str], calls: Sequence[str], dropped: Sequence[str], inside: bool
    ) -> None:
        """`starts` and `ends` are the markers. A text of `calls` begins a call: it ends the reasoning too, and is left
        in the text. `dropped` are texts around the answer."""
        super().__init__(inside)
        self._starts, self._ends, self._calls, self._dropped = starts, ends, calls, dropped
        self._blank = ""  # white space that is left out where a marker follows
        self._leads = True  # whether the answer may have no white space yet

    def _read(self) -> Reading[None]:
        if self.phase is ReasoningPhase.OPEN:
            self._attempt = self._at
            yield from self._skip_space()
            marker = yield from self.take(*self._starts, *self._ends)
            if not marker:
                self._at, self._leads = self._attempt, False
            self._attempt = None
            self.phase = ReasoningPhase.REASONING if marker in self._starts else ReasoningPhase.ANSWER
        if self.phase is ReasoningPhase.REASONING:
            yield from self._skip_space()
            while (yield from self.take(*self._starts)):  # said again after the prompt's own
                yield from self._skip_space()
            marker = yield from self.until(*self._ends, *self._calls, pass_on=self._reason)
            if not marker:
                return
            self.phase, self._blank = ReasoningPhase.ANSWER, ""
            if marker in self._calls:
                self._at -= len(marker)
        marker = " "
        while marker:
            self._blank = ""
            if self._leads:
                yield from self._skip_space()
            marker = yield from self.until(*self._dropped, pass_on=self._answer)
        self._text_left += self._blank

    def _skip_space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self._at += 1

    def _reason(self, text: str) -> None:
        self._reasoning += self._settle(text)

    def _answer(self, text: str) -> None:
        self._leads = False
        self._text_left += self._settle(text) if self._dropped else text

    def _settle(self, text: str) -> str:
        """Return the text with the white space that was held back before it, and hold back what it ends with."""
        settled = (self._blank + text).rstrip()
        self._blank = (self._blank + text)[len(settled) :]
        return settled
