"""Two-rank process groups of torch.distributed: who sends is rank 0, who receives is rank 1.

A group is made directly, so there may be as many as there are pairs, and none is the process's own. Gloo's rules, which
this file knows and hides:

- What a wait raises is a RuntimeError, whatever has happened; after a time-out the connection is closed at both ends.
- So a time-out on purpose is how a wait of another thread is ended (`close`); `abort` does not do that.
- One device, and with it one thread that moves bytes, serves all groups of a process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

LOOP_THREAD = "gloo_tcp_loop"  # the device's
_NEVER_USED = 7  # a tag
_AT_ONCE = timedelta(milliseconds=1)


class Broken(Exception):
    """The other end has gone, or does not answer; what was under way may have arrived or not."""


def why_no_gloo() -> str | None:
    """Why there are no groups here; None where there are."""
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    return None if torch.distributed.is_gloo_available() else "this torch was built without Gloo"


class Flight:
    """Bytes on their way."""

    def __init__(self, wait: Callable[[timedelta], bool]) -> None:
        self._wait = wait

    def land(self, timeout_s: float) -> None:
        try:
            self._wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise Broken(_what(error)) from None


class Group:
    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        """`host` is this end's own address. Broken where the other end does not come in time."""
        gloo = gloo_class()
        options = gloo._Options()
        options._devices = [_device(host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collectives, of which there are none
        self._peer = 1 - rank
        try:
            self._gloo = gloo(store, rank, 2, options)
        except RuntimeError as error:
            raise Broken(_what(error)) from None

    def send(self, data: torch.Tensor, tag: int) -> Flight:
        return self._begin(self._gloo.send, data, tag)

    def receive(self, into: torch.Tensor, tag: int) -> Flight:
        return self._begin(self._gloo.recv, into, tag)

    def close(self) -> None:
        """From any thread: whoever waits, at either end, finds it broken."""
        with suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_USED).wait(_AT_ONCE)

    def _begin(self, how: Callable[..., Any], data: torch.Tensor, tag: int) -> Flight:
        try:
            return Flight(how([data], self._peer, tag).wait)
        except RuntimeError as error:
            raise Broken(_what(error)) from None


def gloo_class() -> Any:  # whose types torch does not know in full
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo


@cache
def _device(host: str) -> Any:
    return gloo_class().create_device(hostname=host)


def _what(error: Exception) -> str:
    """Without where in torch it was raised, and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", line).partition(" This is typically ")[0]
