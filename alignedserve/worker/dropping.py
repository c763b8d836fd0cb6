"""Frees KV that no layer reads any more, of requests that still run, where all layers have windows.

    tokens     0 ·············· dropped ─────────────────────── prefix
    KV         given back       in `pairs`, read by what comes   ▲ the next token: it reads the last `reach` tokens

A request drops whole pages of the pool, so that what it has left may go there as it is. From then on it is not found by
its beginning: the pool forgets what it kept of that for this request, and gets its last tokens without names.
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import Attempt
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.page_writer import PageWriter
from alignedserve.worker.step.running import Running


class Dropping:
    def __init__(self, memory: DeviceMemory, writer: PageWriter) -> None:
        self._memory, self._writer = memory, writer
        self._unread = memory.limits.unread
        self._let_go: list[Attempt] = []
        self.is_on = memory.limits.reach is not None

    def drop(self, running: Running) -> None:
        """Free what a request that has run needs no longer. While pages of it are being written, it keeps its pairs."""
        if not self._writer.is_writing(running):
            self._drop(running, self._memory.spare)

    def drop_to_leave(self, running: Running, free: Callable[[tuple[int, ...]], None]) -> None:
        """Free what a request that leaves needs no longer, though pages of it are being written. With all that it had
        the device might never have room for it again."""
        self._drop(running, free)

    def _drop(self, running: Running, free: Callable[[tuple[int, ...]], None]) -> None:
        unread = self._unread(running.prefix)
        if not unread or running.blocks:
            return
        if unread > running.dropped:
            self._writer.forget_parts(running)
            free(running.drop(unread, self._memory.limits.block_size))
            running.names = ()
        if running.known:  # where it was seated on what the device has, it may lack its beginning already
            running.known = ()
            self._let_go.append(running.key)

    def take_let_go(self) -> list[Attempt]:
        """Return the attempts for which the pool need not keep pages any more; once."""
        let_go, self._let_go = self._let_go, []
        return let_go
