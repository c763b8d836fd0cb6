"""Part an output's text into its reasoning and its answer while it arrives.

    OPEN ── start marker ──▶ REASONING ── end marker ──▶ ANSWER
    OPEN ── any other text ─────────────────────────────▶ ANSWER

Markers and the white space beside them belong to neither. Text that may begin a marker is held back until it is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from alignedserve.text.calls.scanning import find_first, num_unsettled


class ReasoningPhase(Enum):
    OPEN = "open"  # it is not known yet whether the output begins with reasoning
    REASONING = "reasoning"
    ASIDE = "aside"  # a part that is neither, such as a call in a channel of its own
    ANSWER = "answer"


@dataclass(frozen=True)
class SplitText:
    """A new part of the reasoning, and of the text that is left for the answer and its calls."""

    reasoning: str = ""
    text: str = ""

    def __add__(self, other: SplitText) -> SplitText:
        return SplitText(self.reasoning + other.reasoning, self.text + other.text)


class Splitter(ABC):
    """Parts one output. Equal text gives equal parts, however it is cut into pieces."""

    phase: ReasoningPhase

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> SplitText:
        """Part the text; its end may be held back until more text shows what it is."""
        text, self._held = self._held + text, ""
        return sum(self._read(text), SplitText())

    def flush(self) -> SplitText:
        """Return the held text, when no more text comes."""
        held, self._held = self._held, ""
        return self._last(held)

    @abstractmethod
    def _read(self, text: str) -> Iterator[SplitText]:
        """Part the whole text; text that must be held back goes to `_held`."""

    @abstractmethod
    def _last(self, held: str) -> SplitText:
        """Part the held text, which no other text follows."""


class MarkedSplitter(Splitter):
    """Parts an output whose reasoning comes first, between two markers."""

    def __init__(
        self, starts: Sequence[str], ends: Sequence[str], calls: Sequence[str], dropped: Sequence[str], inside: bool
    ) -> None:
        """`starts` and `ends` are the markers. A text of `calls` begins a call: it ends the reasoning too, and is left
        in the text. `dropped` are texts around the answer.

        `inside`: the output begins within the reasoning, since the prompt ends with the start marker."""
        super().__init__()
        self.phase = ReasoningPhase.REASONING if inside else ReasoningPhase.OPEN
        self._starts, self._ends, self._calls, self._dropped = starts, ends, calls, dropped
        self._leads = inside  # whether nothing of this phase has been seen yet but white space

    def _read(self, text: str) -> Iterator[SplitText]:
        read = {
            ReasoningPhase.OPEN: self._read_open,
            ReasoningPhase.REASONING: self._read_reasoning,
            ReasoningPhase.ANSWER: self._read_answer,
        }
        while text:
            text, found = read[self.phase](text)
            yield found

    def _last(self, held: str) -> SplitText:
        if self.phase is ReasoningPhase.REASONING:
            return SplitText(held.rstrip(), "")
        pieces = []
        while self.phase is ReasoningPhase.ANSWER and (found := find_first(held, self._dropped, is_whole=True)):
            at, marker = found
            pieces.append(held[:at].rstrip())
            held = held[at + len(marker) :]
        return SplitText("", "".join([*pieces, held]))

    def _enter(self, phase: ReasoningPhase) -> None:
        self.phase, self._leads = phase, True

    def _read_open(self, text: str) -> tuple[str, SplitText]:
        known = (*self._starts, *self._ends)
        stripped = text.lstrip()
        if (marker := _beginning(stripped, known)) is not None:
            self._enter(ReasoningPhase.REASONING if marker in self._starts else ReasoningPhase.ANSWER)
            return stripped[len(marker) :], SplitText()
        if any(marker.startswith(stripped) for marker in known):
            self._held = text
            return "", SplitText()
        self._enter(ReasoningPhase.ANSWER)
        self._leads = False
        return text, SplitText()

    def _read_reasoning(self, text: str) -> tuple[str, SplitText]:
        if self._leads:
            text = text.lstrip()
            if (marker := _beginning(text, self._starts)) is not None:  # said again after the prompt's own
                return text[len(marker) :], SplitText()
            if any(marker.startswith(text) for marker in self._starts):
                self._held = text
                return "", SplitText()
            self._leads = False
        watched = (*self._ends, *self._calls)
        if (found := find_first(text, watched)) is not None:
            at, marker = found
            self._enter(ReasoningPhase.ANSWER)
            after = text[at:] if marker in self._calls else text[at + len(marker) :]
            return after, SplitText(text[:at].rstrip(), "")
        return "", SplitText(self._hold(text, watched), "")

    def _read_answer(self, text: str) -> tuple[str, SplitText]:
        if self._leads:
            text = text.lstrip()
        if (found := find_first(text, self._dropped)) is not None:
            at, marker = found
            self._leads = self._leads and not text[:at]
            return text[at + len(marker) :], SplitText("", text[:at].rstrip())
        settled = self._hold(text, self._dropped) if self._dropped else text
        self._leads = self._leads and not settled
        return "", SplitText("", settled)

    def _hold(self, text: str, markers: Sequence[str]) -> str:
        """Hold back what may begin a marker and the white space before it; return the text before that."""
        settled = text[: len(text) - num_unsettled(text, markers)].rstrip()
        self._held = text[len(settled) :]
        return settled


def _beginning(text: str, markers: Iterable[str]) -> str | None:
    """Return the marker with which the text begins, or None."""
    return next((marker for marker in markers if text.startswith(marker)), None)
