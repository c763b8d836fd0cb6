"""Run kernels once on a GPU before the first step, with as much work as a busy worker's steps have.

Triton's autotuner measures a kernel when it first meets a shape, and keeps its choice for all later calls of any size,
also over a restart. So the first real step must not be measured, since it may be one short request; nor may a step wait
while kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from alignedserve.core import Sampling
from alignedserve.kernels.common.experts import ExpertWeights
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels

_DECODES, _PREFIX, _PROMPT = 16, 2048, 1024
_ROWS, _TOP = 16, 5
_FEW_ROWS = (1, 8, 32)  # of steps in which most experts have none: a row alone, few without tables, and more
_PAIRS_OF_EXPERT = (16, 32, 64, 128)  # of steps in which all experts have as many: the tiles of triton/experts.py
_MOST_ROWS = 2048
OF_EXPERTS = len(_FEW_ROWS) + len(_PAIRS_OF_EXPERT)  # most steps of the experts of a layer
REHEARSED = 4  # attention of decodes and of a prompt, drawing, logprobs
OF_LAYERS = (8, 32, 64, 128, 1024)  # rows: products with quantised weights have tiles of up to 16, 32, 64 and 128


_DRAWN = (Sampling(), Sampling(0.8), Sampling(0.8, top_k=50), Sampling(0.8, top_k=50, top_p=0.95))


@torch.inference_mode()
def rehearse(
    kernels: Kernels,
    cache: torch.Tensor,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    words: int,
    most_tokens: int,
    latent_rank: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Run the kernels on a layer's cache, reading its vectors as they are, for queries of this dtype; no request is
    longer than `most_tokens`. A cache of compressed vectors has a `latent_rank`. `advance` is called after each of
    `REHEARSED` kernels."""
    blocks, block_size = len(cache) // 2, cache.shape[1]
    prefix = min(_PREFIX, blocks // _DECODES * block_size, most_tokens)
    prompt = min(_PROMPT, blocks * block_size, most_tokens)
    for requests, queries, length in ((_DECODES, 1, prefix), (1, prompt, prompt)):
        _attend(kernels, cache, dtype, heads, head_dim, requests, queries, length, latent_rank)
        advance()
    logits = torch.randn(_ROWS, words, device=cache.device)
    samplings = [_DRAWN[row % len(_DRAWN)] for row in range(_ROWS)]
    tokens = kernels.draw(logits.clone(), samplings, [(row + 0.5) / _ROWS for row in range(_ROWS)])
    advance()
    kernels.logprobs(logits, tokens, [min(_TOP, words)] * _ROWS)
    advance()


@torch.inference_mode()
def rehearse_layers(layers: Iterable[Linear], words: int, advance: Callable[[], object] = lambda: None) -> None:
    """Run layers for few and for many rows, the head to logits in fp32: a step that is captured must not measure.
    `advance` is called after each number of rows."""
    for layer in layers:
        for rows in OF_LAYERS:
            x = torch.randn(rows, layer.shape.inputs, device=layer.memory.device).to(layer.shape.dtype)
            if layer.shape.out == words:
                layer.wide(x)
            else:
                layer.add_to(x, layer(x))
            advance()


@torch.inference_mode()
def rehearse_experts(
    kernels: Kernels, mixtures: Iterable[ExpertWeights], advance: Callable[[], object] = lambda: None
) -> None:
    """Run the experts of layers for few and for many rows, each expert for as many as any other."""
    for mixture in mixtures:
        device, many = mixture.addresses.device, (pairs * len(mixture) // mixture.taken for pairs in _PAIRS_OF_EXPERT)
        for rows in (*_FEW_ROWS, *(rows for rows in many if rows <= _MOST_ROWS)):
            x = torch.randn(rows, mixture.hidden, device=device).to(mixture.dtype)
            chosen = (torch.arange(rows * mixture.taken, device=device) % len(mixture)).view(rows, -1)
            kernels.add_experts(x, mixture, chosen, torch.ones(chosen.shape, device=device), torch.zeros_like(x))
            advance()


def _attend(
    kernels: Kernels,
    cache: torch.Tensor,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    requests: int,
    queries: int,
    tokens: int,
    latent_rank: int | None,
) -> None:
    if tokens < queries or tokens < 2:  # a cache this small decodes too little to matter
        return
    each = -(-tokens // cache.shape[1])
    lies = [QuerySpan(queries, tokens, range(first * each, (first + 1) * each)) for first in range(requests)]
    query = torch.randn(requests * queries, heads, head_dim, device=cache.device).to(dtype)
    spans, scale = Spans(lies, cache.shape[1]), head_dim**-0.5
    if latent_rank is None:
        kernels.attend(query, cache, spans, Scoring(scale))
    else:
        kernels.attend_latent(query, cache, spans, scale, latent_rank)
