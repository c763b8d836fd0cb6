"""Write answers as server-sent events.

Most chunks of an answer differ from the chunk before in their text only. So the bytes before and after the text of a
choice's first such chunk are kept, and of each later chunk only the text is encoded.
"""

from __future__ import annotations

import json
import secrets
from json.encoder import encode_basestring_ascii
from typing import Any

from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.shapes import AnswerShape

DONE = b"data: [DONE]\n\n"
_MARK = secrets.token_hex(16)  # stands for the text where a chunk is split; no client can have sent it


def event(body: dict[str, Any]) -> bytes:
    """Return the body as an event in ASCII: some clients split lines at U+2028 or U+0085, which JSON may contain."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


class Chunks:
    """Encodes the chunks of one answer."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._around: dict[int, tuple[str, str]] = {}  # choice -> what stands before and after the text of its chunks

    def event(self, number: int, piece: AnswerPiece) -> bytes | None:
        """Return the event of a piece, or None if the piece needs no chunk."""
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
