"""Count what each caller used lately, in memory that all gateways of a deployment share.

Each caller has a row, found by a digest of its id:

    digest 16 | requests left, as of | tokens left, as of | requests open at gateway 0, 1, ... 63, the job runner
              | tokens of its budgets that these hold, likewise

A deployment has few callers at a time. Where all rows are taken, since keys come and go, a new caller gets the row of
the caller that has had nothing open for longest: as a rule a minute's limits are full again by then.

Rows are read and written under one lock, which the kernel releases if its holder dies. Where a stopped process keeps
it, the others count without it after a moment. A gateway that starts clears its own column, since requests of its last
life are gone. Each gateway holds a shared lock on the file while it uses it; so a file in use is not mistaken for a
stale one.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.errors import ArenaTooSmall
from alignedserve.gateway.access.budgets import Budgets
from alignedserve.gateway.access.keys import MOST_KEYS
from alignedserve.gateway.access.shared_bound import SharedBound
from alignedserve.locks import LockHeld, open_private, take

MOST_GATEWAYS = 64
JOB_RUNNER = MOST_GATEWAYS  # the place of the job runner
_PLACES = MOST_GATEWAYS + 1
_ROW = struct.Struct(f"=16s4d{2 * _PLACES}I")
_NUM_ROWS = 2 * MOST_KEYS  # with room for keys that have been replaced
_UNUSED = bytes(16)
LOCK_S = 0.2  # the event loop stands still meanwhile

log = logging.getLogger("alignedserve.gateway")


@dataclass
class Bucket:
    """The amount that a caller may still take: at most a minute's limit, refilled evenly.

    The balance may fall below 0, because the cost of a request is known only later."""

    left: float = 0.0
    at: float = 0.0  # when `left` was computed; 0 is never, and then it is full

    def fill(self, per_minute: int, now: float) -> None:
        grown = self.left + (now - self.at) * per_minute / 60 if self.at else per_minute
        self.left, self.at = min(float(per_minute), grown), now

    def wait_s(self, amount: float, per_minute: int) -> float:
        """Return how long it takes until this amount is left."""
        return max(0.0, amount - self.left) * 60 / per_minute


@dataclass
class CallerRow:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    open_at: list[int] = field(default_factory=lambda: [0] * _PLACES)  # requests open at each place
    held_at: list[int] = field(default_factory=lambda: [0] * _PLACES)  # tokens of budgets that they hold


class Ledger:
    """A gateway's view of the rows: in a file that several gateways share, or without `path` in its own memory."""

    def __init__(self, path: Path | None = None, place: int = 0, budgets: Budgets | None = None) -> None:
        """`place` is the gateway's number, or JOB_RUNNER."""
        self.place, self.budgets = place, budgets or Budgets()
        size = _NUM_ROWS * _ROW.size
        self.logprobs: Counter[str] = Counter()  # in this process's answers, by caller: they take its memory alone
        self.choices = SharedBound()  # in this process's bodies
        self._path, self._is_stuck = path or Path(), False
        self._fd = -1 if path is None else open_shared(path, size)
        self._memory = mmap.mmap(self._fd, size)
        self._offsets: dict[str, int] = {}
        with self._locked():
            for offset in range(0, size, _ROW.size):
                if self._memory[offset : offset + 16] != _UNUSED:
                    digest, row = self._read(offset)
                    row.open_at[place] = row.held_at[place] = 0
                    self._write(offset, digest, row)

    def close(self) -> None:
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)

    @contextmanager
    def row(self, caller: str) -> Iterator[CallerRow]:
        """Lock the ledger and give this caller's row, to read and to change."""
        with self._locked():
            digest, offset = hashlib.blake2b(caller.encode(), digest_size=16).digest(), self._offsets.get(caller)
            if offset is None or self._digest_at(offset) != digest:
                offset = self._offsets[caller] = self._find(digest)
            _, row = self._read(offset)
            yield row
            self._write(offset, digest, row)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        try:
            take(self._fd, self._path, 0.0 if self._is_stuck else LOCK_S, lock=fcntl.lockf)
            has_lock = True
        except LockHeld as error:  # a gateway was stopped inside: counts that are a little wrong are better than none
            has_lock = False
            if not self._is_stuck:
                log.warning("the limits of callers are counted without a lock: %s", error)
        self._is_stuck = not has_lock
        try:
            yield
        finally:
            if has_lock:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _find(self, digest: bytes) -> int:
        first = int.from_bytes(digest[:4], "little") % _NUM_ROWS
        for step in range(_NUM_ROWS):
            offset = (first + step) % _NUM_ROWS * _ROW.size
            if self._digest_at(offset) in (digest, _UNUSED):
                return offset
        rows = [(offset, self._read(offset)[1]) for offset in range(0, _NUM_ROWS * _ROW.size, _ROW.size)]
        idle = [(max(row.requests.at, row.tokens.at), offset) for offset, row in rows if not any(row.open_at)]
        if not idle:
            raise RuntimeError("each row of the ledger of callers has requests open")
        _, offset = min(idle)
        self._write(offset, digest, CallerRow())
        return offset

    def _digest_at(self, offset: int) -> bytes:
        return self._memory[offset : offset + 16]

    def _read(self, offset: int) -> tuple[bytes, CallerRow]:
        digest, requests, requests_at, tokens, tokens_at, *at_places = _ROW.unpack_from(self._memory, offset)
        both = at_places[:_PLACES], at_places[_PLACES:]
        return digest, CallerRow(Bucket(requests, requests_at), Bucket(tokens, tokens_at), *both)

    def _write(self, offset: int, digest: bytes, row: CallerRow) -> None:
        requests, tokens = row.requests, row.tokens
        buckets = requests.left, requests.at, tokens.left, tokens.at
        _ROW.pack_into(self._memory, offset, digest, *buckets, *row.open_at, *row.held_at)


def ledger_name(deployment: str) -> str:
    return f"{deployment}-limits-2"  # another number where rows change: of two versions each has its own


def open_shared(path: Path, size: int) -> int:
    """Open the file, make it if it is missing, and lock it so that it is not taken for stale."""
    while True:
        fd = open_private(path)
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.posix_fallocate(fd, 0, size)  # a page that is missing later would be a SIGBUS
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(fd)
            raise ArenaTooSmall(
                f"{path.parent} has no room for the {size >> 10} KiB that parts share ({error.strerror}): lower"
                " --pool-memory-mb or, in a container, raise its --shm-size"
            ) from None
        os.close(fd)  # it was removed as stale before it was locked
