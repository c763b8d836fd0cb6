"""Write the JSON of answers in parts, so that no answer holds up those beside it, however large it is.

An encoder holds Python's lock until it returns. An answer of 90 MB in one piece would stop every thread of its
process, heartbeats too. So a large answer is a tree with iterators in place of its long lists:

    tree ─▶ json_parts ─▶ 32 kB ─▶ socket     while the next items are made, the event loop turns between two parts
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

PART_BYTES = 32 << 10
_WALKED, _SLICE = 8, 64  # items: a list longer than the first is encoded in slices of the second
_PLAIN = (str, int, float, type(None))
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_encode = msgspec.json.Encoder().encode


def json_parts(tree: Any) -> Iterator[bytes]:
    """Yield the JSON of a tree in parts of about PART_BYTES. An iterator is written as a list of what it yields."""
    return joined(_walk(tree))


def joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces in parts of PART_BYTES or more; only the last part is smaller."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def _walk(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, dict):
        before = b"{"
        for name, value in tree.items():
            if isinstance(value, _PLAIN):
                yield before + _encode(name) + b":" + _encode(value)
            else:
                yield before + _encode(name) + b":"
                yield from _walk(value)
            before = b","
        yield b"}" if tree else b"{}"
    elif isinstance(tree, Iterator) or (isinstance(tree, list) and len(tree) <= _WALKED):
        before = b"["
        for item in tree:
            yield before
            yield from _walk(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    elif isinstance(tree, list):
        for at in range(0, len(tree), _SLICE):
            yield (b"," if at else b"[") + _encode(tree[at : at + _SLICE])[1:-1]
        yield b"]"
    elif isinstance(tree, msgspec.Raw):
        for at in range(0, len(written := memoryview(tree)), PART_BYTES):
            yield bytes(written[at : at + PART_BYTES])
    else:
        yield _encode(tree)


def encoded(items: Iterable[Any]) -> Iterator[msgspec.Raw]:
    """Yield each item as JSON: items without iterators are encoded faster as a whole, and bytes are no objects that
    Python looks through for cycles of garbage."""
    for item in items:
        yield msgspec.Raw(_encode(item))


def encoded_runs(items: Iterator[Any]) -> Iterator[msgspec.Raw]:
    """Yield the items as JSON, some at a time with commas between them, as they stand within a list."""
    while run := list(islice(items, _SLICE)):
        yield msgspec.Raw(_encode(run)[1:-1])


def ascii_json(part: bytes) -> str:
    """Return JSON in ASCII: some clients split lines at U+2028 or U+0085, which JSON may contain."""
    text = part.decode()
    if text.isascii():
        return text
    return _NOT_ASCII.sub(lambda found: encode_basestring_ascii(found[0])[1:-1], text)
