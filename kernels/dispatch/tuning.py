"""Measure at load which way is fastest for each linear layer and number of rows, and rehearse the kernels of a GPU.

Our kernel is faster up to some number of rows, and torch above it: a binary search finds that number with four of ten
numbers measured. A weight that our kernel takes packed is packed unmeasured, since all such layers then run in one call
at any number of rows. On each CPU that was measured (Zen 4, Zen 5, Emerald Rapids) whole steps are faster for it, up to
ten times, while single products are so unsteady beside other work that they chose torch at every second start.

Triton's autotuner measures a kernel when it first meets a shape, and keeps its choice for all later calls of any size,
also over a restart. So the first real step must not be measured, since it may be one short request; nor may a step wait
while kernels are compiled. So `rehearse` runs kernels once before the first step, with as much work as a busy worker's
steps have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_void_p
from time import perf_counter

import torch
from torch import Tensor

from alignedserve.core import Sampling
from alignedserve.kernels.common.experts import ExpertWeights
from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Linear, LinearPath, Tuning, Way
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels

log = logging.getLogger("alignedserve.kernels")

# Part of a layer is enough for a comparison and keeps the measurement short: limits of its bytes and its arithmetic.
_BYTES = 8 << 20
_FLOPS = 1e9
_LEAST_OUT = 256
# Taken even beyond the time limit, since one turn may be disturbed; and the most, since more tell no more.
_LEAST_TURNS, _MOST_TURNS = 3, 10
# What torch must gain over our kernel: it takes about a millisecond more for every number of rows that is new to it,
# which a measurement of one number does not show.
_WORTH = 0.95

Evict = Callable[[Tensor], None]


def tune(linears: Iterable[Linear], seconds: float = 0.4, advance: Callable[[], object] = lambda: None) -> Tuning:
    """Measure each shape within about this time in all, let every layer use the result, and return it; `advance` is
    called after each shape."""
    layers = list(linears)
    shapes = {layer.shape: layer for layer in layers}
    shared = {layer.shape for layer in layers if layer.shared}  # layers of these shapes are not packed
    ways: dict[LayerShape, tuple[Way, ...]] = {}
    for shape, layer in shapes.items():
        ways[shape] = _ways(layer, shape in shared, seconds / len(shapes))
        advance()
    tuning = Tuning(ways)
    for layer in layers:
        layer.use(tuning)
    if layers:
        log.info("linear layers: %s", tuning)
    return tuning


def _ways(layer: Linear, shared: bool, seconds: float) -> tuple[Way, ...]:
    """Return the fastest way for each bucket."""
    if not shared and _can_pack(layer):
        return (Way.PACKED,) * len(BUCKETS)
    if set(layer.ways) != {Way.NATIVE, Way.TORCH}:
        return tuple(_fastest(layer, rows, seconds / len(BUCKETS)) for rows in BUCKETS)
    low, high = 0, len(BUCKETS)  # our kernel is faster below `low`, torch from `high` on
    while low < high:
        middle = (low + high) // 2
        if _fastest(layer, BUCKETS[middle], seconds / len(BUCKETS).bit_length()) is Way.NATIVE:
            low = middle + 1
        else:
            high = middle
    return (Way.NATIVE,) * low + (Way.TORCH,) * (len(BUCKETS) - low)


def _fastest(layer: Linear, rows: int, seconds: float) -> Way:
    ways = layer.ways
    if len(ways) == 1:
        return ways[0]
    part = _part(layer, rows)
    x = torch.ones(rows, layer.shape.inputs, dtype=layer.shape.dtype)
    took = _measured({way: part.by(way) for way in ways}, x, part.memory, _evict(layer), seconds)
    return min(ways, key=lambda way: took[way] * (_WORTH if way is Way.NATIVE else 1.0))


def _can_pack(layer: Linear) -> bool:
    """Return whether a kernel takes the weight packed. The last outputs decide: they may be too few for a vector."""
    last = layer.shape.out % _LEAST_OUT or _LEAST_OUT
    return Linear(layer.memory[-last:].clone(), None, layer.library).pack()


def _measured(
    paths: dict[Way, LinearPath], x: Tensor, weight: Tensor, evict: Evict, seconds: float
) -> dict[Way, float]:
    """Return the least time of each way, measured in turns; the weight comes from memory as in a model."""
    for path in paths.values():
        path(x)  # the first call of a shape does more than the product
    took = dict.fromkeys(paths, float("inf"))
    end = perf_counter() + seconds
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and perf_counter() >= end:
            break
        for way, path in paths.items():
            evict(weight)
            begun = perf_counter()
            path(x)
            took[way] = min(took[way], perf_counter() - begun)
    return took


def _part(layer: Linear, rows: int) -> Linear:
    shape: LayerShape = layer.shape
    fitting = min(_BYTES / (shape.inputs * shape.dtype.itemsize), _FLOPS / (2 * rows * shape.inputs))
    out = max(_LEAST_OUT, int(fitting) // 64 * 64)
    return Linear(layer.memory[:out], None if layer.bias is None else layer.bias[:out], layer.library)


def _evict(layer: Linear) -> Evict:
    """Return a function that evicts a weight from the caches, or does nothing where there is no kernel for that."""
    if layer.library is None:
        return _stay
    evict = layer.library.kernel("evict", c_void_p, c_int64)
    return lambda weight: evict(weight.data_ptr(), weight.nbytes)


def _stay(_: Tensor) -> None:
    pass


_DECODES, _PREFIX, _PROMPT = 16, 2048, 1024
_ROWS, _TOP = 16, 5
_FEW_ROWS = (1, 2, 4, 8, 16)  # of steps in which most experts have none
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
    lies = [Lie(queries, tokens, range(first * each, (first + 1) * each)) for first in range(requests)]
    query = torch.randn(requests * queries, heads, head_dim, device=cache.device).to(dtype)
    spans, scale = Spans(lies, cache.shape[1]), head_dim**-0.5
    if latent_rank is None:
        kernels.attend(query, cache, spans, Scoring(scale))
    else:
        kernels.attend_latent(query, cache, spans, scale, latent_rank)
