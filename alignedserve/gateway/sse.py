"""Answers as server-sent events.

Most chunks of an answer differ from the one before in their text alone. So a choice's first such chunk is kept as what
comes before its text and what comes after it, and of those that follow only the text is encoded.
"""

from __future__ import annotations

import json
import secrets
from json.encoder import encode_basestring_ascii
from typing import Any

from alignedserve.gateway.openai.reading import Piece
from alignedserve.gateway.openai.shapes import Shape

DONE = b"data: [DONE]\n\n"
_MARK = secrets.token_hex(16)  # stands for a text where a chunk is taken apart; nobody can have sent it


def event(body: dict[str, Any]) -> bytes:
    """In ASCII: some clients split lines at U+2028 or U+0085, which JSON otherwise leaves as they are."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


class Chunks:
    """Of one answer."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._around: dict[int, tuple[str, str]] = {}  # choice -> what is before and after the text of a chunk of it

    def event(self, number: int, piece: Piece) -> bytes | None:
        """Of a piece; none where it says nothing by itself."""
        around = self._around.get(number)
        if around is not None and piece.is_text_alone:
            self._shape.count(number, piece)
            return f"{around[0]}{encode_basestring_ascii(piece.text)[1:-1]}{around[1]}".encode()
        chunk = self._shape.chunk(number, piece)
        if chunk is None:
            return None
        if around is None and (like := self._shape.chunk_of_text(number, _MARK)) is not None:
            before, _, after = event(like).decode().rpartition(_MARK)
            self._around[number] = before, after
        return event(chunk)
