"""Moves KV between the device cache and pages of the arena.

The cache is [layers, 2 * pairs, block_size, kv_dim]: K of pair p in block 2p, V in block 2p + 1. A page holds page_size
tokens, a multiple of block_size, in the cache's dtype, as [layers, 2, page_size, kv_dim]:

    layer 0   K of token 0, 1, ... page_size - 1
              V of token 0, 1, ... page_size - 1
    layer 1   K ...

A request's tokens fill its pairs one by one, each from its left end or, if `from_right` names it, from its right end; a
page has them in their order. Of a request's last page only the first `length` tokens of each row count: the rest is
neither written, nor read, nor part of the checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from alignedserve.errors import ArenaError, PlanError
from alignedserve.kernels.dispatch import choose
from alignedserve.kernels.spans import slots_of
from alignedserve.kvpool.arena import Arena, Contents, Kind
from alignedserve.kvpool.pages import chained_hashes


@dataclass(frozen=True)
class _Part:
    """What one page holds of a request."""

    page: int
    contents: Contents
    slots: torch.Tensor  # of its K vectors


class PageCopier:
    def __init__(self, cache: torch.Tensor, arena: Arena, page_size: int, verify: bool) -> None:
        self._cache = cache
        self._layers, blocks, self._block_size, self._kv_dim = cache.shape
        self._num_pairs = blocks // 2
        self._kernels = choose(cache.device, cache.dtype).kernels
        self._arena = arena
        self._page_size = page_size
        self._row_bytes = page_size * self._kv_dim * cache.dtype.itemsize
        self._verify = verify
        self._check_arena()

    def copy_out(
        self,
        pairs: Sequence[int],
        pages: Sequence[int],
        tokens: Sequence[int],
        start: int = 0,
        from_right: Collection[int] = (),
    ) -> None:
        """The KV of `tokens`, a request's first ones, from `start` on, to pages that are leased to this worker."""
        for part in self._parts(pairs, pages, tokens, start, from_right):
            self._arena.begin_write(part.page)
            payload = self._arena.payload(part.page)
            self._kernels.gather(self._cache, part.slots, self._rows(part, payload))
            checksum = self._checksum(part.contents.length, payload) if self._verify else 0
            self._arena.end_write(part.page, part.contents, checksum)

    def copy_in(
        self, pages: Sequence[int], pairs: Sequence[int], tokens: Sequence[int], from_right: Collection[int] = ()
    ) -> bool:
        """False where a page does not hold the KV of its tokens: nothing that is in the pairs then may be used."""
        return all(self._read(part) for part in self._parts(pairs, pages, tokens, 0, from_right))

    def close(self) -> None:
        self._arena.close()

    def _read(self, part: _Part) -> bool:
        checksum = partial(self._checksum, part.contents.length) if self._verify else None
        return self._arena.read(part.page, part.contents, partial(self._take, part), checksum)

    def _take(self, part: _Part, payload: memoryview) -> None:
        """The copy has left the page when this returns, on a GPU too: the check that follows counts on it."""
        self._kernels.scatter(self._cache, part.slots, self._rows(part, payload))

    def _rows(self, part: _Part, payload: memoryview) -> torch.Tensor:
        """The page's memory itself, [layers, 2, length, kv_dim]."""
        flat = torch.frombuffer(payload, dtype=self._cache.dtype)
        return flat.view(self._layers, 2, self._page_size, self._kv_dim)[:, :, : part.contents.length]

    def _checksum(self, length: int, payload: memoryview) -> int:
        used = length * self._row_bytes // self._page_size
        crc = 0
        for row in range(0, len(payload), self._row_bytes):
            crc = zlib.crc32(payload[row : row + used], crc)
        return crc or 1  # 0 says that there is none

    def _parts(
        self,
        pairs: Sequence[int],
        pages: Sequence[int],
        tokens: Sequence[int],
        start: int,
        from_right: Collection[int],
    ) -> Iterator[_Part]:
        self._check(pairs, pages, tokens, start)
        first = start // self._page_size
        rights = torch.tensor([pair in from_right for pair in pairs], dtype=torch.bool)
        places = slots_of(torch.tensor(pairs, dtype=torch.long), rights, self._block_size)
        slots = places[: len(tokens)].split(self._page_size)[first:]
        for page, of_k, token_hash in zip(pages, slots, chained_hashes(tokens, self._page_size)[first:], strict=False):
            yield _Part(page, Contents(Kind.KV, len(of_k), token_hash), of_k)

    def _check(self, pairs: Sequence[int], pages: Sequence[int], tokens: Sequence[int], start: int) -> None:
        if start % self._page_size or start > len(tokens):
            raise PlanError(f"a copy of {len(tokens)} tokens is to start at {start}: that is no page's first token")
        if len(tokens) > len(pairs) * self._block_size:
            raise PlanError(f"{len(pairs)} block pairs are too few for the KV of {len(tokens)} tokens")
        if len(tokens) - start > len(pages) * self._page_size:
            raise PlanError(f"{len(pages)} pages are too few for the KV of {len(tokens) - start} tokens")
        if not all(0 <= pair < self._num_pairs for pair in pairs):
            raise PlanError(f"a copy names a block pair outside 0..{self._num_pairs - 1}")

    def _check_arena(self) -> None:
        if self._page_size % self._block_size:
            raise ArenaError(f"pages of {self._page_size} tokens do not hold whole blocks of {self._block_size}")
        payload_bytes = self._layers * 2 * self._row_bytes
        if (self._arena.page_size, self._arena.payload_bytes) != (self._page_size, payload_bytes):
            raise ArenaError(
                f"{self._arena.path} has pages of {self._arena.page_size} tokens in {self._arena.payload_bytes} bytes,"
                f" this model needs {self._page_size} tokens in {payload_bytes}: restart the pool"
            )
