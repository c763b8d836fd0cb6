"""The frames of a transfer: what its two ends say to each other before the payload, within it and after it.

    source ── header ──▶ receiver     the transfer's number, and what its KV is of
           ◀── reply ──                whether the receiver awaits this transfer
           ── chunk ... ──▶            the payload, in order; over NCCL the receiver asks for each beyond the window
           ── places ──▶               the checksum of all chunks
           ◀── reply ──                whether all of it is in the receiver's blocks

Where the receiver reads the source's memory itself (ipc.py), in place of chunks:

           ── handle ──▶               once over each group: how the memory is mapped
           ── places ──▶               the blocks that have the KV, and its checksum
           ◀── reply ... ──            from time to time: the copy goes on
           ◀── reply ──                whether all of it was read
           ── reply ──▶                whether the blocks were the transfer's all the time

Where chunks go over NCCL, both ends take their turn first (turns.py):

           first ── turn ──▶ second    the communicator that the two have
                 ◀── reply ──          whether the second has it too

All frames have a fixed size, except chunks and places, whose sizes follow from the header: so neither end waits for
bytes that the other end does not send.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from alignedserve.protocol.page_names import chained_hashes

_MAGIC = 0x414C474E4B560005  # the last digits are the version
_HEADER = struct.Struct("=QQ?xxxIQQI?xxx")
_REPLY = struct.Struct("=QQB")
_PLACES = struct.Struct("=QQI")  # followed by the blocks
_HANDLE = struct.Struct("=QH")  # followed by the handle, padded to HANDLE_BYTES
_TURN = struct.Struct("=QQI")
HEADER, REPLY, CHUNK, HANDLE, PLACES, TURN = 1, 2, 3, 4, 5, 6  # tags, so that no end takes one frame for another
HEADER_BYTES, REPLY_BYTES, TURN_BYTES, HANDLE_BYTES = _HEADER.size, _REPLY.size, _TURN.size, 1024
_BLOCK_BYTES = 4


class NotOurs(Exception):
    """The frame that has arrived is not of this version."""


class Reply(IntEnum):
    NO = 0
    YES = 1
    GOES_ON = 2


@dataclass(frozen=True, slots=True)
class TransferHeader:
    number: int
    has_kv: bool  # False: the source no longer has it, and nothing follows
    num_tokens: int
    token_hash: int  # of all tokens in their order, as in page headers
    num_bytes: int
    chunk_tokens: int  # tokens of each chunk but the last
    is_checked: bool  # whether both ends sum up the KV

    def pack(self) -> bytes:
        return _HEADER.pack(
            *(_MAGIC, self.number, self.has_kv, self.num_tokens),
            *(self.token_hash, self.num_bytes, self.chunk_tokens, self.is_checked),
        )

    @classmethod
    def read(cls, raw: bytes | bytearray) -> TransferHeader:
        magic, *fields = _HEADER.unpack(raw)
        if magic != _MAGIC:
            raise NotOurs("the other end sent something that is no header of this version")
        return cls(*fields)


def header_of(
    number: int, tokens: Sequence[int], token_bytes: int, chunk_tokens: int, is_checked: bool
) -> TransferHeader:
    """Return the header that both ends expect; without tokens it says that there is no KV."""
    num, has_kv = len(tokens), bool(tokens)
    token_hash = chained_hashes(tokens, num)[-1] if has_kv else 0
    return TransferHeader(number, has_kv, num, token_hash, num * token_bytes, chunk_tokens, is_checked)


def pack_reply(number: int, reply: Reply) -> bytes:
    return _REPLY.pack(_MAGIC, number, reply)


def read_reply(raw: bytes | bytearray, number: int) -> Reply:
    (reply,) = _of_transfer(_REPLY, raw, number)
    if reply > max(Reply):
        raise NotOurs(f"the other end answers transfer {number} with {reply}, which no reply is")
    return Reply(reply)


def _of_transfer(form: struct.Struct, raw: bytes | bytearray, number: int) -> list[int]:
    """Return the numbers of a frame behind its head. Raises NotOurs for one of another version or transfer."""
    magic, transfer, *rest = form.unpack_from(raw)
    if (magic, transfer) != (_MAGIC, number):
        raise NotOurs(f"the other end speaks of something else than transfer {number}")
    return rest


def pack_handle(handle: bytes) -> bytes:
    return (_HANDLE.pack(_MAGIC, len(handle)) + handle).ljust(HANDLE_BYTES, b"\0")


def read_handle(raw: bytes | bytearray) -> bytes:
    magic, length = _HANDLE.unpack_from(raw)
    if magic != _MAGIC or length > HANDLE_BYTES - _HANDLE.size:
        raise NotOurs("the other end sends something that is no handle of this version")
    return bytes(raw[_HANDLE.size : _HANDLE.size + length])


def places_bytes(num_blocks: int) -> int:
    return _PLACES.size + num_blocks * _BLOCK_BYTES


def pack_places(number: int, blocks: Sequence[int], checksum: int) -> bytes:
    return _PLACES.pack(_MAGIC, number, checksum) + struct.pack(f"={len(blocks)}I", *blocks)


def read_places(raw: bytes | bytearray, number: int) -> tuple[tuple[int, ...], int]:
    """Return the blocks and the checksum."""
    (checksum,) = _of_transfer(_PLACES, raw, number)
    num_blocks = (len(raw) - _PLACES.size) // _BLOCK_BYTES
    return struct.unpack_from(f"={num_blocks}I", raw, _PLACES.size), checksum


def pack_turn(number: int, communicator: int) -> bytes:
    return _TURN.pack(_MAGIC, number, communicator)


def read_turn(raw: bytes | bytearray, number: int) -> int:
    """Return the number of the communicator."""
    return _of_transfer(_TURN, raw, number)[0]
