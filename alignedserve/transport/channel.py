"""A channel: one direction between two workers, whose transfers run one after the other in a thread.

    shell ── add(transfer) ──▶ channel's thread ── post(KvSent | KvReceived) ──▶ shell

Every added transfer ends with exactly one event. When the connection breaks (the other end is gone, or silent for
`timeout_s`), all outstanding transfers fail, the group is closed, and later transfers go over a new group (meeting.py).
Closing the channel fails all of them at once.

The thread touches blocks only while their transfer is outstanding, under the lock under which the transfer also ends:
once its event is posted, the blocks belong to the core again. On a GPU the channel copies on a stream of its own,
behind what the shell had ordered when the transfer was added; whoever ends the transfer waits for the copies that were
ordered, once.
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

from alignedserve.engine.device.devices import Mark, beside_steps
from alignedserve.engine.device.groups import BrokenGroup, Carrier, Group
from alignedserve.engine.device.pace import CopyPace
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.transport.frames import (
    REPLY,
    REPLY_BYTES,
    TURN,
    TURN_BYTES,
    NotOurs,
    Reply,
    TransferHeader,
    header_of,
    pack_reply,
    pack_turn,
    read_reply,
    read_turn,
)
from alignedserve.transport.mapping import Maps
from alignedserve.transport.meeting import GivenUpByPeer, Meeting
from alignedserve.transport.payload import ChunkBuffers, DeviceBlocks, added
from alignedserve.transport.transport import Outcome, Post, failed
from alignedserve.transport.turns import Communicators

log = logging.getLogger("alignedserve.transport")

_END_S = 5.0  # time for the thread to end

T = TypeVar("T", SendKv, ReceiveKv)


@dataclass(frozen=True)
class ChannelSettings:
    """The settings that all channels of a worker share."""

    blocks: DeviceBlocks
    pace: CopyPace
    is_checked: bool  # whether both ends sum up the KV
    timeout_s: float  # longest wait for the other end
    failed: Callable[[], None]  # called for each transfer that failed
    maps: Maps | None = None  # set where the receiver reads the source's memory
    fault: Callable[[], None] = lambda: None  # called in the thread when a transfer failed by our own fault
    communicators: Communicators | None = None  # set where chunks go over NCCL


@dataclass
class _Task(Generic[T]):
    transfer: T
    post: Post
    ordered: Mark  # device work that the copy must come after


class Channel(ABC, Generic[T]):
    def __init__(self, meeting: Meeting, end: ChannelSettings, name: str) -> None:
        self._meeting, self._end, self.name = meeting, end, name
        self._group: Group | None = None
        self._changed = threading.Condition()
        self._outstanding: dict[int, _Task[T]] = {}
        self._due: deque[_Task[T]] = deque()  # outstanding tasks that the thread has not begun
        self._is_closed = False
        self._ordered = Mark(end.blocks.device)  # behind all copies that were ordered so far
        self._thread: threading.Thread | None = None

    def add(self, transfer: T, post: Post) -> None:
        """Queue a transfer. The thread connects, so this call does not wait."""
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
        """Fail all outstanding transfers. Any thread but the channel's may call this."""
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
        """Run the transfer, and return whether all of it arrived; raise where that is unknown."""

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
        except GivenUpByPeer:
            log.info("%s: the other end gave up transfer %d", self.name, number)
            self._finish(number, False)
            self._meeting.give_up(number + 1)
        except (BrokenGroup, NotOurs) as error:
            self._broke(error)
        except BaseException as error:  # our own fault must not end the thread
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
                return  # the transfer ended when the channel was closed
            self._ordered.wait()
            if not went_well:
                self._end.failed()
                task.post(failed(task.transfer))
            else:
                task.post(self._succeeded(task.transfer))

    @abstractmethod
    def _succeeded(self, transfer: T) -> Outcome: ...

    def _broke(self, error: BaseException) -> None:
        self._drop_group()
        with self._changed:
            numbers = list(self._outstanding)
            if numbers:
                log.warning("%s: transfers %s failed: %s", self.name, numbers, str(error))
            self._fail(numbers)
        if numbers:
            self._meeting.give_up(max(numbers) + 1)

    def _fail(self, numbers: list[int]) -> None:
        """Fail these transfers; the caller has the lock."""
        self._due.clear()
        self._ordered.wait()
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
        """Yield the blocks while they belong to this transfer."""
        with self._changed:
            if number not in self._outstanding:
                raise BrokenGroup("the channel was closed")
            yield self._end.blocks
            self._ordered = Mark(self._end.blocks.device)

    def _deadline(self) -> float:
        return time.monotonic() + self._end.timeout_s

    def _connected(self, make: Callable[[int, float], Group], number: int, deadline: float) -> Group:
        group = self._group or make(number, deadline)
        with self._changed:
            self._group = group  # from here on, closing the channel ends waits on the group
            if self._is_closed:
                raise BrokenGroup("the channel was closed")
        return group

    def _send_frame(self, group: Group, tag: int, data: bytes) -> None:
        group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), tag).land(self._end.timeout_s)

    def _next_frame(self, group: Group, tag: int, num_bytes: int, timeout_s: float | None = None) -> bytearray:
        raw = bytearray(num_bytes)
        flight = group.receive(torch.frombuffer(raw, dtype=torch.uint8), tag)
        flight.land(self._end.timeout_s if timeout_s is None else timeout_s)
        return raw

    def _say(self, group: Group, number: int, says: Reply) -> None:
        self._send_frame(group, REPLY, pack_reply(number, says))

    def _hear(self, group: Group, number: int, timeout_s: float | None = None) -> Reply:
        return read_reply(self._next_frame(group, REPLY, REPLY_BYTES, timeout_s), number)

    @contextmanager
    def _carrier(self, group: Group, number: int) -> Iterator[Carrier]:
        """Yield what carries the chunks: the group, or the pair's communicator once both ends have their turn."""
        communicators, peer, timeout_s = self._end.communicators, self._meeting.peer, self._end.timeout_s
        if communicators is None:
            yield group
        elif self._meeting.is_first:
            with communicators.turn(timeout_s):
                said, says = 0, Reply.NO
                while says is Reply.NO:
                    said = communicators.next(peer, after=said)
                    self._send_frame(group, TURN, pack_turn(number, said))
                    says = self._hear(group, number)
                with communicators.of(peer, said, self._meeting) as carrier:
                    yield carrier
        else:
            said = self._hear_turn(group, number)
            with communicators.turn(timeout_s):
                while not communicators.agrees(peer, said):
                    self._say(group, number, Reply.NO)
                    said = self._hear_turn(group, number)
                self._say(group, number, Reply.YES)
                with communicators.of(peer, said, self._meeting) as carrier:
                    yield carrier

    def _hear_turn(self, group: Group, number: int) -> int:
        return read_turn(self._next_frame(group, TURN, TURN_BYTES), number)

    def _checksum(self, transfer: T, header: TransferHeader) -> int:
        """Return the checksum of the transfer's KV in this worker's blocks."""
        buffers, checksum = ChunkBuffers(self._most_bytes(header), self._end.blocks.device), 0
        for index, (slots, num_bytes) in enumerate(self._chunks(transfer, header)):
            chunk = buffers.chunk(index, num_bytes)
            with self._end.pace.turn(), self._blocks_of(header.number) as blocks:
                checksum = added(checksum, blocks.gather(slots, chunk, is_checked=True))
        return checksum

    def _header(self, transfer: T) -> TransferHeader:
        blocks = self._end.blocks
        return header_of(
            transfer.number, transfer.tokens, blocks.token_bytes, blocks.chunk_tokens, self._end.is_checked
        )

    def _chunks(self, transfer: T, header: TransferHeader) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the slots of each chunk, and its bytes."""
        slots = self._end.blocks.slots(transfer.blocks, header.num_tokens)
        token_bytes = self._end.blocks.token_bytes
        for part in slots.split(header.chunk_tokens):
            yield part, len(part) * token_bytes

    def _most_bytes(self, header: TransferHeader) -> int:
        """Return the most bytes of a chunk."""
        return header.num_bytes // header.num_tokens * min(header.chunk_tokens, header.num_tokens)
