"""The ranks of a worker: processes that share one model, each with a part of every layer.

What they compute together is summed or put side by side here, by torch.distributed: Gloo between CPUs, NCCL between
GPUs. Rank 0 is the worker's shell and core; what it does, the others are told as bytes: nothing is unpickled.

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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from alignedserve.engine.device.groups import gloo_class, why_no_gloo
from alignedserve.errors import ConfigError, RankLost

if TYPE_CHECKING:  # torch may have been built without it
    from torch._C._distributed_c10d import Store

_FIRST = 4096  # bytes of a frame that go with its length
_LENGTH = 8  # bytes of that
_STEP = timedelta(seconds=60)  # for which a rank waits for another in the middle of a step
_MEETING = timedelta(seconds=60)
_BY_STREAM = None  # only what the GPU is given to do later waits
_NEVER = timedelta(days=365)  # a worker that has nothing to do says nothing
_TOLD = 256  # bytes of what the others tell rank 0, with its length before


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, x: torch.Tensor) -> None:
        """The sum over all ranks, in place."""

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns] of every rank, in their order: [rows, size * columns]."""

    def hand_on(self, x: torch.Tensor) -> None:
        """What rank 0 has there, all have."""

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on every rank."""

    def least(self, number: int) -> int:
        """Of what every rank says."""


class Alone:
    rank, size = 0, 1

    def total(self, x: torch.Tensor) -> None: ...

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def hand_on(self, x: torch.Tensor) -> None: ...

    def agree(self, is_so: bool) -> bool:
        return is_so

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


class Team:
    """Every rank calls the same in the same order. RankLost where another has gone, or does not come in time.

    On GPUs no CPU waits here: with a limit NCCL would hold it up until the GPU is through, twice in each layer. Who
    waits for the tokens of a step in which another rank has gone is ended by the launcher, as all ranks are then; and
    where one hangs, by NCCL itself after that time.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._limit = _BY_STREAM if device.type == "cuda" else _STEP
        self._store, self._host = store, host
        self._said = _gloo(store, "said", rank, size, host)
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, "tensors", rank, size, host)

    def total(self, x: torch.Tensor) -> None:
        _await(self._group.allreduce([x]), self._limit)

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _await(self._group.allgather([parts], [x]), self._limit)
        return torch.cat(parts, dim=1)

    def hand_on(self, x: torch.Tensor) -> None:
        _await(self._group.broadcast(x, 0), self._limit)

    def agree(self, is_so: bool) -> bool:
        """However long the others take: they may be loading."""
        disagreeing = torch.tensor([int(not is_so)], dtype=torch.int32)
        _await(self._said.allreduce([disagreeing]), _NEVER)
        return not disagreeing

    def least(self, number: int) -> int:
        """However long the others take: they may be loading."""
        from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

        options, numbers = AllreduceOptions(), torch.tensor([number], dtype=torch.int64)
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        _await(self._said.allreduce([numbers], options), _NEVER)
        return int(numbers)

    def all_say(self, text: str) -> list[str]:
        """What each says, in their order."""
        mine = _padded(text.encode())
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        _await(self._said.allgather([parts], [mine]), _NEVER)
        return [_unpadded(one).decode() for one in parts]

    def line(self) -> Line:
        """All make one, and use it beside what they do together."""
        return Line(_gloo(self._store, "told", self.rank, self.size, self._host))

    def say(self, frame: bytes) -> None:
        """Rank 0 to the others, which `hear` it."""
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        rest = frame[_FIRST - _LENGTH :]
        head = len(frame).to_bytes(_LENGTH, "little") + frame[: _FIRST - _LENGTH]
        first[: len(head)] = _tensor(head)
        self._broadcast(first)
        if rest:
            self._broadcast(_tensor(rest))

    def hear(self, most_bytes: int) -> bytes:
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

    def _broadcast(self, data: torch.Tensor) -> None:
        _await(self._said.broadcast(data, 0), _NEVER)


class Line:
    """What the other ranks tell rank 0: each in a thread of its own, and heard in one for each."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def tell(self, frame: bytes) -> None:
        _await(self._group.send([_padded(frame)], 0, 0), _NEVER)

    def hear(self, rank: int) -> bytes:
        """The next from that rank."""
        told = torch.empty(_TOLD, dtype=torch.uint8)
        _await(self._group.recv([told], rank, 0), _NEVER)
        return _unpadded(told)


def meet(at: str, life: str, rank: int, size: int, device: torch.device) -> Team:
    """At host:port, where rank 0 of this life keeps the store by which they find each other."""
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


def _padded(frame: bytes) -> torch.Tensor:
    if len(frame) > _TOLD - _LENGTH:
        raise AssertionError(f"{len(frame)} bytes are more than one rank tells at once")
    return _tensor((len(frame).to_bytes(_LENGTH, "little") + frame).ljust(_TOLD, b"\0"))


def _unpadded(told: torch.Tensor) -> bytes:
    read = bytes(told.numpy())
    return read[_LENGTH : _LENGTH + int.from_bytes(read[:_LENGTH], "little")]


def _tensor(data: bytes) -> torch.Tensor:
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

    if (lack := why_no_gloo()) is not None:
        raise ConfigError(f"engine.tensor_parallel_size {size} is more than this torch can do: {lack}: set it to 1")
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
