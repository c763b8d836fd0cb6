"""The ranks of a worker: processes that share one model, each with a part of every layer.

This file sums their results or puts them side by side, by torch.distributed: Gloo between CPUs, NCCL between GPUs.
Rank 0 holds the worker's shell and core; it tells the other ranks what to do as plain bytes: nothing is unpickled.

    layer              each rank has                 afterwards
    query, key, value  the rows of its heads         nothing: they attend to their own K and V
    gate, up           some of the rows
    out, down          the same columns              outputs are summed
    embedding          all of it
    logits             the rows of its words         put side by side
    tokens             drawn by rank 0               handed on, where the next step begins before they are read
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alignedserve.engine.device.groups import gloo_class, why_no_gloo
from alignedserve.errors import ConfigError, RankLost

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

_FIRST = 4096  # bytes of the first message of a frame, which begins with the frame's length
_LENGTH = 8  # bytes of a length
_STEP = timedelta(seconds=60)  # how long a rank waits for another in the middle of a step
_MEETING = timedelta(seconds=60)
_BY_STREAM = None  # no limit: the GPU's stream waits, not the CPU
_NEVER = timedelta(days=365)  # an idle worker sends nothing
_TOLD = 1024  # bytes of a message to rank 0, its length included: an address names the GPUs that it reaches


class RankLinks:
    """The ranks of a worker, as the engine of one rank sees them; here there is this rank alone."""

    rank, size = 0, 1

    def total(self, x: Tensor) -> None:
        """Sum the tensor over all ranks, in place."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """Join [rows, columns] of every rank, in order of rank, to [rows, size * columns]."""
        return x

    def hand_on(self, x: Tensor) -> None:
        """Copy the tensor of rank 0 to all ranks."""

    def agree(self, is_so: bool) -> bool:
        """Return whether it is so on every rank."""
        return is_so

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks."""
        return number


ALONE = RankLinks()


class Team(RankLinks):
    """The ranks of one worker: all call the same methods in the same order.

    A method raises RankLost if another rank is lost or does not answer in time. On GPUs no CPU waits here: with a limit
    NCCL would block it until the GPU is done, twice in each layer. If a rank is lost during a step, the launcher ends
    all ranks, also those that wait for its tokens; if a rank hangs, NCCL ends those that wait after `_STEP`.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._limit = _BY_STREAM if device.type == "cuda" else _STEP
        self._store, self._host = store, host
        self._said = _gloo(store, "said", rank, size, host)
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, "tensors", rank, size, host)

    def total(self, x: Tensor) -> None:
        _await(self._group.allreduce([x]), self._limit)

    def side_by_side(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _await(self._group.allgather([parts], [x]), self._limit)
        return torch.cat(parts, dim=1)

    def hand_on(self, x: Tensor) -> None:
        _await(self._group.broadcast(x, 0), self._limit)

    def agree(self, is_so: bool) -> bool:
        """Return whether it is so on every rank; wait without limit, since other ranks may be loading."""
        disagreeing = torch.tensor([int(not is_so)], dtype=torch.int32)
        _await(self._said.allreduce([disagreeing]), _NEVER)
        return not disagreeing

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks; wait without limit, since other ranks may be loading."""
        from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

        options, numbers = AllreduceOptions(), torch.tensor([number], dtype=torch.int64)
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        _await(self._said.allreduce([numbers], options), _NEVER)
        return int(numbers)

    def all_say(self, text: str) -> list[str]:
        """Exchange a text between all ranks and return the texts in order of rank."""
        own = _padded(text.encode())
        parts = [torch.empty_like(own) for _ in range(self.size)]
        _await(self._said.allgather([parts], [own]), _NEVER)
        return [_unpadded(part).decode() for part in parts]

    def line(self) -> RankLine:
        """Build a line to rank 0 for use beside the steps; every rank builds it."""
        return RankLine(_gloo(self._store, "told", self.rank, self.size, self._host))

    def say(self, frame: bytes) -> None:
        """Send a frame from rank 0 to the other ranks, which receive it by `hear`."""
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        rest = frame[_FIRST - _LENGTH :]
        head = len(frame).to_bytes(_LENGTH, "little") + frame[: _FIRST - _LENGTH]
        first[: len(head)] = _tensor(head)
        self._broadcast(first)
        if rest:
            self._broadcast(_tensor(rest))

    def hear(self, most_bytes: int) -> bytes:
        """Receive the next frame of rank 0; more than `most_bytes` raise RankLost."""
        first = torch.empty(_FIRST, dtype=torch.uint8)
        self._broadcast(first)
        read = bytes(first.numpy())
        length = int.from_bytes(read[:_LENGTH], "little")
        if length > most_bytes:
            raise RankLost(f"rank 0 says {length} bytes at once, the limit is {most_bytes}: this rank ends")
        frame = read[_LENGTH : _LENGTH + length]
        if len(frame) < length:
            rest = torch.empty(length - len(frame), dtype=torch.uint8)
            self._broadcast(rest)
            frame += bytes(rest.numpy())
        return frame

    def _broadcast(self, data: Tensor) -> None:
        _await(self._said.broadcast(data, 0), _NEVER)


class RankLine:
    """Messages of the other ranks to rank 0: each rank sends in its own thread, and rank 0 has a thread for each."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def tell(self, frame: bytes) -> None:
        """Send a message to rank 0."""
        _await(self._group.send([_padded(frame)], 0, 0), _NEVER)

    def hear(self, rank: int) -> bytes:
        """Receive the next message of that rank."""
        told = torch.empty(_TOLD, dtype=torch.uint8)
        _await(self._group.recv([told], rank, 0), _NEVER)
        return _unpadded(told)


def meet(at: str, life: str, rank: int, size: int, device: torch.device) -> Team:
    """Connect the ranks of this life; rank 0 keeps the store at host:port by which they find each other."""
    from torch._C._distributed_c10d import PrefixStore

    host, _, port = at.rpartition(":")
    store = _made(partial(_store, host, int(port), is_first=rank == 0))
    return Team(PrefixStore(life, store), rank, size, host, device)


def _store(host: str, port: int, *, is_first: bool) -> Store:
    from torch._C._distributed_c10d import TCPStore

    if not is_first:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_MEETING)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher keeps the port bound
    listening.bind((host, port))
    listening.listen()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _padded(frame: bytes) -> Tensor:
    if len(frame) > _TOLD - _LENGTH:
        raise AssertionError(f"{len(frame)} bytes are more than a rank sends to rank 0 in one message")
    return _tensor((len(frame).to_bytes(_LENGTH, "little") + frame).ljust(_TOLD, b"\0"))


def _unpadded(told: Tensor) -> bytes:
    read = bytes(told.numpy())
    return read[_LENGTH : _LENGTH + int.from_bytes(read[:_LENGTH], "little")]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _await(work: Any, limit: timedelta | None) -> None:
    try:
        work.wait() if limit is _BY_STREAM else work.wait(limit)
    except RuntimeError as error:
        raise RankLost(f"another rank of this worker has gone or does not answer: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _gloo(store: Store, name: str, rank: int, size: int, host: str) -> Any:
    from torch._C._distributed_c10d import PrefixStore

    if (reason := why_no_gloo()) is not None:
        raise ConfigError(f"engine.tensor_parallel_size {size} is more than this torch can do: {reason}: set it to 1")
    gloo = gloo_class()
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = _NEVER
    options._threads = 1
    return _made(lambda: gloo(PrefixStore(name, store), rank, size, options))


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _STEP
    return _made(lambda: ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, options))


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RuntimeError as error:
        raise RankLost(f"the ranks of this worker do not meet: {_line(error)}") from None
