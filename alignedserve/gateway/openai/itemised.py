"""The items of an answer, for interfaces that tell of it by items: reasoning, texts and calls, one after another.

    piece ─▶ begin of an item ─▶ deltas of its text ─▶ end of the item ─▶ begin of the next ─▶ ...

One item is open at a time. A piece that goes on with another item closes the open one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.text.calls.scanning import CallPart

Event: TypeAlias = dict[str, Any]
Keep: TypeAlias = Callable[[dict[str, Any]], Awaitable[bool]]
Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass
class OpenItem:
    """The item that pieces are added to."""

    kind: Kind
    number: int  # its place in the answer
    tree: dict[str, Any]
    text: str = ""  # so far, or the arguments of the call


class ItemAnswer(ABC):
    """Builds one answer and its events; `tree` holds the answer so far, for clients that do not stream."""

    def __init__(self, tree: dict[str, Any], keep: Keep | None = None) -> None:
        """`keep` keeps the answer, and returns whether it has done so."""
        self.tree, self._keep = tree, keep
        self._open: OpenItem | None = None
        self._num_items = 0
        self._events: list[Event] = []  # that have not been taken

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        return []

    @abstractmethod
    def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece; those of the piece with a finish are the last."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of an answer that an error ends."""

    async def keep(self) -> None:
        """Keep the answer, which has ended, where it is to be kept: before its last events, so that clients can go on
        from there."""
        if self._keep is not None:
            self.tree["store"] = await self._keep(self.tree)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _make(self, kind: Kind, number: int, part: CallPart | None) -> dict[str, Any]:
        """Return a new item, and tell of its beginning; `part` is the first of a call."""

    @abstractmethod
    def _tell_delta(self, item: OpenItem, text: str) -> None: ...

    @abstractmethod
    def _tell_end(self, item: OpenItem, status: str) -> None:
        """Make the item whole, and tell of its end."""

    def _read(self, piece: AnswerPiece) -> None:
        """Add a piece: its reasoning comes before its text, and its calls come last."""
        if piece.reasoning:
            self._go_on("reasoning", piece.reasoning)
        if piece.text:
            self._go_on("text", piece.text)
        for part in piece.calls:
            if part.id is not None:
                self._begin("call", part)
            if part.arguments:
                self._go_on("call", part.arguments)

    def _go_on(self, kind: Kind, text: str) -> None:
        item = self._open if self._open is not None and self._open.kind == kind else self._begin(kind)
        item.text += text
        self._tell_delta(item, text)

    def _begin(self, kind: Kind, part: CallPart | None = None) -> OpenItem:
        self._close()
        self._open = item = OpenItem(kind, self._num_items, self._make(kind, self._num_items, part))
        self._num_items += 1
        return item

    def _close(self, status: str = "completed") -> None:
        opened, self._open = self._open, None
        if opened is not None:
            self._tell_end(opened, status)
