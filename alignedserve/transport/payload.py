"""The payload of a transfer: a request's KV, between device blocks and the chunks that travel.

The payload has a request's tokens in their order, whatever pairs and directions either end keeps them in. A chunk has
some of the tokens, of all layers: [layers, 2, tokens, kv_dim], as a page of the arena has it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.core import units_for
from alignedserve.engine.device.devices import CPU
from alignedserve.errors import PlanError
from alignedserve.kernels.common.spans import slots_of
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.transport.frames import TAIL_BYTES, is_sealed, seal

CHUNK_BYTES = 512 << 10  # about: large beside its frames, small beside the step that runs meanwhile
GPU_CHUNK_BYTES = 16 << 20  # between GPUs, where frames take most of the time
_ALIGNMENT = 256  # bytes


class PayloadChunk(NamedTuple):
    """Three views of the same memory."""

    body: Tensor
    whole: Tensor  # the body and its tail
    view: memoryview | None  # view of `whole`; None on a GPU

    def seal(self, number: int, index: int, checksum: int) -> None:
        """Write the tail."""
        if self.view is not None:
            seal(self.view, number, index, checksum)
            return
        tail = torch.empty(TAIL_BYTES, dtype=torch.uint8)
        seal(tail.numpy().data, number, index, checksum)
        self.whole[-TAIL_BYTES:].copy_(tail)

    def is_sealed(self, number: int, index: int, checksum: int) -> bool:
        view = self.view if self.view is not None else self.whole[-TAIL_BYTES:].cpu().numpy().data
        return is_sealed(view, number, index, checksum)


class ChunkBuffers:
    """Two buffers in turns: one travels while the other is filled or emptied."""

    def __init__(self, most_bytes: int, device: torch.device = CPU) -> None:
        """Make buffers for bodies of at most `most_bytes`."""
        size = most_bytes + TAIL_BYTES
        if device.type == "cpu":
            self._views: tuple[memoryview, ...] = (_memory(size), _memory(size))
        else:
            self._views = ()
            self._on_gpu = torch.empty((2, size + -size % _ALIGNMENT), dtype=torch.uint8, device=device)

    def chunk(self, index: int, num_bytes: int) -> PayloadChunk:
        size = num_bytes + TAIL_BYTES
        view = self._views[index % 2][:size] if self._views else None
        whole = torch.frombuffer(view, dtype=torch.uint8) if view is not None else self._on_gpu[index % 2][:size]
        return PayloadChunk(whole[:num_bytes], whole, view)


def _memory(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


class DeviceBlocks:
    """The device cache of a worker, as transfers see it."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache
        self._layers, blocks, self._block_size, self._kv_dim = cache.shape
        self._num_pairs = blocks // 2
        self._kernels, self._sums = (choose(device, cache.dtype).kernels for device in (cache.device, CPU))

    @property
    def cache(self) -> Tensor:
        return self._cache

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def mapped(self, cache: Tensor) -> DeviceBlocks:
        """Wrap another worker's cache of the same model and block size. Raises PlanError for another one."""
        if (len(cache), *cache.shape[2:], cache.dtype) != (
            *(self._layers, self._block_size, self._kv_dim),
            self._cache.dtype,
        ):
            raise PlanError(
                f"a device cache {tuple(cache.shape)} of {cache.dtype} is of another model, or other blocks"
            )
        return DeviceBlocks(cache)

    @property
    def token_bytes(self) -> int:
        return self._layers * 2 * self._kv_dim * self._cache.dtype.itemsize

    @property
    def chunk_tokens(self) -> int:
        """Return the tokens of a chunk: whole blocks where they fit."""
        most = CHUNK_BYTES if self._cache.device.type == "cpu" else GPU_CHUNK_BYTES
        tokens = max(1, most // self.token_bytes)
        return tokens - tokens % self._block_size or tokens

    def check(self, pairs: Sequence[int], num_tokens: int) -> None:
        if self.num_pairs(num_tokens) > len(pairs):
            raise PlanError(f"{len(pairs)} block pairs are too few for the KV of {num_tokens} tokens")
        if not all(0 <= pair < self._num_pairs for pair in pairs):
            raise PlanError(f"a transfer names a block pair outside 0..{self._num_pairs - 1}")

    def num_pairs(self, num_tokens: int) -> int:
        """Return how many pairs so many tokens take."""
        return units_for(num_tokens, self._block_size)

    def slots(self, pairs: Sequence[int], num_tokens: int) -> Tensor:
        """Return the slots of the tokens' vectors; the slots of V follow from those of K."""
        return slots_of(torch.tensor(pairs, dtype=torch.long), self._block_size)[:num_tokens]

    def gather(self, slots: Tensor, into: Tensor, is_checked: bool) -> int:
        """Copy the vectors into `into`, a chunk without its tail; return its checksum if it is checked, else 0."""
        rows = self._rows(into, len(slots))
        if is_checked and self._cache.device.type == "cpu":
            return self._kernels.gather_and_sum(self._cache, slots, rows)
        self._kernels.gather(self._cache, slots, rows)
        return self.checksum(into) if is_checked else 0

    def checksum(self, chunk: Tensor) -> int:
        """Return the CRC-32 of a chunk without its tail."""
        return self._sums.crc32(chunk.cpu()[None])

    def scatter(self, slots: Tensor, chunk: Tensor) -> None:
        self._kernels.scatter(self._cache, slots, self._rows(chunk, len(slots)))

    def _rows(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk.view(self._cache.dtype).view(self._layers, 2, tokens, self._kv_dim)
