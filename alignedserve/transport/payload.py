"""The payload of a transfer: a request's KV, between device blocks and the chunks that travel.

The payload has a request's tokens in their order, whatever blocks and directions either end keeps them in. A chunk has
some of the tokens, of all layers: [layers, 2, tokens, kv_dim], as a page of the arena has it.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.core import units_for
from alignedserve.engine.device.devices import CPU, finish
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.spans import slots_of
from alignedserve.kernels.dispatch.dispatcher import choose

CHUNK_BYTES = 2 << 20  # about: large beside its frames, and at the pace of copies a small part of a step
GPU_CHUNK_BYTES = 16 << 20  # between GPUs, where frames take most of the time
WINDOW = 4  # chunks of a transfer that travel at once
_ALIGNMENT = 256  # bytes


class ChunkBuffers:
    """Buffers in turns: some travel while others are filled or emptied."""

    def __init__(self, most_bytes: int, device: torch.device = CPU) -> None:
        """Make buffers for chunks of at most `most_bytes`."""
        if device.type == "cpu":
            self._buffers = [torch.frombuffer(_memory(most_bytes), dtype=torch.uint8) for _ in range(WINDOW)]
        else:
            size = most_bytes + -most_bytes % _ALIGNMENT
            self._buffers = [*torch.empty((WINDOW, size), dtype=torch.uint8, device=device)]

    def chunk(self, index: int, num_bytes: int) -> Tensor:
        return self._buffers[index % WINDOW][:num_bytes]


def _memory(num_bytes: int) -> memoryview:
    """Return memory that goes back to the system at once."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def added(checksum: int, of_chunk: int) -> int:
    """Return the checksum of chunks, and of one more, by theirs."""
    return zlib.crc32(struct.pack("=II", checksum, of_chunk))


class DeviceBlocks:
    """The device cache of a worker, as transfers see it."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache
        self._layers, halves, self._block_size, self._kv_dim = cache.shape
        self._num_blocks = halves // 2
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

    def check(self, blocks: Sequence[int], num_tokens: int) -> None:
        if self.num_blocks(num_tokens) > len(blocks):
            raise PlanError(f"{len(blocks)} blocks are too few for the KV of {num_tokens} tokens")
        if not all(0 <= block < self._num_blocks for block in blocks):
            raise PlanError(f"a transfer names a block outside 0..{self._num_blocks - 1}")

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return units_for(num_tokens, self._block_size)

    def slots(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Return the slots of the tokens' vectors, on the device; the slots of V follow from those of K."""
        slots = slots_of(torch.tensor(blocks, dtype=torch.long), self._block_size)[:num_tokens]
        return on_device(slots, self._cache.device)

    def places(self, blocks: Sequence[int]) -> Tensor:
        """Return the numbers of blocks for `copy`, on the device."""
        return on_device(torch.tensor(blocks), self._cache.device)

    def gather(self, slots: Tensor, into: Tensor, is_checked: bool) -> int:
        """Copy the vectors into a chunk on the device or the CPU; return its checksum if it is checked, else 0."""
        rows = self._rows(into, len(slots))
        if is_checked and self._cache.device.type == "cpu":
            return self._kernels.gather_and_sum(self._cache, slots, rows)
        self._kernels.gather(self._cache, slots, rows)
        if into.device != self._cache.device:
            finish(self._cache.device)  # the CPU reads the chunk next
        return self.checksum(into) if is_checked else 0

    def checksum(self, chunk: Tensor) -> int:
        """Return the CRC-32 of a chunk."""
        return self._sums.crc32(chunk.cpu()[None])

    def scatter(self, slots: Tensor, chunk: Tensor) -> None:
        self._kernels.scatter(self._cache, slots, self._rows(chunk, len(slots)))

    def copy(self, there: DeviceBlocks, of: Tensor, to: Tensor) -> None:
        """Copy whole blocks of another worker's cache, which this process maps, by their `places`."""
        if self._cache.device.type == "cpu":
            for one, other in zip(of.tolist(), to.tolist(), strict=True):
                self._block(other).copy_(there._block(one))
        else:
            self._by_block.index_copy_(1, to, there._by_block.index_select(1, of))

    def _block(self, block: int) -> Tensor:
        return self._cache[:, 2 * block : 2 * block + 2]

    @property
    def _by_block(self) -> Tensor:
        return self._cache.view(self._layers, self._num_blocks, -1)

    def _rows(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk.view(self._cache.dtype).view(self._layers, 2, tokens, self._kv_dim)
