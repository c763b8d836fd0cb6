"""A request's KV, or its hidden vectors, between the blocks of a device cache and the chunks that travel.

The payload has a request's tokens in their order, whatever pairs and directions either end keeps them in. A chunk has
some of them, of all layers: [layers, 2, tokens, kv_dim] for KV, as a page of the arena has it, and [layers, tokens,
hidden_size] for hidden vectors.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from alignedserve.core import CacheKind
from alignedserve.engine.attention import hidden_slots
from alignedserve.errors import PlanError
from alignedserve.kernels.dispatch import choose
from alignedserve.kernels.spans import slots_of
from alignedserve.running import half_blocks
from alignedserve.transport.frames import TAIL_BYTES

CHUNK_BYTES = 512 << 10  # about: worth the notes it takes, and a small part of the one step that it comes beside


class Chunk(NamedTuple):
    """The same memory three times."""

    body: torch.Tensor
    whole: torch.Tensor  # with its tail
    view: memoryview  # of the whole


class Buffers:
    """Two in turn: one is on its way while the other is filled, or emptied. Their memory goes with the last chunk."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` are those of the largest body."""
        self._both = (_memory(most_bytes + TAIL_BYTES), _memory(most_bytes + TAIL_BYTES))

    def chunk(self, index: int, num_bytes: int) -> Chunk:
        view = self._both[index % 2][: num_bytes + TAIL_BYTES]
        whole = torch.frombuffer(view, dtype=torch.uint8)
        return Chunk(whole[:num_bytes], whole, view)


def _memory(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


class DeviceBlocks:
    """The device cache of a worker, as transfers see it."""

    def __init__(self, cache: torch.Tensor, hidden_size: int | None = None) -> None:
        """`hidden_size` where the model's requests may be kept as hidden vectors."""
        self._cache = cache
        self._layers, blocks, self._block_size, self._kv_dim = cache.shape
        self._num_pairs = blocks // 2
        self._hidden_size = hidden_size or 0
        self._kernels = choose(cache.device, cache.dtype).kernels

    def token_bytes(self, kind: CacheKind) -> int:
        vectors = self._hidden_size if kind is CacheKind.HIDDEN else 2 * self._kv_dim
        return self._layers * vectors * self._cache.dtype.itemsize

    def chunk_tokens(self, kind: CacheKind) -> int:
        """Whole blocks where they fit."""
        tokens = max(1, CHUNK_BYTES // self.token_bytes(kind))
        return tokens - tokens % self._block_size or tokens

    def check(self, pairs: Sequence[int], num_tokens: int, kind: CacheKind) -> None:
        if kind is CacheKind.HIDDEN and not self._hidden_size:
            raise PlanError("a transfer is of hidden vectors: this model's requests are not kept as such")
        room = len(pairs) * self._block_size * (2 if kind is CacheKind.HIDDEN else 1)
        if num_tokens > room:
            raise PlanError(f"{len(pairs)} block pairs are too few for what is kept of {num_tokens} tokens")
        if not all(0 <= pair < self._num_pairs for pair in pairs):
            raise PlanError(f"a transfer names a block pair outside 0..{self._num_pairs - 1}")

    def slots(
        self, pairs: Sequence[int], num_tokens: int, kind: CacheKind, from_right: Collection[int] = ()
    ) -> torch.Tensor:
        """Where the tokens' vectors lie; those of V follow from those of K."""
        if kind is CacheKind.HIDDEN:
            return hidden_slots(half_blocks(pairs), self._block_size, num_tokens)
        rights = torch.tensor([pair in from_right for pair in pairs], dtype=torch.bool)
        return slots_of(torch.tensor(pairs, dtype=torch.long), rights, self._block_size)[:num_tokens]

    def gather(self, slots: torch.Tensor, kind: CacheKind, into: torch.Tensor) -> None:
        """`into` is a chunk without its tail."""
        if kind is CacheKind.HIDDEN:
            for layer, rows in zip(self._cache.unbind(0), self._hidden_rows(into, len(slots)), strict=True):
                rows.copy_(self._kernels.read_hidden(layer, slots, self._hidden_size))
        else:
            self._kernels.gather(self._cache, slots, self._rows(into, len(slots)))

    def scatter(self, slots: torch.Tensor, kind: CacheKind, chunk: torch.Tensor) -> None:
        if kind is CacheKind.HIDDEN:
            for layer, rows in zip(self._cache.unbind(0), self._hidden_rows(chunk, len(slots)), strict=True):
                self._kernels.write_hidden(layer, slots, rows)
        else:
            self._kernels.scatter(self._cache, slots, self._rows(chunk, len(slots)))

    def _rows(self, chunk: torch.Tensor, tokens: int) -> torch.Tensor:
        return chunk.view(self._cache.dtype).view(self._layers, 2, tokens, self._kv_dim)

    def _hidden_rows(self, chunk: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        return chunk.view(self._cache.dtype).view(self._layers, tokens, self._hidden_size).unbind(0)
