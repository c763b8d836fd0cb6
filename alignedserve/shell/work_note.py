"""A note in shared memory of what a core is working on, which outlives its process.

A process that was killed, or that was ended because it hung, can say no more at which request. Its next life on this
machine reads it here: so a request that ends a router or a pool, however it does so, is soon known.

    length, 4 bytes     0: nothing
    attempts, msgpack
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import msgspec

from alignedserve.protocol.at_work import AtWork
from alignedserve.protocol.messages import Attempt

MOST_NAMED = 32  # attempts: an event about more would charge many for one
_LENGTH = 4
_BYTES = 8192
_NOTHING = bytes(_LENGTH)


class WorkNote(AtWork):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)  # its launcher, and other deployments, remove files that nobody locks
        os.posix_fallocate(self._fd, 0, _BYTES)
        self._note = mmap.mmap(self._fd, _BYTES)
        self.left = self._read()
        self._note[:_LENGTH] = _NOTHING

    def on(self, attempts: tuple[Attempt, ...]) -> None:
        if attempts == self.attempts:
            return
        self.attempts, note = attempts, self._note
        note[:_LENGTH] = _NOTHING  # the process may end between any two of these writes
        if not attempts or len(attempts) > MOST_NAMED:
            return
        told = msgspec.msgpack.encode(attempts)
        if len(told) <= _BYTES - _LENGTH:
            note[_LENGTH : _LENGTH + len(told)] = told
            note[:_LENGTH] = len(told).to_bytes(_LENGTH, "little")

    def _read(self) -> tuple[Attempt, ...]:
        length = int.from_bytes(self._note[:_LENGTH], "little")
        try:
            return msgspec.msgpack.decode(self._note[_LENGTH : _LENGTH + length], type=tuple[Attempt, ...])
        except msgspec.DecodeError:
            return ()
