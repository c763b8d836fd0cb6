"""Two-rank process groups of torch.distributed: who sends is rank 0, who receives is rank 1.

A group is made directly, so there may be as many as there are pairs, and none is the process's own. What the two say to
each other goes over Gloo; KV goes over Gloo too where it is on CPUs, and over NCCL between GPUs. Rules, which this file
knows and hides:

Of Gloo
- What a wait raises is a RuntimeError, whatever has happened; after a time-out the connection is closed at both ends.
- So a time-out on purpose is how a wait of another thread is ended (`close`); `abort` does not do that.
- One device, and with it one thread that moves bytes, serves all groups of a process.

Of NCCL (not yet run: docs/how/gpu.md)
- What is sent occupies a part of the GPU until the other end receives it. So the receiver asks for each chunk first
  (`asks_first`), and the notes of that go over Gloo.
- A wait holds up the current stream, not the thread: whether something has landed is looked up, with pauses, so that a
  peer that has gone holds up nobody. What has landed is ordered before what the thread's stream does next.
- By itself torch would end this process when a peer's death breaks a group: it is told not to.
- Two processes on one GPU cannot have a group.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from alignedserve.engine.device.devices import CPU

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

LOOP_THREAD = "gloo_tcp_loop"  # the device's
_NEVER_USED = 7  # a tag
_AT_ONCE = timedelta(milliseconds=1)
_LOOK_S = 0.0001  # between two looks at whether NCCL is through
_OURS_TO_HANDLE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class BrokenGroup(Exception):
    """The other end is gone or does not answer; what was under way may have arrived or not."""


def why_no_gloo() -> str | None:
    """Why there are no groups here; None where there are."""
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    return None if torch.distributed.is_gloo_available() else "this torch was built without Gloo"


def why_no_nccl() -> str | None:
    """Why there are none between GPUs."""
    if (lack := why_no_gloo()) is not None:
        return lack
    return None if torch.distributed.is_nccl_available() else "this torch was built without NCCL"


class Flight:
    """Bytes on their way."""

    def __init__(self, wait: Callable[[timedelta], bool]) -> None:
        self._wait = wait

    def land(self, timeout_s: float) -> None:
        try:
            self._wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise BrokenGroup(_what(error)) from None


class Group:
    def __init__(self, store: Store, rank: int, host: str, timeout_s: float, device: torch.device = CPU) -> None:
        """Connect from `host`, this end's own address; chunks of KV are on `device`.

        Raises BrokenGroup where the other end does not come in time.
        """
        gloo = gloo_class()
        options = gloo._Options()
        options._devices = [_device(host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collectives, of which there are none
        self._peer, self._is_closed = 1 - rank, False
        try:
            self._gloo = gloo(store, rank, 2, options)
            self._nccl = _nccl(store, rank) if device.type == "cuda" else None
        except RuntimeError as error:
            raise BrokenGroup(_what(error)) from None

    @property
    def asks_first(self) -> bool:
        """Whether a chunk is sent when the other end has said that it waits for it, and not before."""
        return self._nccl is not None

    def send(self, data: torch.Tensor, tag: int) -> Flight:
        return self._begin("send", data, tag)

    def receive(self, into: torch.Tensor, tag: int) -> Flight:
        return self._begin("recv", into, tag)

    def close(self) -> None:
        """From any thread: whoever waits, at either end, finds it broken."""
        self._is_closed = True
        with suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_USED).wait(_AT_ONCE)
        if self._nccl is not None:
            with suppress(RuntimeError):
                self._nccl.abort()

    def _begin(self, how: str, data: torch.Tensor, tag: int) -> Flight:
        over = self._gloo if data.device.type == "cpu" else self._nccl
        try:
            work = getattr(over, how)([data], self._peer, tag)
        except RuntimeError as error:
            raise BrokenGroup(_what(error)) from None
        return Flight(work.wait if over is self._gloo else partial(self._look, work))

    def _look(self, work: Any, limit: timedelta) -> bool:
        """Until NCCL has moved it: a wait of NCCL's own would have no end where the peer has gone."""
        deadline = time.monotonic() + limit.total_seconds()
        while not work.is_completed():
            if self._is_closed:
                raise RuntimeError("the group was closed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came or went within {limit.total_seconds():g} s")
            time.sleep(_LOOK_S)
        work.wait()  # orders this thread's stream behind it, and raises what went wrong
        if self._is_closed:  # and what was given up with it counts as completed
            raise RuntimeError("the group was closed")
        return True


def gloo_class() -> Any:  # whose types torch does not know in full
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo


def _nccl(store: Store, rank: int) -> Any:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    os.environ.update(_OURS_TO_HANDLE)  # read as the group is made
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, 2, ProcessGroupNCCL.Options())


@cache
def _device(host: str) -> Any:
    return gloo_class().create_device(hostname=host)


def _what(error: Exception) -> str:
    """Without where in torch it was raised, and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", line).partition(" This is typically ")[0]
