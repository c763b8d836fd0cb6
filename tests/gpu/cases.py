"""Steps to try attention with: places without a token are NaN, so a kernel that reads one shows it."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import torch

from alignedserve.engine.forms.int8_pages import Int8Pages
from alignedserve.kernels.common.spans import QuerySpan, Spans

GPU = torch.device("cuda", 0)
SOAK = bool(os.environ.get("SOAK"))


@dataclass(frozen=True)
class Step:
    spans: Spans
    cache: torch.Tensor
    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int | None


def random_step(seed: int, dtype: torch.dtype) -> Step:
    """Return a random step on the CPU."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = chance.choice((1, 2, 4)), chance.choice((1, 2, 3, 4, 8))
    head_dim, block_size = chance.choice((16, 64, 80, 128)), chance.choice((1, 8, 16, 16, 33, 256))
    lengths = [
        (queries, queries + chance.choice((0, 7, 300, 2000))) for queries in chance.choices((1, 1, 2, 17, 150), k=6)
    ]
    counts = [-(-tokens // block_size) for _, tokens in lengths]
    blocks = list(range(sum(counts) + 2))
    chance.shuffle(blocks)
    lies = []
    for (queries, tokens), count in zip(lengths, counts, strict=True):
        own = tuple(blocks.pop() for _ in range(count))
        lies.append(QuerySpan(queries, tokens, tuple(~block if chance.random() < 0.4 else block for block in own)))
    spans, kv_dim = Spans(lies, block_size), kv_heads * head_dim
    cache = torch.full((2 * (sum(counts) + 2), block_size, kv_dim), torch.nan, dtype=dtype)
    for span, (queries, tokens) in enumerate(lengths):
        slots = spans.slots(span)[: tokens - queries]
        for each in (slots, slots + block_size):
            cache.view(-1, kv_dim)[each] = torch.randn(len(slots), kv_dim, generator=generator).to(dtype)

    def made(heads: int) -> torch.Tensor:
        return torch.randn(spans.num_rows, heads * head_dim, generator=generator).to(dtype)

    query = made(kv_heads * group).unflatten(1, (-1, head_dim))
    return Step(spans, cache, query, made(kv_heads), made(kv_heads), chance.choice((None, None, 100)))


def compressed(pages: Int8Pages, rows: torch.Tensor, payload: memoryview) -> bool:
    """Compress the rows to a page; return whether that can be."""
    scales = pages.new_scales()
    for piece, levels, quantise in pages.packing(rows, payload, scales, most_bytes=1):
        made = torch.empty(levels.shape, dtype=torch.uint8, device=scales.device)
        quantise(piece.to(scales.device), made)
        levels.copy_(made)
    return pages.write_scales(scales, payload)
