"""What each caller has had of late, in memory that all gateways of a deployment share.

One row for each caller, found by a digest of its id; rows are never given back, for a deployment knows few callers:

    digest 16 | requests left, as of | tokens left, as of | requests open at gateway 0, 1, ... 63

Rows are read and written under one lock, which the kernel opens where its holder dies. A gateway that starts empties
its own column: what its last life had open is gone. The file is held with a shared lock while anybody has it, and so is
known not to be stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.gateway.access.keys import MOST_KEYS

MOST_GATEWAYS = 64
_ROW = struct.Struct(f"=16s4d{MOST_GATEWAYS}I")
_NUM_ROWS = 2 * MOST_KEYS  # with room for keys that others have taken the place of
_UNUSED = bytes(16)


@dataclass
class Bucket:
    """Holds a minute's worth and fills evenly. It may be overdrawn: what a request will cost is known late."""

    left: float = 0.0
    at: float = 0.0  # 0: never touched, and so full

    def fill(self, per_minute: int, now: float) -> None:
        grown = self.left + (now - self.at) * per_minute / 60 if self.at else per_minute
        self.left, self.at = min(float(per_minute), grown), now

    def wait_s(self, amount: float, per_minute: int) -> float:
        """Until there is so much."""
        return max(0.0, amount - self.left) * 60 / per_minute


@dataclass
class Row:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    open_at: list[int] = field(default_factory=lambda: [0] * MOST_GATEWAYS)  # by gateway

    @property
    def num_open(self) -> int:
        return sum(self.open_at)


class Ledger:
    """Of one gateway; in a file for several, else in memory of its own."""

    def __init__(self, path: Path | None = None, place: int = 0) -> None:
        self.place = place
        size = _NUM_ROWS * _ROW.size
        self._fd = -1 if path is None else _held(path, size)
        self._memory = mmap.mmap(self._fd, size)
        self._offsets: dict[str, int] = {}
        with self._locked():
            for offset in range(0, size, _ROW.size):
                if self._memory[offset : offset + 16] != _UNUSED:
                    digest, row = self._read(offset)
                    row.open_at[place] = 0
                    self._write(offset, digest, row)

    def close(self) -> None:
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)

    @contextmanager
    def row(self, caller: str) -> Iterator[Row]:
        """Of this caller, to read and to change; nobody else does meanwhile."""
        with self._locked():
            offset = self._offsets.get(caller)
            if offset is None:
                offset = self._offsets[caller] = self._find(_digest(caller))
            _, row = self._read(offset)
            yield row
            self._write(offset, _digest(caller), row)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _find(self, digest: bytes) -> int:
        first = int.from_bytes(digest[:4], "little") % _NUM_ROWS
        for step in range(_NUM_ROWS):
            offset = (first + step) % _NUM_ROWS * _ROW.size
            if self._memory[offset : offset + 16] in (digest, _UNUSED):
                return offset
        raise RuntimeError("the ledger of callers is full")

    def _read(self, offset: int) -> tuple[bytes, Row]:
        digest, requests, requests_at, tokens, tokens_at, *open_at = _ROW.unpack_from(self._memory, offset)
        return digest, Row(Bucket(requests, requests_at), Bucket(tokens, tokens_at), open_at)

    def _write(self, offset: int, digest: bytes, row: Row) -> None:
        one, other = row.requests, row.tokens
        _ROW.pack_into(self._memory, offset, digest, one.left, one.at, other.left, other.at, *row.open_at)


def _digest(caller: str) -> bytes:
    return hashlib.blake2b(caller.encode(), digest_size=16).digest()


def _held(path: Path, size: int) -> int:
    """The file, made where it is not there, and locked such that nobody takes it for stale."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.ftruncate(fd, size)
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # it was removed as stale before we had it locked
