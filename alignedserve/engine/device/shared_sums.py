"""Sums of ranks through each other's memory, where all ranks can map it, and where that is faster than NCCL.

At the start the ranks exchange handles of their memory, write into each other's, and read what was written. After each
of these they say to each other what went wrong: where one rank fails, all sum by NCCL, and each logs why. Then they sum
random rows either way for each size that will be captured, compare the results, and time both in a graph. All ranks
take the same way for a size.

A kernel that waits for a lost rank never ends. Then its process does not either, until the launcher kills it: it ends
all ranks of a worker when one has ended. For a rank that hangs, the watch of rank 0 ends rank 0 (work_watch.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from alignedserve.engine.device.devices import finish, out_of_memory
from alignedserve.engine.device.ranks import RankLinks
from alignedserve.errors import AlignedServeError, RankLost
from alignedserve.kernels.common.decoder import Layer, Norm, Sums
from alignedserve.kernels.common.failing import fault_of_kernel
from alignedserve.kernels.common.peers import MOST_CHANNELS, Peers, bytes_for
from alignedserve.kernels.dispatch.tuning import Seconds, seconds_on_gpu

log = logging.getLogger("alignedserve.engine")

Norms: TypeAlias = tuple[Norm | None, Norm | None]  # of the residual, and of what is added to it
Run: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Run], Run]
_TIMES, _REPLAYS = 20, 3  # sums in a graph, and its replays
_OFF = {torch.float32: 2.0**-18, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}  # of the largest number
_NEVER = 1 << 62  # a turn that no rank reaches


class Maps(Protocol):
    """How a process maps memory of another one."""

    def handle(self, memory: Tensor, /) -> bytes:
        """Return a handle of the memory, for one process."""

    def map(self, handle: bytes, /) -> Tensor:
        """Return the memory that the handle names, which the kernels of this device may read and write."""


class NotShared(Exception):
    """Raised on all ranks where one of them cannot sum through memory."""


class SharedSums:
    """Sums the parts of ranks for layers: those of some numbers of rows through memory, others by `others`."""

    def __init__(self, ranks: RankLinks, others: Sums, layers: Sequence[Layer]) -> None:
        self._ranks, self._others = ranks, others
        self._norms = [*{(_kind(norm), _kind(after)): (norm, after) for norm, after in _norms_of(layers)}.values()]
        self._peers: Peers | None = None
        self.rows = frozenset[int]()  # that are summed through memory

    def sum_add_norm(self, part: Tensor, x: Tensor, norm: Norm, after: Norm | None) -> Tensor:
        if (peers := self._peers_for(part, norm, after)) is None:
            return self._others.sum_add_norm(part, x, norm, after)
        return _sum_over(peers, part, x, norm, after)

    def sum_add(self, part: Tensor, x: Tensor, after: Norm | None) -> None:
        if (peers := self._peers_for(part, None, after)) is None:
            self._others.sum_add(part, x, after)
        else:
            _sum_over(peers, part, x, None, after)

    def _peers_for(self, part: Tensor, norm: Norm | None, after: Norm | None) -> Peers | None:
        if len(part) not in self.rows or self._peers is None or self._ranks.is_apart:
            return None
        return self._peers if self._peers.takes(part) and _fuses(norm, after) else None

    def choose(
        self,
        maps: Maps,
        sizes: Sequence[int],
        like: Tensor,
        capture: Capture,
        seconds: Seconds = seconds_on_gpu,
    ) -> None:
        """Meet the other ranks, and measure which sums go through memory, of these numbers of rows; `like` is such a
        row."""
        ranks = self._ranks
        try:
            peers = meet_in_memory(ranks, maps, like.device)
            _each(ranks, like.device, partial(self._rehearse, peers, like, capture))
            kept, told = self._compared(peers, sizes, like, capture, seconds)
        except NotShared as error:
            self.rows, self._peers = frozenset(), None
            log.info("ranks sum by NCCL: %s", error)
            return
        self.rows = frozenset(kept)
        log.info("a sum of %d ranks by NCCL / through memory, us: %s", ranks.size, "; ".join(told))
        log.info("ranks sum through memory for %s rows", ", ".join(map(str, sorted(kept))) or "no number of")

    def _compared(
        self, peers: Peers, sizes: Sequence[int], like: Tensor, capture: Capture, seconds: Seconds
    ) -> tuple[list[int], list[str]]:
        """Return for which sizes memory is faster, and the times of each. Raises NotShared where sums differ."""
        ranks, kept, told = self._ranks, list[int](), list[str]()
        self.rows = fitting = frozenset(rows for rows in sizes if peers.takes(like.expand(rows, -1)))
        for rows in sorted(fitting):
            try:
                self._peers = replace(peers, gives_up=True)  # flags that do not arrive are wrong sums, and no hang
                self._compare(rows, like)
                self._peers = peers
                theirs, ours = (self._measured(sums, rows, like, capture, seconds) for sums in (self._others, self))
            except (AlignedServeError, NotShared):
                raise
            except Exception as error:
                why = out_of_memory(error) or fault_of_kernel(error, like.device)
                raise RankLost(f"a sum of {rows} rows, for which the other ranks wait, has failed: {why}") from error
            if ranks.agree(ours < theirs):
                kept.append(rows)
            told.append(f"{rows} rows {1e6 * theirs:.1f} / {1e6 * ours:.1f}")
        return kept, told

    def _rehearse(self, peers: Peers, like: Tensor, capture: Capture) -> None:
        """Compile, capture and run what the ranks will run together, without waiting for another rank."""
        alone = _alone(peers)
        for norm, after in self._norms:
            if _fuses(norm, after):
                x = torch.zeros_like(like)
                capture(partial(_sum_over, alone, x, x, norm, after))()
        finish(like.device)

    def _compare(self, rows: int, like: Tensor) -> None:
        """Raise NotShared on all ranks where sums differ: either way by more than roundings, or between ranks."""

        def numbers(seed: int) -> Tensor:
            return torch.randn(rows, like.shape[1], generator=torch.Generator().manual_seed(seed)).to(like)

        both = list[Tensor]()
        for sums in (self._others, self):
            x = numbers(0)
            both.append(torch.stack([x, _summed(sums, numbers(1 + self._ranks.rank), x, self._norms[0])]).cpu())
        theirs, ours = both
        off = float((theirs.float() - ours.float()).abs().max())
        is_near = off <= _OFF[like.dtype] * float(theirs.float().abs().max())
        bits = crc32(ours.view(torch.uint8).numpy().tobytes())
        says = self._ranks.all_say(f"bits {bits}" if is_near else f"off by {off:g}")
        if len({*says}) > 1 or not is_near:
            raise NotShared(f"through memory, ranks sum {rows} rows to {', '.join(says)}")

    def _measured(self, sums: Sums, rows: int, like: Tensor, capture: Capture, seconds: Seconds) -> float:
        """Return how long a sum takes within a graph. Each rank makes as many sums: a rank waits for all others."""
        part, x = (torch.zeros((rows, like.shape[1]), dtype=like.dtype, device=like.device) for _ in range(2))

        def run() -> Tensor:
            for _ in range(_TIMES):
                made = _summed(sums, part, x, self._norms[0])
            return made

        replay = capture(run)
        return min(seconds(replay) for _ in range(_REPLAYS)) / _TIMES


def meet_in_memory(ranks: RankLinks, maps: Maps, device: torch.device) -> Peers:
    """Return the memory of all ranks. Raises NotShared on all ranks where one has none, or cannot reach another's."""
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else MOST_CHANNELS
    channels, rank, size = min(MOST_CHANNELS, ranks.together(processors)), ranks.rank, ranks.size
    made = list[Tensor]()

    def handles() -> list[str]:
        if os.environ.get("NCCL_P2P_DISABLE") == "1":  # set where GPUs cannot reach each other's memory as they say
            raise NotShared("NCCL_P2P_DISABLE is 1")
        made.append(torch.zeros(bytes_for(channels, size), dtype=torch.uint8, device=device))
        finish(device)
        return [maps.handle(made[0]).decode() if other != rank else "" for other in range(size)]

    def mapped(told: Sequence[Sequence[str]]) -> None:
        memory = [made[0] if other == rank else maps.map(told[other][rank].encode()) for other in range(size)]
        addresses = torch.tensor([of.data_ptr() for of in memory], dtype=torch.long, device=device)
        peers.append(Peers(rank, channels, tuple(memory), addresses))

    def marked() -> None:
        for of in peers[0].memory:
            _marks(peers[0], of)[rank] = rank + 1
        finish(device)

    def read() -> None:
        wanted = [*range(1, size + 1)]
        for other, of in enumerate(peers[0].memory):
            if (found := _marks(peers[0], of).tolist()) != wanted:
                raise NotShared(f"it reads {found} in the memory of rank {other}, not {wanted}")

    peers = list[Peers]()
    told = _each(ranks, device, handles)
    for do in (partial(mapped, told), marked, read):
        _each(ranks, device, do)
    return peers[0]


def _each(ranks: RankLinks, device: torch.device, do: Callable[[], object]) -> list[Any]:
    """Do it, and return what all ranks have done. Raises NotShared on all where it fails on one."""
    try:
        said = json.dumps({"done": do()})
    except Exception as error:  # any error of a driver or a library, unless the device is lost
        why = str(error) if isinstance(error, NotShared) else out_of_memory(error) or fault_of_kernel(error, device)
        said = json.dumps({"why": why})
    says = [json.loads(text) for text in ranks.all_say(said)]
    for rank, of in enumerate(says):
        if "why" in of:
            raise NotShared(f"rank {rank}: {of['why']}")
    return [of["done"] for of in says]


def _marks(peers: Peers, memory: Tensor) -> Tensor:
    """Return a number for each rank, where rows will lie."""
    return memory[peers.flags :][: 8 * peers.size].view(torch.long)


def _alone(peers: Peers) -> Peers:
    """Return memory of this rank alone, in which all others have said each turn."""
    own = torch.zeros_like(peers.memory[peers.rank])
    flags = own[: peers.flags].view(torch.long).view(peers.channels, peers.size)
    flags.fill_(_NEVER)
    flags[:, peers.rank] = 0
    return Peers(peers.rank, peers.channels, (own,) * peers.size, torch.full_like(peers.addresses, own.data_ptr()))


def _summed(sums: Sums, part: Tensor, x: Tensor, norms: Norms) -> Tensor:
    norm, after = norms
    assert norm is not None, "the first sum of a layer is that of its attention, and a norm follows"
    return sums.sum_add_norm(part, x, norm, after)


def _norms_of(layers: Sequence[Layer]) -> Iterator[Norms]:
    """Yield the norms of each sum."""
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        yield layer.mlp_norm, layer.after_attention
        yield None if following is None else following.attention_norm, layer.after_mlp


def _kind(norm: Norm | None) -> Hashable:
    """Return what two norms must have in common, so that the same kernel is compiled for both."""
    if norm is None:
        return None
    return norm.centred, norm.bias is None, None if norm.weight is None else norm.weight.dtype


def _fuses(norm: Norm | None, after: Norm | None) -> bool:
    """Return whether one kernel does both norms: they are alike, or there is one at most."""
    return norm is None or after is None or _kind(norm) == _kind(after)


def _sum_over(peers: Peers, part: Tensor, x: Tensor, norm: Norm | None, after: Norm | None) -> Tensor:
    from alignedserve.kernels.triton.sums import sum_over

    return sum_over(peers, part, x, norm, after)
