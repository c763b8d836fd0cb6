"""What the two ends of a transfer say to each other before its payload, within it and after it.

    source ── header ──▶ receiver     what comes next: a transfer's number, and of what it is the KV
           ◀── reply ──                whether it is the one that the receiver awaits
           ── chunk ... ──▶            the payload, each chunk with a tail: number, place, checksum
           ◀── reply ──                whether all of it is in the receiver's blocks

All are of fixed size, but for chunks, whose sizes follow from the header: neither end ever waits for bytes that the
other does not send.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import CacheKind
from alignedserve.kvpool.pages import chained_hashes

_MAGIC = 0x414C474E4B560001  # its last digits are the version
_KINDS = (CacheKind.KV, CacheKind.HIDDEN)
_HEADER = struct.Struct("=QQ?BxxIQQI?xxx")
_REPLY = struct.Struct("=QQ?")
_TAIL = struct.Struct("=QII")
HEADER, REPLY, CHUNK = 1, 2, 3  # tags: whatever an end has in mind, it never takes one thing for another
HEADER_BYTES, REPLY_BYTES, TAIL_BYTES = _HEADER.size, _REPLY.size, _TAIL.size


class NotOurs(Exception):
    """What has arrived was not said by this version of the other end."""


@dataclass(frozen=True, slots=True)
class Header:
    number: int
    has_kv: bool  # False: the source has it no longer, and nothing follows
    kind: CacheKind
    num_tokens: int
    token_hash: int  # of all of them in their order, as the pages of the arena have it
    num_bytes: int
    chunk_tokens: int  # in each chunk but the last
    is_checked: bool  # the tails have checksums

    def pack(self) -> bytes:
        return _HEADER.pack(
            *(_MAGIC, self.number, self.has_kv, _KINDS.index(self.kind), self.num_tokens),
            *(self.token_hash, self.num_bytes, self.chunk_tokens, self.is_checked),
        )

    @classmethod
    def read(cls, raw: bytes | bytearray) -> Header:
        magic, number, has_kv, kind, *others = _HEADER.unpack(raw)
        if magic != _MAGIC or kind >= len(_KINDS):
            raise NotOurs("the other end sends something that is no header of this version")
        return cls(number, has_kv, _KINDS[kind], *others)


def header_of(
    number: int, kind: CacheKind, tokens: Sequence[int], token_bytes: int, chunk_tokens: int, is_checked: bool
) -> Header:
    """Both ends make it of what they are told; without tokens it says that there is nothing."""
    num, has_kv = len(tokens), bool(tokens)
    token_hash = chained_hashes(tokens, num)[-1] if has_kv else 0
    return Header(number, has_kv, kind, num, token_hash, num * token_bytes, chunk_tokens, is_checked)


def pack_reply(number: int, yes: bool) -> bytes:
    return _REPLY.pack(_MAGIC, number, yes)


def read_reply(raw: bytes | bytearray, number: int) -> bool:
    magic, of, yes = _REPLY.unpack(raw)
    if (magic, of) != (_MAGIC, number):
        raise NotOurs(f"the other end answers something else than transfer {number}")
    return bool(yes)


def seal(chunk: memoryview, number: int, index: int, is_checked: bool) -> None:
    """Writes the tail of a chunk."""
    body = chunk[:-TAIL_BYTES]
    _TAIL.pack_into(chunk, len(body), number, index, zlib.crc32(body) if is_checked else 0)


def is_sealed(chunk: memoryview, number: int, index: int, is_checked: bool) -> bool:
    """Whether this is that chunk, and all of it arrived as it was."""
    body = chunk[:-TAIL_BYTES]
    of, at, checksum = _TAIL.unpack_from(chunk, len(body))
    return (of, at) == (number, index) and (not is_checked or checksum == zlib.crc32(body))
