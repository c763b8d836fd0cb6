"""A note in shared memory of what a core is working on, which outlives its process.

A process that was killed, or ended because it hung, can no longer name the request. Its launcher reads the note, and so
does its next life, which may be on another machine than the launcher: so any request that ends processes is soon known.

    length, 4 bytes     0: nothing
    attempts, msgpack
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import msgspec

from alignedserve.locks import open_private
from alignedserve.protocol.events import AtWork
from alignedserve.protocol.messages import Attempt
from alignedserve.protocol.wire import MOST_NAMED

_LENGTH = 4
_BYTES = 8192
_NOTHING = bytes(_LENGTH)


def note_of(directory: Path, deployment: str, part: str) -> Path:
    return directory / f"{deployment}-{part}-work"


def read(path: Path) -> tuple[Attempt, ...]:
    """Return what the part was working on when it ended; nothing where no note of it is on this machine."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            told = os.read(fd, _BYTES)
        finally:
            os.close(fd)
        length = int.from_bytes(told[:_LENGTH], "little")
        return msgspec.msgpack.decode(told[_LENGTH:][:length], type=tuple[Attempt, ...])
    except (OSError, msgspec.DecodeError):
        return ()


class WorkNote(AtWork):
    outlives = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = open_private(path)
        fcntl.flock(self._fd, fcntl.LOCK_SH)  # its launcher, and other deployments, remove files that nobody locks
        os.posix_fallocate(self._fd, 0, _BYTES)
        # It stays until there is more to note: a life that ends before it could say this leaves it to the next one.
        self._note, self.left = mmap.mmap(self._fd, _BYTES), read(path)
        self._noted: tuple[Attempt, ...] = ()

    def on(self, attempts: tuple[Attempt, ...]) -> None:
        self.attempts = attempts
        if more := self.under_way():
            attempts = tuple(dict.fromkeys((*attempts, *more)))
        if attempts == self._noted:
            return
        self._noted, note = attempts, self._note
        note[:_LENGTH] = _NOTHING  # the process may end between any two of these writes
        if not attempts or len(attempts) > MOST_NAMED:
            return
        told = msgspec.msgpack.encode(attempts)
        if len(told) <= _BYTES - _LENGTH:
            note[_LENGTH : _LENGTH + len(told)] = told
            note[:_LENGTH] = len(told).to_bytes(_LENGTH, "little")
