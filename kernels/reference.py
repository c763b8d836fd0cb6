"""What every kernel means, in plain torch: the fastest kernels are tested against these functions.

A layer's cache is one tensor of vector blocks in adjacent pairs, [2 * pairs, block_size, kv_dim]:

    block    0      1      2      3      4      5    ...
           K of   V of   K of   V of   K of   V of
           pair 0 pair 0 pair 1 pair 1 pair 2 pair 2

A token's place is a slot = block * block_size + offset. Its V lies block_size slots after its K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Span:
    """The queries of one request in a step: the last of the tokens whose K slots are given."""

    first: int  # row of its first query
    queries: int
    slots: torch.Tensor  # [tokens] K slots of all its tokens, those of this step included


def k_slots(pairs: Sequence[int], block_size: int) -> torch.Tensor:
    """K slots of the tokens that lie in these pairs, one after the other."""
    blocks = 2 * torch.tensor(pairs, dtype=torch.long)
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()


def write_slots(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put the K and V vectors of tokens, [tokens, kv_dim], into their slots."""
    vectors = cache.view(-1, cache.shape[-1])
    vectors[slots] = k
    vectors[slots + cache.shape[1]] = v


def attention(query: torch.Tensor, cache: torch.Tensor, spans: Sequence[Span], scale: float) -> torch.Tensor:
    """Causal attention of each span over its own tokens; query and result are [tokens, heads, head_dim]."""
    out = torch.empty_like(query)
    head_dim = query.shape[-1]
    vectors = cache.view(-1, cache.shape[-1] // head_dim, head_dim)
    for span in spans:
        rows = slice(span.first, span.first + span.queries)
        k, v = vectors[span.slots], vectors[span.slots + cache.shape[1]]
        out[rows] = _attend(query[rows], k, v, scale)
    return out


def _attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    queries, tokens = query.shape[0], k.shape[0]
    mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)
