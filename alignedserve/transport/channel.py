"""One direction between two workers: its transfers one after the other, in a thread of its own.

    shell ── add(transfer) ──▶ channel's thread ── post(KvSent | KvReceived) ──▶ shell

Every transfer that is added ends with exactly one event. Where something goes wrong with the connection (the other end
has gone, or nothing is heard of it for `timeout_s`), all transfers that are outstanding here have failed, the group is
closed, and what is added later goes over a new one (meeting.py). Closing the channel ends all of them at once.

Blocks are touched only while their transfer is outstanding, under the lock under which it also ends: once its event is
posted, they are the core's again. On a GPU the channel's copies have a stream of their own, which begins behind what
the shell had ordered when the transfer was added; each is through before that lock is given back.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from alignedserve.engine.device.devices import Mark, beside_steps, finish
from alignedserve.engine.device.groups import Broken, Group
from alignedserve.engine.device.pace import Pace
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.transport.frames import REPLY, REPLY_BYTES, Header, NotOurs, Says, header_of, pack_reply, read_reply
from alignedserve.transport.mapping import Maps
from alignedserve.transport.meeting import Meeting, Past
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome, Post, failed

log = logging.getLogger("alignedserve.transport")

_END_S = 5.0  # for a thread that is told to end

T = TypeVar("T", SendKv, ReceiveKv)


@dataclass(frozen=True)
class End:
    """What all channels of a worker share."""

    blocks: DeviceBlocks
    pace: Pace
    is_checked: bool  # chunks have checksums
    timeout_s: float  # without an answer of the other end
    failed: Callable[[], None]  # is told of each transfer that failed
    maps: Maps | None = None  # where the receiver reads the source's memory
    fault: Callable[[], None] = lambda: None  # is called in the thread where a transfer failed by our own fault


@dataclass
class _Task(Generic[T]):
    transfer: T
    post: Post
    ordered: Mark  # what the thread that goes on with it goes behind


class Channel(ABC, Generic[T]):
    def __init__(self, meeting: Meeting, end: End, name: str) -> None:
        self._meeting, self._end, self.name = meeting, end, name
        self._group: Group | None = None
        self._changed = threading.Condition()
        self._outstanding: dict[int, _Task[T]] = {}
        self._due: deque[_Task[T]] = deque()  # of these, those that the thread has not begun
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add(self, transfer: T, post: Post) -> None:
        """Connecting is left to the thread: nothing of this waits for anybody."""
        with self._changed:
            if self._is_closed:
                self._end.failed()
                post(failed(transfer))
                return
            task = _Task(transfer, post, Mark(self._end.blocks.device))
            self._outstanding[transfer.number] = task
            self._due.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """All that is outstanding has failed; from any thread but the channel's."""
        with self._changed:
            self._is_closed = True
            self._fail(list(self._outstanding))
            self._changed.notify()
            group = self._group
        self._meeting.wake()
        if group is not None:
            group.close()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(_END_S)

    @abstractmethod
    def _perform(self, transfer: T) -> bool:
        """Whether all of it has arrived; Broken, NotOurs or Past where that is not to be known."""

    def _run(self) -> None:
        compute_alone()
        with beside_steps(self._end.blocks.device):
            while (task := self._next()) is not None:
                self._go_on_with(task)
        self._drop_group()

    def _go_on_with(self, task: _Task[T]) -> None:
        number = task.transfer.number
        try:
            task.ordered.go_behind()
            self._finish(number, self._perform(task.transfer))
        except Past:
            log.info("%s: transfer %d was given up by the other end", self.name, number)
            self._finish(number, False)
            self._meeting.give_up(number + 1)
        except (Broken, NotOurs) as error:
            self._broke(error)
        except Exception as error:  # a fault of ours ends no thread that others count on
            log.exception("%s: transfer %d", self.name, number)
            self._end.fault()
            self._broke(error)

    def _next(self) -> _Task[T] | None:
        with self._changed:
            while not self._due and not self._is_closed:
                self._changed.wait()
            return None if self._is_closed else self._due.popleft()

    def _finish(self, number: int, went_well: bool) -> None:
        with self._changed:
            task = self._outstanding.pop(number, None)
            if task is None:
                return  # it ended when the channel was closed
            if not went_well:
                self._end.failed()
                task.post(failed(task.transfer))
            else:
                task.post(self._succeeded(task.transfer))

    @abstractmethod
    def _succeeded(self, transfer: T) -> Outcome: ...

    def _broke(self, error: Exception) -> None:
        self._drop_group()
        with self._changed:
            numbers = list(self._outstanding)
            if numbers:
                log.warning("%s: transfers %s failed: %s", self.name, numbers, str(error))
            self._fail(numbers)
        if numbers:
            self._meeting.give_up(max(numbers) + 1)

    def _fail(self, numbers: list[int]) -> None:
        """Under the lock."""
        self._due.clear()
        for number in numbers:
            task = self._outstanding.pop(number)
            self._end.failed()
            task.post(failed(task.transfer))

    def _drop_group(self) -> None:
        with self._changed:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _is_outstanding(self, number: int) -> bool:
        with self._changed:
            return number in self._outstanding

    @contextmanager
    def _blocks_of(self, number: int) -> Iterator[DeviceBlocks]:
        """While they are this transfer's."""
        with self._changed:
            if number not in self._outstanding:
                raise Broken("the channel was closed")
            yield self._end.blocks
            finish(self._end.blocks.device)

    def _deadline(self) -> float:
        return time.monotonic() + self._end.timeout_s

    def _connected(self, make: Callable[[int, float], Group], number: int, deadline: float) -> Group:
        group = self._group or make(number, deadline)
        with self._changed:
            self._group = group  # from here on, closing the channel ends its waits
            if self._is_closed:
                raise Broken("the channel was closed")
        return group

    def _say(self, group: Group, number: int, says: Says) -> None:
        said = torch.frombuffer(bytearray(pack_reply(number, says)), dtype=torch.uint8)
        group.send(said, REPLY).land(self._end.timeout_s)

    def _hear(self, group: Group, number: int, timeout_s: float | None = None) -> Says:
        raw = bytearray(REPLY_BYTES)
        flight = group.receive(torch.frombuffer(raw, dtype=torch.uint8), REPLY)
        flight.land(self._end.timeout_s if timeout_s is None else timeout_s)
        return read_reply(raw, number)

    def _header(self, transfer: T) -> Header:
        blocks, kind = self._end.blocks, transfer.kind
        return header_of(
            *(transfer.number, kind, transfer.tokens, blocks.token_bytes(kind)),
            *(blocks.chunk_tokens(kind), self._end.is_checked),
        )

    def _chunks(self, transfer: T, header: Header) -> Iterator[tuple[torch.Tensor, int]]:
        """The slots of each, and its bytes."""
        slots = self._end.blocks.slots(transfer.pairs, header.num_tokens, header.kind)
        token_bytes = self._end.blocks.token_bytes(header.kind)
        for part in slots.split(header.chunk_tokens):
            yield part, len(part) * token_bytes

    def _most_bytes(self, header: Header) -> int:
        """Of a chunk without its tail."""
        return header.num_bytes // header.num_tokens * min(header.chunk_tokens, header.num_tokens)
