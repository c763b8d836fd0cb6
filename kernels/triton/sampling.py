"""Draw tokens from logits, and log-probabilities, in Triton; drawing.py defines them. The CPU never waits.

A row is never sorted. Each token has a distance: how far its logit lies below the largest logit. A distance is a float
that is not negative, so its bits as a whole number, its key, have the same order. What top-k and top-p keep ends at a
key, and the drawn token is one of those at a key; among tokens at the same key, which weigh the same, the random number
decides. Weights are relative to the largest, which is 1, and added up in fp64: the result of a row depends on no other
row, nor on the order in which programs run.

    _look    many programs a row: the largest logit of each part
    _weigh   many programs a row, of rows that are not greedy: count and weight of the tokens up to each of 32 bounds
    _draw    one program a row: finds between which two bounds a key lies, lists the tokens there, searches the list

The bounds are even steps of distance up to 1.5 times the mean distance, so that of logits as models have them fewer
than a tenth lie between two. More tokens than the list has room for are searched where they lie, in the row. So a row
is read twice by many programs, and in parts once by one program for each key (top-k's, top-p's, the drawn one). Of
128,256 logits, with the list, that is 3 to 6 times in all; one program that searched the row read it 33 to 61 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.core import Sampling
from alignedserve.kernels.common.drawing import NONE, Likeliest, table_of
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.triton.launch import power_of_2, tuned

_FARTHEST = tl.constexpr(0x7F7FFFFF)  # the key of the largest finite float
_NO_LIMIT = tl.constexpr(0x7FFFFFFF)  # the key of tokens that are not drawn: impossible, or without any weight
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)
_NONE = tl.constexpr(NONE)
_PART, _BOUNDS, _LISTED = 4096, 32, 16384  # tokens of a part; bounds of a row; tokens that its list has room for
_MEANS = tl.constexpr(1.5)  # how far the bounds reach, in mean distances
# One program reads its list or its row again and again: the more of it is in flight, the less each pass waits. Eight
# warps have no registers for the largest block, and take half a minute to compile.
_tuned = tuned([({"BLOCK": 4096}, (8, 16)), ({"BLOCK": 8192}, (16,))], key=["columns"], stages=(1,))
_tuned_draw = tuned([({"BLOCK": 2048}, (8,)), ({"BLOCK": 4096}, (16,))], key=["columns"], stages=(1,))


@triton.jit
def _weight(key, temperature):
    return tl.exp(-(key.to(tl.float32, bitcast=True) / temperature))


@triton.jit
def _weighed(x, largest, temperature, least):
    """Return the keys and the weights of these logits."""
    key = tl.abs(largest - x).to(tl.int32, bitcast=True)
    weight = _weight(key, temperature)
    weight = tl.where(weight < least, 0.0, weight)
    return tl.where((weight > 0.0) & (key <= _FARTHEST), key, _NO_LIMIT), weight


@triton.jit
def _is_cut(wish, of_wish, columns):
    """Return whether the row has a top-k or a top-p."""
    top_k, top_p = tl.load(wish + of_wish), tl.load(wish + 2 * of_wish)
    return ((top_k > 0.0) & (top_k < columns)) | (top_p < 1.0)


@triton.jit
def _look(logits, stride, columns, looks, tokens, PART: tl.constexpr):
    """Write of each part the largest logit and its first token, NaN where a logit is NaN; and the sum of the finite
    logits and their number."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < columns, other=-float("inf"))
    odd = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x == x, x, -float("inf"))
    largest = tl.max(x, 0)
    finite = tl.abs(x) < float("inf")
    at, all_parts = row * parts + part, tl.num_programs(0) * parts
    tl.store(looks + at, tl.where(odd != 0, float("nan"), largest))
    tl.store(looks + all_parts + at, tl.sum(tl.where(finite, x, 0.0), 0))
    tl.store(tokens + at, tl.min(tl.where(x == largest, token, _NO_LIMIT), 0))
    tl.store(tokens + all_parts + at, tl.sum(finite.to(tl.int32), 0))


@triton.jit(do_not_specialize=["of_wish"])  # the number of rows, which differs from step to step
def _weigh(
    logits,
    stride,
    columns,
    wishes,
    of_wish,
    looks,
    tokens,
    bounds,
    counts,
    weights,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Write each row's bounds, and of each part the count and the weight of the tokens up to each bound; of a row that
    is not cut only the last, which all tokens are up to."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    wish = wishes + row
    temperature = tl.load(wish).to(tl.float32)
    if temperature > 0.0:
        each = tl.arange(0, PARTS)
        at, there, all_parts = row * parts + each, each < parts, tl.num_programs(0) * parts
        largest = tl.max(tl.load(looks + at, mask=there, other=-float("inf")), 0)
        total = tl.sum(tl.load(looks + all_parts + at, mask=there, other=0.0), 0)
        number = tl.sum(tl.load(tokens + all_parts + at, mask=there, other=0), 0)
        step = (largest - total / number.to(tl.float32)) * (_MEANS / (BOUNDS - 1))
        token = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < columns, other=-float("inf"))
        keys, weight = _weighed(x, largest, temperature, tl.load(wish + 3 * of_wish).to(tl.float32))
        weight = weight.to(tl.float64)
        first = tl.where(_is_cut(wish, of_wish, columns), 0, BOUNDS - 1)
        for bound in range(first, BOUNDS):
            key = (step * (bound + 1)).to(tl.int32, bitcast=True)
            key = tl.minimum(tl.maximum(key, 0), _FARTHEST)  # rounding may take it below 0, large numbers beyond
            if bound == BOUNDS - 1:
                key = key * 0 + _FARTHEST
            up_to = keys <= key
            to = (row * parts + part) * BOUNDS + bound
            tl.store(counts + to, tl.sum(up_to.to(tl.int32), 0))
            tl.store(weights + to, tl.sum(tl.where(up_to, weight, 0.0), 0))
            if part == 0:
                tl.store(bounds + row * BOUNDS + bound, key)


@triton.jit
def _list(own, columns, counts, bound, start, stop, largest, temperature, least, listed, tokens, PART, BOUNDS, LISTED):
    """List the logits and tokens with keys from above `start` to `stop`, which is this bound; return their number."""
    number = bound * 0
    tl.debug_barrier()  # all threads have read an earlier list
    for first in range(0, columns, PART):
        of_part = counts + first // PART * BOUNDS + bound
        if tl.load(of_part) > tl.load(of_part - 1, mask=bound > 0, other=0):
            token = first + tl.arange(0, PART)
            x = tl.load(own + token, mask=token < columns, other=-float("inf"))
            keys, _ = _weighed(x, largest, temperature, least)
            here = (keys > start) & (keys <= stop)
            place = number + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(listed + place, x, mask=here & (place < LISTED))
            tl.store(tokens + place, token, mask=here & (place < LISTED))
            number += tl.sum(here.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have written this list
    return tl.minimum(number, LISTED)


@triton.jit
def _of_best(
    own,
    columns,
    wish,
    of_wish,
    largest,
    temperature,
    least,
    bounds,
    counts,
    weights,
    parts,
    listed,
    listed_tokens,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BOUNDS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a token of those that top-k and top-p keep: all nearer than a key, and the first tokens with this key."""
    top_k, top_p = tl.load(wish + of_wish).to(tl.int32), tl.load(wish + 2 * of_wish)
    bound, part = tl.arange(0, BOUNDS), tl.arange(0, PARTS)
    cell, there = part[:, None] * BOUNDS + bound[None, :], part[:, None] < parts
    keys_of = tl.load(bounds + bound)
    counts_to = tl.sum(tl.load(counts + cell, mask=there, other=0), 0)
    weights_to = tl.sum(tl.load(weights + cell, mask=there, other=0.0), 0)
    kept = tl.max(counts_to, 0)
    whole = tl.max(weights_to, 0)
    key = kept * 0
    place = kept * 0
    source = own
    length = kept * 0 + columns
    is_listed = kept < 0
    for step in range(3):  # where top-k ends, where top-p ends, and the drawn token
        if (step == 2) | ((step == 1) & (top_p < 1.0)) | ((step == 0) & (top_k > 0) & (top_k < kept)):
            # The smallest key that is enough: up to it there are `most` tokens, or weights that sum to `reach`, or to
            # more than `beyond`.
            most = tl.where(step == 0, top_k, kept)
            reach = tl.where(step == 1, top_p * whole, float("inf"))
            target = tl.minimum(tl.load(wish + 4 * of_wish) * whole, whole * _BELOW_ONE)
            beyond = tl.where(step == 2, target, float("inf"))
            enough = (counts_to >= most) | (weights_to >= reach) | (weights_to > beyond)
            within = tl.min(tl.where(enough, bound, BOUNDS - 1), 0)
            start = tl.max(tl.where(bound < within, keys_of, -1), 0)
            stop = tl.max(tl.where(bound <= within, keys_of, -1), 0)
            fewer = tl.max(tl.where(bound < within, counts_to, 0), 0)
            before = tl.max(tl.where(bound < within, weights_to, 0.0), 0)
            is_listed = tl.max(tl.where(bound <= within, counts_to, 0), 0) - fewer <= LISTED
            if is_listed:
                source = listed
                length = _list(
                    *(own, columns, counts, within, start, stop, largest, temperature, least, listed, listed_tokens),
                    *(PART, BOUNDS, LISTED),
                )
            else:
                source = own
                length = kept * 0 + columns
            low = start
            key = stop
            while key - low > 1:
                middle = low + (key - low) // 2
                count = tl.zeros((BLOCK,), tl.int32)
                total = tl.zeros((BLOCK,), tl.float64)
                last = tl.zeros((BLOCK,), tl.int32) - 1
                following = tl.full((BLOCK,), _NO_LIMIT, tl.int32)
                for first in range(0, length, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    x = tl.load(source + at, mask=at < length, other=-float("inf"))
                    keys, weight = _weighed(x, largest, temperature, least)
                    near = (keys > start) & (keys <= middle)
                    count += near.to(tl.int32)
                    total += tl.where(near, weight, 0.0).to(tl.float64)
                    last = tl.maximum(last, tl.where(near, keys, -1))
                    following = tl.minimum(following, tl.where(keys > middle, keys, _NO_LIMIT))
                up_to, last_key, next_key = before + tl.sum(total, 0), tl.max(last, 0), tl.min(following, 0)
                is_enough = (fewer + tl.sum(count, 0) >= most) | (up_to >= reach) | (up_to > beyond)
                is_last = next_key > stop  # adding in another order fell short: the last key is taken
                low = tl.where(is_enough, low, tl.where(is_last, last_key, next_key) - 1)
                key = tl.where(is_enough | is_last, last_key, key)
            count = tl.zeros((BLOCK,), tl.int32)
            same = tl.zeros((BLOCK,), tl.int32)
            total = tl.zeros((BLOCK,), tl.float64)
            for first in range(0, length, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(source + at, mask=at < length, other=-float("inf"))
                keys, weight = _weighed(x, largest, temperature, least)
                near = (keys > start) & (keys < key)
                count += near.to(tl.int32)
                same += (keys == key).to(tl.int32)
                total += tl.where(near, weight, 0.0).to(tl.float64)
            fewer += tl.sum(count, 0)
            before += tl.sum(total, 0)
            # Several tokens may have this key: this is how many of them are kept, or which of them is drawn.
            number = tl.minimum(tl.sum(same, 0), most - fewer)
            each = _weight(key, temperature).to(tl.float64)
            wanted = (tl.where(step == 2, beyond, reach) - before) / each
            wanted = tl.minimum(tl.maximum(wanted, 0.0), number.to(tl.float64))
            place = tl.minimum(wanted.to(tl.int32), number - 1)
            number = tl.minimum(tl.maximum(place + (place < wanted).to(tl.int32), 1), number)
            kept = fewer + number
            whole = before + number * each

    chosen = tl.full((BLOCK,), -1, tl.int32)
    seen = place * 0
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        keys, _ = _weighed(tl.load(source + at, mask=at < length, other=-float("inf")), largest, temperature, least)
        here = (keys == key).to(tl.int32)
        chosen = tl.maximum(chosen, tl.where((here == 1) & (seen + tl.cumsum(here, 0) - 1 == place), at, -1))
        seen += tl.sum(here, 0)
    token = tl.max(chosen, 0)
    return tl.load(listed_tokens + token, mask=is_listed & (token >= 0), other=token)


@triton.jit
def _of_all(
    own,
    columns,
    number,
    largest,
    temperature,
    least,
    weights,
    parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Return a token of all, in token order: where the sum of weights passes the random number's share."""
    part = tl.arange(0, PARTS)
    weight = tl.load(weights + part * BOUNDS + BOUNDS - 1, mask=part < parts, other=0.0)
    reached = tl.cumsum(weight, 0)
    total = tl.max(reached, 0)
    target = tl.minimum(number * total, total * _BELOW_ONE)
    its = tl.min(tl.where((weight > 0.0) & (reached > target), part, _NO_LIMIT), 0)
    its = tl.minimum(its, tl.max(tl.where(weight > 0.0, part, 0), 0))
    already = tl.max(tl.where(part < its, reached, 0.0), 0)
    token = its * PART + tl.arange(0, PART)
    x = tl.load(own + token, mask=token < columns, other=-float("inf"))
    keys, weight = _weighed(x, largest, temperature, least)
    reached = already + tl.cumsum(weight.to(tl.float64), 0)
    # Adding in another order may end a little below the target: then the last token with any weight is drawn.
    first = tl.min(tl.where((keys < _NO_LIMIT) & (reached > target), token, _NO_LIMIT), 0)
    last = tl.max(tl.where(keys < _NO_LIMIT, token, -1), 0)
    return tl.where(first == _NO_LIMIT, last, first)


@_tuned_draw
@triton.jit(do_not_specialize=["of_wish"])
def _draw(
    logits,
    stride,
    columns,
    wishes,
    of_wish,
    looks,
    tokens,
    bounds,
    counts,
    weights,
    listed,
    listed_tokens,
    out,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BOUNDS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    parts = (columns + PART - 1) // PART
    part = tl.arange(0, PARTS)
    of_parts = tl.load(looks + row * parts + part, mask=part < parts, other=-float("inf"))
    odd = tl.max((of_parts != of_parts).to(tl.int32), 0)
    largest = tl.max(tl.where(of_parts == of_parts, of_parts, -float("inf")), 0)
    first = tl.load(tokens + row * parts + part, mask=part < parts, other=_NO_LIMIT)
    token = tl.min(tl.where(of_parts == largest, first, _NO_LIMIT), 0)
    if (odd != 0) | (tl.abs(largest) == float("inf")):
        token = row * 0 + _NONE
    else:
        wish = wishes + row
        temperature = tl.load(wish).to(tl.float32)
        if temperature > 0.0:
            own = logits + row.to(tl.int64) * stride
            least = tl.load(wish + 3 * of_wish).to(tl.float32)
            weights += row * parts * BOUNDS
            if _is_cut(wish, of_wish, columns):
                token = _of_best(
                    *(own, columns, wish, of_wish, largest, temperature, least),
                    *(bounds + row * BOUNDS, counts + row * parts * BOUNDS, weights, parts),
                    *(listed + row * LISTED, listed_tokens + row * LISTED, PARTS, PART, BOUNDS, LISTED, BLOCK),
                )
            else:
                number = tl.load(wish + 4 * of_wish)
                token = _of_all(own, columns, number, largest, temperature, least, weights, parts, PARTS, PART, BOUNDS)
    tl.store(out + row, token.to(tl.int64))


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


@triton.jit
def _forbid(logits, stride, columns, words, width, PART: tl.constexpr):
    """Set tokens without a bit to -inf; before the bits of a row stands its number."""
    words += tl.program_id(0) * width
    own = logits + tl.load(words).to(tl.int64) * stride
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    there = token < columns
    bit = tl.load(words + 1 + token // 32, mask=there, other=0) >> (token % 32) & 1
    tl.store(own + token, tl.full((PART,), -float("inf"), tl.float32), mask=there & (bit == 0))


class TritonSampling:
    def allow(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        columns = logits.shape[1]
        words = np.zeros((len(rows), 1 + -(-columns // 32)), np.int32)
        words[:, 0] = rows
        for row, mask in zip(words, masks, strict=True):
            bits = np.packbits(mask.numpy(), bitorder="little")
            row[1:].view(np.uint8)[: len(bits)] = bits
        there = on_device(torch.from_numpy(words), logits.device)
        grid = len(rows), -(-columns // _PART)
        _forbid[grid](logits, logits.stride(0), columns, there, words.shape[1], PART=_PART)

    @property
    def captures_draws(self) -> bool:
        """Return whether draws can be captured: not where torch replaces these kernels, and waits."""
        return isinstance(getattr(self.draw, "__self__", self), TritonSampling)

    def draw(self, logits: Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        table = table_of(wishes, numbers, logits.shape[1])
        if table[0].any():
            self.draw_by(logits, on_device(table, logits.device), out)
        elif wishes:
            _drawn(logits, torch.zeros(table.shape, dtype=table.dtype, device=logits.device), out, weighed=0)
        return out

    def draw_by(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        _drawn(logits, table, out, weighed=len(logits))

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


def _drawn(logits: Tensor, table: Tensor, out: Tensor, weighed: int) -> None:
    """Write a token of each row to `out`; `weighed` is 0 where all rows are known to be greedy, else their number."""
    logits = _readable(logits)
    rows, columns = logits.shape
    read, parts = (logits, logits.stride(0), columns, table, rows), -(-columns // _PART)
    sizes = {"PARTS": power_of_2(parts), "PART": _PART, "BOUNDS": _BOUNDS}
    looks, tokens = logits.new_empty(2, rows, parts), out.new_empty(2, rows, parts, dtype=torch.int32)
    counts, bounds = tokens.new_empty(weighed, parts, _BOUNDS), tokens.new_empty(weighed, _BOUNDS)
    weights = table.new_empty(weighed, parts, _BOUNDS)
    listed, listed_tokens = looks.new_empty(weighed, _LISTED), tokens.new_empty(weighed, _LISTED)
    _look[rows, parts](*read[:3], looks, tokens, PART=_PART)
    if weighed:
        _weigh[rows, parts](*read, looks, tokens, bounds, counts, weights, **sizes)
    whole = (looks, tokens, bounds, counts, weights, listed, listed_tokens, out)
    _draw[(rows,)](*read, *whole, LISTED=_LISTED, **sizes)


def _readable(logits: Tensor) -> Tensor:
    """Return the logits in fp32, with the numbers of a row side by side."""
    logits = logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()
