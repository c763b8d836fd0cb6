"""Draw tokens from logits, and log-probabilities, in Triton; drawing.py defines them. The CPU never waits.

A program has a row, and never sorts it. Each token has a distance: how far its logit lies below the largest logit. A
distance is a float that is not negative, so its bits as a whole number, its key, have the same order. A binary search
among keys finds the least distance up to which there are k tokens, or a share of the weights, in about 20 passes over
the row, which is in the cache by then. The first search finds the edge of what top-k and top-p keep, the second the
distance of the drawn token; among tokens at the same distance, which weigh the same, the random number decides. Weights
are relative to the largest, which is 1, and added up in fp64: the result of a row depends on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.core import Sampling
from alignedserve.kernels.common.drawing import LEAST_TEMPERATURE, MOST_TEMPERATURE, NONE, Likeliest
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.triton.launch import tuned

_FARTHEST = tl.constexpr(0x7F7FFFFF)  # the key of the largest finite float; impossible tokens lie behind it
_NO_LIMIT = tl.constexpr(0x7FFFFFFF)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)
_NONE = tl.constexpr(NONE)
# One program reads its whole row again and again: the more of it is in flight, the less each pass waits. Eight warps
# have no registers for the larger block, and take half a minute to compile.
_tuned = tuned([({"BLOCK": 4096}, (8, 16)), ({"BLOCK": 8192}, (16,))], key=["columns"], stages=(1,))


@triton.jit
def _keys(logits, token, columns, largest):
    """Return the keys of these tokens' distances; columns beyond the last are impossible tokens."""
    x = tl.load(logits + token, mask=token < columns, other=-float("inf"))
    return tl.abs(largest - x).to(tl.int32, bitcast=True)


@triton.jit
def _weight(key, temperature, least):
    weight = tl.exp(-(key.to(tl.float32, bitcast=True) / temperature))
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def _up_to(logits, columns, largest, temperature, least, key, BLOCK: tl.constexpr):
    """Return how many tokens have at most this key, and the sum of their weights."""
    count = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, columns, BLOCK):
        keys = _keys(logits, first + tl.arange(0, BLOCK), columns, largest)
        near = keys <= key
        count += near.to(tl.int32)
        total += tl.where(near, _weight(keys, temperature, least), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _around(logits, columns, largest, temperature, least, key, BLOCK: tl.constexpr):
    """Return how many tokens have a smaller key, the sum of their weights, and how many have this key."""
    count = tl.zeros((BLOCK,), tl.int32)
    same = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, columns, BLOCK):
        keys = _keys(logits, first + tl.arange(0, BLOCK), columns, largest)
        count += (keys < key).to(tl.int32)
        same += (keys == key).to(tl.int32)
        total += tl.where(keys < key, _weight(keys, temperature, least), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(total, 0), tl.sum(same, 0)


@triton.jit
def _next_key(logits, columns, largest, key, BLOCK: tl.constexpr):
    """Return the least key above this key."""
    least = tl.full((BLOCK,), _NO_LIMIT, tl.int32)
    for first in range(0, columns, BLOCK):
        keys = _keys(logits, first + tl.arange(0, BLOCK), columns, largest)
        least = tl.minimum(least, tl.where(keys > key, keys, _NO_LIMIT))
    return tl.min(least, 0)


@triton.jit
def _search(logits, columns, largest, temperature, least, high, most, reach, beyond, BLOCK: tl.constexpr):
    """Return the least key up to which there are `most` tokens, or weights that come to `reach` or go `beyond`; `high`
    where there is no smaller key."""
    low = high * 0 - 1
    up_to_low = high * 0
    up_to_high = high * 0 + _NO_LIMIT
    while (high - low > 1) & (up_to_high - up_to_low > 1):
        middle = low + (high - low) // 2
        count, total = _up_to(logits, columns, largest, temperature, least, middle, BLOCK)
        enough = (count >= most) | (total >= reach) | (total > beyond)
        low = tl.where(enough, low, middle)
        up_to_low = tl.where(enough, up_to_low, count)
        high = tl.where(enough, middle, high)
        up_to_high = tl.where(enough, count, up_to_high)
    return tl.minimum(high, _next_key(logits, columns, largest, low, BLOCK))


@triton.jit
def _of_best(logits, columns, largest, temperature, least, top_k, top_p, number, BLOCK: tl.constexpr):
    """Return a token of those that top-k and top-p keep: all nearer than the edge, and the first tokens at the edge."""
    most = tl.where(top_k > 0, tl.minimum(top_k, columns), columns)
    edge = tl.program_id(0) * 0 + _FARTHEST
    if most < columns:
        edge = _search(logits, columns, largest, temperature, least, edge, most, float("inf"), float("inf"), BLOCK)
    fewer, before, same = _around(logits, columns, largest, temperature, least, edge, BLOCK)
    kept = tl.minimum(most - fewer, same)
    each = _weight(edge, temperature, least).to(tl.float64)
    if top_p < 1.0:
        needed = top_p * (before + kept * each)
        nearer = _search(logits, columns, largest, temperature, least, edge, _NO_LIMIT, needed, float("inf"), BLOCK)
        fewer, before, same = _around(logits, columns, largest, temperature, least, nearer, BLOCK)
        same = tl.where(nearer == edge, kept, same)
        each = _weight(nearer, temperature, least).to(tl.float64)
        wanted = tl.where(each > 0.0, (needed - before) / tl.where(each > 0.0, each, 1.0), same.to(tl.float64))
        wanted = tl.minimum(tl.maximum(wanted, 0.0), same.to(tl.float64))
        whole = wanted.to(tl.int32)
        kept = tl.minimum(tl.maximum(whole + (whole < wanted).to(tl.int32), 1), same)
        edge = nearer
    total = before + kept * each
    target = tl.minimum(number * total, total * _BELOW_ONE)
    at = _search(logits, columns, largest, temperature, least, edge, _NO_LIMIT, float("inf"), target, BLOCK)
    fewer, before, same = _around(logits, columns, largest, temperature, least, at, BLOCK)
    same = tl.where(at == edge, kept, same)
    each = _weight(at, temperature, least).to(tl.float64)
    index = tl.where(each > 0.0, (target - before) / tl.where(each > 0.0, each, 1.0), 0.0)
    index = tl.minimum(tl.maximum(index, 0.0), (same - 1).to(tl.float64)).to(tl.int32)

    chosen = tl.full((BLOCK,), -1, tl.int32)
    seen = tl.program_id(0) * 0
    for first in range(0, columns, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = (_keys(logits, token, columns, largest) == at).to(tl.int32)
        place = seen + tl.cumsum(here, 0) - 1
        chosen = tl.maximum(chosen, tl.where((here == 1) & (place == index), token, -1))
        seen += tl.sum(here, 0)
    return tl.max(chosen, 0)


@triton.jit
def _of_all(logits, columns, largest, temperature, least, number, BLOCK: tl.constexpr):
    """Return a token of all, in token order: where the sum of weights passes the random number's share."""
    _, total = _up_to(logits, columns, largest, temperature, least, _FARTHEST, BLOCK)
    target = tl.minimum(number * total, total * _BELOW_ONE)
    before = total * 0.0
    begin = tl.program_id(0) * 0 - 1
    already = before
    last = tl.program_id(0) * 0
    for first in range(0, columns, BLOCK):
        keys = _keys(logits, first + tl.arange(0, BLOCK), columns, largest)
        here = tl.sum(_weight(keys, temperature, least).to(tl.float64), 0)
        last = tl.where(here > 0.0, first, last)
        passed = (before + here > target) & (begin < 0)
        begin = tl.where(passed, first, begin)
        already = tl.where(passed, before, already)
        before += here
    # Adding in another order may end a little below the target: then the last token with any weight is drawn.
    fallen_short = begin < 0
    begin = tl.where(fallen_short, last, begin)
    token = begin + tl.arange(0, BLOCK)
    weight = _weight(_keys(logits, token, columns, largest), temperature, least).to(tl.float64)
    reached = already + tl.cumsum(weight, 0)
    passes = (weight > 0.0) & (reached > target) & (fallen_short == 0)
    first_that_passes = tl.min(tl.where(passes, token, _NO_LIMIT), 0)
    last_of_all = tl.max(tl.where(weight > 0.0, token, -1), 0)
    return tl.where(first_that_passes == _NO_LIMIT, last_of_all, first_that_passes)


@triton.jit
def _best(logits, columns, below, after, BLOCK: tl.constexpr):
    """Return the next largest logit after token `after` of value `below`, and its token: of equal logits the first."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    at = tl.full((BLOCK,), _NO_LIMIT, tl.int32)
    for first in range(0, columns, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < columns, other=-float("inf"))
        better = ((x < below) | ((x == below) & (token > after))) & (x > best)
        best = tl.where(better, x, best)
        at = tl.where(better, token, at)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, at, _NO_LIMIT), 0)


@triton.jit
def _any_odd(logits, columns, BLOCK: tl.constexpr):
    """Return 1 where a logit is NaN, else 0."""
    odd = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < columns, other=0.0)
        odd = tl.maximum(odd, (x != x).to(tl.int32))
    return tl.max(odd, 0)


@_tuned
@triton.jit(do_not_specialize=["of_wish"])  # the number of rows, which differs from step to step
def _draw(logits, stride, columns, wishes, of_wish, out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * stride
    largest, token = _best(own, columns, float("inf"), -1, BLOCK)
    odd = _any_odd(own, columns, BLOCK)
    if (odd != 0) | (tl.abs(largest) == float("inf")):
        token = tl.program_id(0) * 0 + _NONE
    else:
        wish = wishes + row
        temperature = tl.load(wish).to(tl.float32)
        if temperature > 0.0:
            top_k = tl.load(wish + of_wish).to(tl.int32)
            top_p = tl.load(wish + 2 * of_wish)
            least = tl.load(wish + 3 * of_wish).to(tl.float32)
            number = tl.load(wish + 4 * of_wish)
            if ((top_k > 0) & (top_k < columns)) | (top_p < 1.0):
                token = _of_best(own, columns, largest, temperature, least, top_k, top_p, number, BLOCK)
            else:
                token = _of_all(own, columns, largest, temperature, least, number, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@_tuned
@triton.jit(do_not_specialize=["width"])  # the width that the step asks for
def _logprobs(logits, stride, columns, tokens, tops, of_token, likeliest, values, counts, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    largest, token = _best(own, columns, float("inf"), -1, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(own + at, mask=at < columns, other=-float("inf")) - largest)
    whole = largest + tl.log(tl.sum(total, 0))
    tl.store(of_token + row, tl.load(own + tl.maximum(tl.load(tokens + row), 0)) - whole)
    count = tl.program_id(0) * 0
    for place in range(tl.load(tops + row).to(tl.int32)):
        if largest > -float("inf"):
            tl.store(likeliest + row * width + place, token.to(tl.int64))
            tl.store(values + row * width + place, largest - whole)
            count += 1
            largest, token = _best(own, columns, largest, token, BLOCK)
    tl.store(counts + row, count.to(tl.int64))


class TritonSampling:
    def draw(self, logits: Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]) -> Tensor:
        logits = _readable(logits)
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        if len(tokens):
            most = logits.shape[1]
            rows = [(_usual(wish.temperature), min(wish.top_k, most), wish.top_p, wish.min_p) for wish in wishes]
            table = torch.tensor([*zip(*rows, strict=True), numbers], dtype=torch.double)
            on_there = on_device(table, logits.device)
            _draw[(len(tokens),)](logits, logits.stride(0), most, on_there, len(tokens), tokens)
        return tokens

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Likeliest:
        logits = _readable(logits)
        rows, width = len(logits), min(max(tops, default=0), logits.shape[1])
        most = on_device(torch.tensor(tops, dtype=torch.long).clamp(max=width), logits.device)
        told = Likeliest(
            torch.empty(rows, device=logits.device),
            torch.empty((rows, width), dtype=torch.long, device=logits.device),
            torch.empty((rows, width), device=logits.device),
            torch.empty_like(most),
        )
        if rows:
            _logprobs[(rows,)](logits, logits.stride(0), logits.shape[1], tokens, most, *told, width)
        return told


def _usual(temperature: float) -> float:
    return min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE) if temperature > 0 else 0.0


def _readable(logits: Tensor) -> Tensor:
    """Return the logits in fp32, with the numbers of a row side by side."""
    logits = logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()
