"""Connections of two workers, over which KV travels.

Notes between the two go over a `Group`, and so does KV between CPUs; over NCCL goes KV between GPUs. Rules that this
file knows and hides:

Group
- It is a socket of the two, which have proved to each other who they are (transport/joining.py).
- The thread that calls moves the frames, so the pace of copies counts what that costs. Frames land in the order in
  which they were sent, and another one than the awaited one breaks the group.

NCCL (not yet run: docs/guides/gpus.md)
- A send occupies a part of the GPU until the other end receives it. So the receiver asks for chunks first
  (`asks_first`), and its notes go over the group.
- Communicators of one GPU must not work at the same time (transport/turns.py).
- A wait blocks the current stream, not the thread. So the thread polls, with pauses, whether the data has landed, and a
  lost peer blocks nothing. Landed data is ordered before what the thread's stream does next.
- By default torch ends this process when a peer's death breaks a group: this is switched off.
- Two processes on one GPU cannot have a group.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from alignedserve.engine.device.devices import CPU

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

_HEAD = struct.Struct("=IQ")  # a frame's tag and its bytes
_LOOK_S = 0.0001  # between two polls of NCCL
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class BrokenGroup(Exception):
    """The other end is lost or does not answer; data under way may have arrived or not."""


def why_no_stores() -> str | None:
    """Return why this torch has no stores, by which NCCL's ends meet (transport/turns.py); None where it has."""
    return None if torch.distributed.is_available() else "this torch was built without torch.distributed"


def why_no_nccl() -> str | None:
    """Return why this torch has no NCCL; None where it has."""
    if (reason := why_no_stores()) is not None:
        return reason
    return None if torch.distributed.is_nccl_available() else "this torch was built without NCCL"


class Flight:
    """A transfer of bytes under way."""

    def __init__(self, wait: Callable[[timedelta], bool]) -> None:
        self._wait = wait

    def land(self, timeout_s: float) -> None:
        """Wait until the bytes have arrived."""
        with _breaking():
            self._wait(timedelta(seconds=max(timeout_s, 0.001)))


class Carrier(Protocol):
    """A connection of two processes that carries KV."""

    device: torch.device  # of the chunks
    asks_first: bool  # whether a chunk may be sent only after the other end has said that it waits for it

    def send(self, data: Tensor, tag: int) -> Flight:
        """Begin to send the tensor to the other end."""

    def receive(self, into: Tensor, tag: int) -> Flight:
        """Begin to receive a tensor of the other end."""

    def close(self) -> None:
        """Close it from any thread: a wait at either end finds it broken."""


class Group:
    """A connection for notes and for KV on CPUs."""

    device, asks_first = CPU, False

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        """Take over a TCP connection of the two. The group breaks if a send takes longer than the time-out."""
        self._link, self._timeout_s = link, timeout_s
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __del__(self) -> None:
        self._link.close()  # not earlier: another thread may wait on it

    def send(self, data: Tensor, tag: int) -> Flight:
        with _breaking():
            self._link.settimeout(self._timeout_s)
            self._link.sendall(_HEAD.pack(tag, data.numel()), socket.MSG_MORE)
            self._link.sendall(_bytes_of(data))
        return Flight(lambda _: True)

    def receive(self, into: Tensor, tag: int) -> Flight:
        """Receive a tensor of bytes of the other end as the flight lands. Flights land in the order of their calls."""
        return Flight(partial(self._read, into, tag))

    def close(self) -> None:
        with suppress(OSError):  # the other end has gone
            self._link.shutdown(socket.SHUT_RDWR)

    def _read(self, into: Tensor, tag: int, limit: timedelta) -> bool:
        self._link.settimeout(limit.total_seconds())
        self._fill(memoryview(head := bytearray(_HEAD.size)))
        if (came := _HEAD.unpack(head)) != (tag, into.numel()):
            raise RuntimeError(f"a frame of kind {came[0]} and {came[1]} bytes came, not {tag} and {into.numel()}")
        self._fill(_bytes_of(into))
        return True

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            if not (num_read := self._link.recv_into(view)):
                raise RuntimeError("the other end has closed the connection")
            view = view[num_read:]


class Communicator:
    """A connection of two GPUs over NCCL, for both directions."""

    asks_first = True

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self.device, self._peer, self._is_closed = device, 1 - rank, False
        self._store = store  # torch keeps no store of Python alive
        with _breaking():
            self._nccl = _nccl(store, rank)

    def send(self, data: Tensor, tag: int) -> Flight:
        with _breaking():
            return Flight(partial(self._poll, self._nccl.send([data], self._peer, tag)))

    def receive(self, into: Tensor, tag: int) -> Flight:
        with _breaking():
            return Flight(partial(self._poll, self._nccl.recv([into], self._peer, tag)))

    def close(self) -> None:
        self._is_closed = True
        with suppress(RuntimeError):
            self._nccl.abort()

    def _poll(self, work: Any, limit: timedelta) -> bool:
        """Poll until NCCL has moved the data: NCCL's own wait would never end if the peer is lost."""
        deadline = time.monotonic() + limit.total_seconds()
        while not work.is_completed():
            if self._is_closed:
                raise RuntimeError("the group was closed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no data was sent or received within {limit.total_seconds():g} s")
            time.sleep(_LOOK_S)
        work.wait()  # orders this thread's stream behind the transfer, and raises its error
        if self._is_closed:  # work that was given up with the group counts as completed
            raise RuntimeError("the group was closed")
        return True


@contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise BrokenGroup(_reason(error)) from None


def _nccl(store: Store, rank: int) -> Any:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    os.environ.update(_NCCL_SETTINGS)  # read as the group is made
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, 2, ProcessGroupNCCL.Options())


def _bytes_of(data: Tensor) -> memoryview:
    memory: Any = data.numpy()  # of bytes already: notes and chunks are
    return memoryview(memory)


def _reason(error: Exception) -> str:
    """Return the message of the error without its place in torch and without its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", line).partition(" This is typically ")[0]
