"""Two-rank process groups of torch.distributed: the sender is rank 0, the receiver is rank 1.

A group is built directly, so there may be as many groups as pairs of processes, and none is the default group of its
process. Notes between the two go over Gloo, and so does KV between CPUs; over NCCL goes KV between GPUs. Rules that
this file knows and hides:

Gloo
- A wait raises RuntimeError, whatever has happened; after a time-out the connection is closed at both ends.
- So `close` ends a wait of another thread by a time-out on purpose; `abort` does not do that.
- One device, and with it one thread that moves bytes, serves all groups of a process.

NCCL (not yet run: docs/how/gpu.md)
- A send occupies a part of the GPU until the other end receives it. So the receiver asks for chunks first
  (`asks_first`), and its notes go over Gloo.
- Communicators of one GPU must not work at the same time (transport/turns.py).
- A wait blocks the current stream, not the thread. So the thread polls, with pauses, whether the data has landed, and a
  lost peer blocks nothing. Landed data is ordered before what the thread's stream does next.
- By default torch ends this process when a peer's death breaks a group: this is switched off.
- Two processes on one GPU cannot have a group.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from alignedserve.engine.device.devices import CPU

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

LOOP_THREAD = "gloo_tcp_loop"  # name of the thread of Gloo's device
_NEVER_USED = 7  # a tag
_AT_ONCE = timedelta(milliseconds=1)
_LOOK_S = 0.0001  # between two polls of NCCL
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class BrokenGroup(Exception):
    """The other end is lost or does not answer; data under way may have arrived or not."""


def why_no_gloo() -> str | None:
    """Return why this torch has no groups; None where it has."""
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    return None if torch.distributed.is_gloo_available() else "this torch was built without Gloo"


def why_no_nccl() -> str | None:
    """Return why this torch has no groups between GPUs; None where it has."""
    if (reason := why_no_gloo()) is not None:
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
    """A connection over Gloo, for notes and for KV on CPUs."""

    device, asks_first = CPU, False

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        """Connect from `host`, this end's own address. Raises BrokenGroup if the other end does not connect in time."""
        gloo = gloo_class()
        options = gloo._Options()
        options._devices = [_device(host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collectives, which this group never runs
        self._peer = 1 - rank
        with _breaking():
            self._gloo = gloo(store, rank, 2, options)

    def send(self, data: Tensor, tag: int) -> Flight:
        with _breaking():
            return Flight(self._gloo.send([data], self._peer, tag).wait)

    def receive(self, into: Tensor, tag: int) -> Flight:
        with _breaking():
            return Flight(self._gloo.recv([into], self._peer, tag).wait)

    def close(self) -> None:
        with suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_USED).wait(_AT_ONCE)


class Communicator:
    """A connection of two GPUs over NCCL, for both directions."""

    asks_first = True

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self.device, self._peer, self._is_closed = device, 1 - rank, False
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
    except RuntimeError as error:
        raise BrokenGroup(_reason(error)) from None


def gloo_class() -> Any:  # Any: torch does not declare all of its attributes
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo


def _nccl(store: Store, rank: int) -> Any:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    os.environ.update(_NCCL_SETTINGS)  # read as the group is made
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, 2, ProcessGroupNCCL.Options())


@cache
def _device(host: str) -> Any:
    return gloo_class().create_device(hostname=host)


def _reason(error: Exception) -> str:
    """Return the message of the error without its place in torch and without its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", line).partition(" This is typically ")[0]
