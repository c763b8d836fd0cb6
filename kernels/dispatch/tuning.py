"""Measure at load which way is fastest for each linear layer and number of rows.

Our kernel is faster up to some number of rows, and torch above it: a binary search finds that number with four of ten
numbers measured. A weight that our kernel takes packed is packed unmeasured, since all such layers then run in one call
at any number of rows. On each CPU that was measured (Zen 4, Zen 5, Emerald Rapids) whole steps are faster for it, up to
ten times, while single products are so unsteady beside other work that they chose torch at every second start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_void_p
from time import perf_counter

import torch
from torch import Tensor

from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Linear, LinearPath, Tuning, Way

Seconds = Callable[[Callable[[], object]], float]


def seconds_on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


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
