"""The ranks of a worker: processes that share one model, each with a part of every layer.

This file sums their results or puts them side by side: over sockets between CPUs, over NCCL between GPUs, whose sums of
few rows may go through each other's memory (shared_sums.py). Between CPUs each rank sends its part to every other, and
all sum in order of rank, so all have the same bits. Rank 0 holds the worker's shell and core; it tells the other ranks
what to do as plain bytes: nothing is unpickled. How ranks connect: transport/joining.py.

    layer              each rank has                 afterwards
    query, key, value  the rows of its heads         nothing: they attend to their own K and V
    gate, up           some of the rows
    out, down          the same columns              outputs are summed
    embedding          all of it
    logits             the rows of its words         put side by side
    tokens             drawn by rank 0               handed on, where the next step begins before they are read
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, reduce
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from alignedserve.engine.device.groups import why_no_nccl
from alignedserve.engine.device.rank_link import SHORT, RankLink, TeamLinks, lose
from alignedserve.errors import ConfigError, RankGaveUp

OTHER_RANK = "another rank of this worker cannot do it"
_STEP = timedelta(seconds=60)  # how long a rank waits for another in the middle of a step


class RankLinks:
    """The ranks of a worker, as the engine of one rank sees them; here there is this rank alone."""

    rank, size = 0, 1
    captures = True  # whether what this does in the middle of a step can be captured
    is_apart = False  # whether it waits for no other rank

    def total(self, x: Tensor) -> None:
        """Sum the tensor over all ranks, in place."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """Join [rows, columns] of every rank, in order of rank, to [rows, size * columns]."""
        return x

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Wait for no other rank within: sums and joins take their memory, and their results are of no use."""
        yield

    def hand_on(self, x: Tensor) -> None:
        """Copy the tensor of rank 0 to all ranks."""

    def agree(self, is_so: bool) -> bool:
        """Return whether it is so on every rank."""
        return is_so

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks."""
        return number

    def all_say(self, text: str) -> list[str]:
        """Exchange a text between all ranks and return the texts in order of rank."""
        return [text]

    def together(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks, 0 or more; RankGaveUp where another rank has given up."""
        if (found := self.least(number)) < 0:
            raise RankGaveUp(OTHER_RANK)
        return found

    def give_up(self) -> None:
        """End what all ranks do together: on each other rank the next `together` raises RankGaveUp."""
        self.least(-1)


ALONE = RankLinks()


class Team(RankLinks):
    """The ranks of one worker: all call the same methods in the same order.

    A method raises RankLost if another rank is lost or does not answer in time. On GPUs no CPU waits here: with a limit
    NCCL would block it until the GPU is done, twice in each layer. If a rank is lost during a step, the launcher ends
    all ranks, also those that wait for its tokens; if a rank hangs, NCCL ends those that wait after `_STEP`, but for
    captured steps, whose end rank 0 waits for.

    NCCL works in the stream of the step, not beside it, so a graph holds its kernels between those of the layers. What
    is captured and what is not go through one communicator, which orders them as the stream does. Connections are made
    when something is first summed or gathered, so each step runs before it is captured. A rank that fails in the middle
    of such a step leaves the others waiting, so it is tried `apart` first.
    """

    def __init__(self, rank: int, size: int, links: TeamLinks, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.told = links.told  # messages to rank 0 beside the steps: each rank sends, and rank 0 hears, in a thread
        self._said = links.said
        self._peers = {other: links.tensors[other].socket for other in sorted(links.tensors)}
        self.captures = on_gpu = device.type == "cuda"
        # The store is kept here: torch keeps none of Python alive.
        self._nccl, self._store = _nccl(links.tensors, rank, size) if on_gpu else (None, None)
        if not on_gpu:
            for peer in self._peers.values():
                peer.setblocking(False)

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.is_apart = True
        try:
            yield
        finally:
            self.is_apart = False

    def total(self, x: Tensor) -> None:
        if self.is_apart:
            return
        if self._nccl is not None:
            _queue(self._nccl.allreduce, [x], _in_stream("AllreduceOptions"))
        else:
            *before, last = self._exchanged(x)
            torch.add(reduce(Tensor.add_, before), last, out=x)

    def side_by_side(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._nccl is None:
            return torch.cat([x] * self.size if self.is_apart else self._exchanged(x), dim=1)
        parts = x.new_empty((self.size, *x.shape))
        if not self.is_apart:
            _queue(self._nccl._allgather_base, parts, x, _in_stream("AllgatherOptions"))
        return parts.transpose(0, 1).flatten(1)

    def hand_on(self, x: Tensor) -> None:
        if self._nccl is not None:
            _queue(self._nccl.broadcast, [x], _in_stream("BroadcastOptions"))
        elif self.rank:
            _move({}, {self._peers[0]: _bytes_of(x)})
        else:
            _move(dict.fromkeys(self._peers.values(), _bytes_of(x)), {})

    def agree(self, is_so: bool) -> bool:
        return self.least(int(is_so)) == 1

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks; wait without limit, since other ranks may be loading."""
        return min(map(int, self.all_say(str(number))))

    def all_say(self, text: str) -> list[str]:
        if self.rank:
            self._said[0].tell(text.encode())
            return list(json.loads(self.hear(self.size * SHORT)))
        texts = [text, *(self._said[other].hear(SHORT).decode() for other in sorted(self._said))]
        self.say(json.dumps(texts).encode())
        return texts

    def say(self, frame: bytes) -> None:
        """Send a frame from rank 0 to the other ranks, which receive it by `hear`."""
        for link in self._said.values():
            link.tell(frame)

    def hear(self, most_bytes: int) -> bytes:
        """Receive the next frame of rank 0; more than `most_bytes` raise RankLost."""
        return self._said[0].hear(most_bytes)

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        """Send the tensor to all other ranks, and return the tensors of all in order of rank; this one is `x`."""
        parts = {other: torch.empty_like(x) for other in self._peers}
        own, into = _bytes_of(x), {peer: _bytes_of(parts[other]) for other, peer in self._peers.items()}
        _move(dict.fromkeys(into, own), into)
        return [parts.get(rank, x) for rank in range(self.size)]


def _move(unsent: dict[socket.socket, memoryview], unread: dict[socket.socket, memoryview]) -> None:
    """Send and receive all of these at once, so that no two ranks wait for each other to read."""
    while unsent or unread:
        if _moved(socket.socket.send, unsent) + _moved(socket.socket.recv_into, unread):
            continue
        ready = select.poll()
        for peer in {*unsent, *unread}:
            ready.register(peer, select.POLLOUT * (peer in unsent) | select.POLLIN * (peer in unread))
        if not ready.poll(_STEP.total_seconds() * 1000):
            lose(f"no answer within {_STEP.total_seconds():g} s")


def _moved(move: Callable[[socket.socket, memoryview], int], left: dict[socket.socket, memoryview]) -> int:
    """Move the bytes that need no wait. Return how many connections moved some; a finished connection leaves `left`."""
    num_moved = 0
    for peer, view in [*left.items()]:
        try:
            num = move(peer, view) if view else 0
        except BlockingIOError:
            continue
        except OSError as error:
            lose(error)
        if view and not num:
            lose("its connection has ended")
        num_moved += 1
        left[peer] = view[num:]
        if num == view.nbytes:
            del left[peer]
    return num_moved


def _bytes_of(x: Tensor) -> memoryview:
    memory: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(memory)


@cache
def _in_stream(options: str) -> Any:
    """Return NCCL's options of this kind for work that is queued in the current stream."""
    made = getattr(import_module("torch._C._distributed_c10d"), options)()
    made.asyncOp = False
    return made


def _queue(collective: Callable[..., None], *args: Any) -> None:
    """Queue a collective in the GPU's stream. It returns no work to wait for: the stream orders what follows."""
    try:
        collective(*args)
    except RuntimeError as error:
        lose(error)


def _nccl(links: Mapping[int, RankLink], rank: int, size: int) -> tuple[Any, object]:
    """Return the group of NCCL, and the store by which it was made."""
    if (reason := why_no_nccl()) is not None:
        raise ConfigError(f"engine.tensor_parallel_size {size} is more than this torch can do: {reason}: set it to 1")
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    from alignedserve.engine.device.rank_store import RankStore  # here: only GPUs need torch's class

    options, store = ProcessGroupNCCL.Options(), RankStore(links)
    options._timeout = _STEP
    try:
        return ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, options), store
    except RuntimeError as error:
        lose(error)
