"""Frames of KV transfers: what this version has not written is refused."""

from __future__ import annotations

import struct

import pytest

from alignedserve.transport.frames import (
    HANDLE_BYTES,
    NotOurs,
    Reply,
    TransferHeader,
    header_of,
    pack_handle,
    pack_reply,
    read_handle,
    read_reply,
)

HEADER = header_of(7, (1, 2, 3), token_bytes=8, chunk_tokens=2, is_checked=True)


def of_another_version(frame: bytes) -> bytes:
    return bytes([frame[0] ^ 1, *frame[1:]])


def test_what_is_written_is_read() -> None:
    assert TransferHeader.read(HEADER.pack()) == HEADER
    assert (HEADER.num_tokens, HEADER.num_bytes, HEADER.has_kv) == (3, 24, True)
    assert [read_reply(pack_reply(7, reply), 7) for reply in Reply] == list(Reply)
    assert read_handle(pack_handle(b"a handle")) == b"a handle"


def test_another_version_s_frames_are_refused() -> None:
    with pytest.raises(NotOurs, match="no header of this version"):
        TransferHeader.read(of_another_version(HEADER.pack()))
    with pytest.raises(NotOurs, match="transfer 7"):
        read_reply(of_another_version(pack_reply(7, Reply(0))), 7)
    with pytest.raises(NotOurs, match="no handle of this version"):
        read_handle(of_another_version(pack_handle(b"a handle")))


def test_what_cannot_be_meant_is_refused() -> None:
    beyond = pack_reply(7, Reply(0))[:-1] + bytes([max(Reply) + 1])
    for reply in (beyond, pack_reply(8, Reply(0))):
        with pytest.raises(NotOurs, match="transfer 7"):
            read_reply(reply, 7)
    longer = pack_handle(b"")[:8] + struct.pack("=H", HANDLE_BYTES)
    with pytest.raises(NotOurs, match="no handle"):
        read_handle(longer.ljust(HANDLE_BYTES, b"\0"))
