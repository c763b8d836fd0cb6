"""Decode an output's tokens to text on arrival, and cut the text at the stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from alignedserve.text.calls.scanning import num_unsettled

_UNKNOWN = "\ufffd"  # stands in decoded text for bytes that are not a character, or not yet


class IncrementalDecoder:
    """Decodes tokens piece by piece, so that the pieces together equal the text of all tokens decoded at once.

    A token may end inside a character, and the text of a token may depend on the token before it. So a window of the
    last tokens is decoded again with each new token, and the text that the window gave before is cut off:

        window   [ context | new ]        context: the tokens of the last piece
        text     [ given   | piece | � ]  held back: bytes that may still become a character

    If only broken bytes come, the window moves on once it has more than `MOST` new tokens, so that a token costs a
    bounded number of decoded tokens. Weak spot: a decoder of the byte-fallback kind turns every byte of an invalid run
    into a �, even bytes that began as a character which was already given.
    """

    MOST, KEPT = 32, 16  # tokens of a window that does not end with a character: when it moves, what it keeps
    HELD = 3  # bytes of an unfinished character at most; each may decode to one �
    __slots__ = ("_context", "_decode", "_given", "_special_ids", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], special_ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._special_ids = frozenset(special_ids)
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text has been given
        self._given = 0  # characters at the start of the window's text that have been given

    def feed(self, ids: Iterable[int]) -> str:
        new = [number for number in ids if number not in self._special_ids]
        if not new:
            return ""
        self._window += new
        text = self._decode(self._window)
        whole = text.rstrip(_UNKNOWN)
        if len(whole) == len(text):
            return self._move(text)
        if len(self._window) - self._context <= self.MOST:
            return self._give(text, max(len(whole), self._given))
        return self._force(text, min(len(text) - len(whole), self.HELD))

    def flush(self) -> str:
        """Return the held text, when no more tokens come."""
        return self._give(text := self._decode(self._window), len(text))

    def _give(self, text: str, until: int) -> str:
        piece, self._given = text[self._given : until], until
        return piece

    def _move(self, text: str) -> str:
        """Give all text and drop the context; the tokens after it become the next context."""
        piece = self._give(text, len(text))
        self._window = self._window[self._context :]
        self._context, self._given = len(self._window), len(self._decode(self._window))
        return piece

    def _force(self, text: str, held: int) -> str:
        piece = self._give(text, max(len(text) - held, self._given))
        self._window = self._window[-self.KEPT :]
        self._context, self._given = 0, max(0, len(self._decode(self._window)) - held)
        return piece


class StopStrings:
    """The stop strings of one output, and the end of its text while that may still become a stop string.

    The first stop string to be complete ends the output, and the longest of those that end together.
    Text that may begin a stop string is held back until that is decided.
    """

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Watch for `stops`; with `include` the text ends after the stop string, otherwise before it."""
        self._stops, self._include = stops, include
        self._held = ""
        self.found = ""  # the stop string; once there is one, no more text follows

    def feed(self, text: str) -> str:
        """Return the text that surely comes before any stop string, out of the held text and this text."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held, self.found = "", text[start:end]
            return text[: end if self._include else start]
        settled = len(text) - num_unsettled(text, self._stops)
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """Return the held text, when no more text comes."""
        held, self._held = self._held, ""
        return held
