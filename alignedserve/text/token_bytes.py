"""The bytes that each token stands for by itself, which may be only a part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of a tokenizer's tokens, looked up by token id.

    Tokenizers write bytes in two ways: in an alphabet of 256 characters, or with ▁ for spaces and tokens for single
    bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = {step["type"] for step in _steps(tokenizer.decoder)}
        self._alphabet = _alphabet() if "ByteLevel" in kinds else None
        self._has_bytes = "ByteFallback" in kinds
        self._added = {number: token.content.encode() for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._read(token)
        return found

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        written: str = self._tokenizer.id_to_token(token) or ""  # a vocabulary may be padded with ids that have no text
        if self._alphabet is not None:
            alphabet = self._alphabet
            return b"".join(alphabet.get(character, character.encode()) for character in written)
        if self._has_bytes and (byte := _BYTE.fullmatch(written)):
            return bytes([int(byte[1], 16)])
        return written.replace("\u2581", " ").encode()


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder, which may be a sequence of decoders; none where there is no decoder."""
    described: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
    yield from described.get("decoders") or ([described] if described else [])


def _alphabet() -> dict[str, bytes]:
    """Return GPT-2's characters for bytes: a printable byte is its own character, the others follow 0xFF in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}
