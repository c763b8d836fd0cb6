"""Run all layers of a decoder with fewer launches: what lies between two products is one kernel where there is one, and
products of few rows take in what lies beside them, where that is measured to be faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.kernels.common.decoder import Angles, DecoderLayer, Heads, Inner, Layer, Norm, Paged, Sums
from alignedserve.kernels.common.linear import LayerShape, Linear
from alignedserve.kernels.common.placing import StepMemory
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.common.summing import Residual, SumThenNorm
from alignedserve.kernels.triton.few_rows import MOST_ROWS
from alignedserve.kernels.triton.launch import benchmark, benchmark_in_a_graph

log = logging.getLogger("alignedserve.kernels")

MEASURED_ROWS = (1, 2, 4, MOST_ROWS)
# How many decodes attention is measured with, and how many tokens each has. The largest number comes first: a kernel
# that is not tuned yet is tuned for it.
MEASURED_DECODES, _DECODED = (128, 16, 1), 1000
_HALVES = (torch.bfloat16, torch.float16)
Milliseconds = Callable[[Callable[[], object]], float]


def cold_milliseconds(call: Callable[[], object]) -> float:
    """Return the median, with the weight read from memory each time."""
    return float(benchmark(call, (0.5, 0.2, 0.8))[0])


class _Role(NamedTuple):
    """What a product is for: products of one role take equally long."""

    shape: LayerShape
    has_bias: bool
    norm: bool  # whether a norm comes before it that one row may have within the product
    inner: Inner | None
    adds: bool


class TritonDecoder:
    """Runs layers by these kernels: they are looked up in each step, since one that fails is replaced.

    A product is added to the residual as it is made where nothing else stands between; else by the kernel of the next
    norm (summing.py), as with `sums`, those of several ranks.
    """

    pauses = None  # the host launches all layers long before the first has run

    def __init__(self, kernels: Reference, layers: Sequence[Layer], sums: Sums | None = None) -> None:
        self._kernels, self._is_alone = kernels, sums is None
        self._sums = SumThenNorm(kernels) if sums is None else sums
        self._layers = [(layer, layer.split) for layer in layers]
        self._ours = dict[tuple[_Role, int], bool]()  # whether our product is faster, by the bits of the rows
        self._at_once = dict[int, bool]()  # whether one kernel of attention is faster than two, by the decodes

    def takes(self, rows: int) -> bool:
        return True

    def run(self, x: Tensor, angles: Sequence[Angles], paged: Paged, rows: Tensor | None = None) -> None:
        spans, plain = paged.spans, paged.adapters is None
        residual = Residual(x, self._kernels, self._sums)
        at_once = next((is_faster for decodes, is_faster in self._at_once.items() if decodes <= len(x)), True)
        for (layer, heads), cache in zip(self._layers, paged.cache.unbind(0), strict=True):
            qkv = self._of_norm(plain, layer.qkv, residual, layer.attention_norm)
            turns = angles[layer.angles] if layer.turned else None
            attended = self._attended(at_once, layer, heads, cache, spans, qkv, turns)
            self._add(plain, layer.out, layer.after_attention, attended.flatten(1), residual)
            if isinstance(layer, DecoderLayer):
                inner = self._of_norm(plain, layer.up, residual, layer.mlp_norm, layer.inner)
                self._add(plain, layer.down, layer.after_mlp, inner, residual)
            elif layer.mlp.adds_at_once and self._may_add(layer.after_mlp):
                layer.mlp.add_to(residual.normed(layer.mlp_norm), x)
            else:
                residual.add(layer.mlp.share(residual.normed(layer.mlp_norm)), layer.after_mlp)
        residual.finish()

    def rehearsals(
        self,
        cache: Tensor,
        milliseconds: Milliseconds = cold_milliseconds,
        in_a_graph: Milliseconds = benchmark_in_a_graph,
    ) -> list[Callable[[], None]]:
        """Return what measures, role by role, whether our product or the library's is faster for some rows, and then
        whether attention of decodes is faster in one kernel or in two."""
        uses = dict[_Role, Callable[..., Tensor]]()
        for linear, norm, inner, adds in self._products():
            role = _role(linear, norm, inner, adds)
            if role is not None:
                uses.setdefault(role, partial(self._run_as, linear=linear, norm=norm, inner=inner))
        products = [
            partial(self._measure, role, rows, use, milliseconds)
            for role, use in uses.items()
            for rows in MEASURED_ROWS
        ]
        if not self._kernels.captures:
            return products
        return products + [
            partial(self._measure_attention, decodes, cache, in_a_graph)
            for decodes in MEASURED_DECODES
            if decodes <= len(cache) // 2
        ]

    def _products(self) -> Iterator[tuple[Linear, Norm | None, Inner | None, bool]]:
        """Yield each product: with the norm before it, unless that comes with the sum, with what becomes of it, and
        whether it is added to the residual."""
        whole = [True]
        for layer, _ in self._layers:
            yield from ((layer.qkv, layer.attention_norm if is_whole else None, None, False) for is_whole in whole)
            whole = self._whole_behind(layer.out, layer.after_attention)
            yield layer.out, None, None, whole[0]
            if isinstance(layer, DecoderLayer):
                yield from ((layer.up, layer.mlp_norm if is_whole else None, layer.inner, False) for is_whole in whole)
                whole = self._whole_behind(layer.down, layer.after_mlp)
                yield layer.down, None, None, whole[0]
            else:
                whole = [layer.mlp.adds_at_once and self._may_add(layer.after_mlp)]

    def _whole_behind(self, linear: Linear, after: Norm | None) -> list[bool]:
        """Return whether the residual is whole behind a product: of our kernel, and of the library where that
        differs."""
        may_add = self._may_add(after)
        return [True, False] if may_add and not linear.adds_at_once(1) else [may_add]

    @torch.inference_mode()
    def _measure(self, role: _Role, rows: int, use: Callable[..., Tensor], milliseconds: Milliseconds) -> None:
        device = self._layers[0][0].qkv.memory.device
        x = torch.randn(rows, role.shape.inputs, device=device).to(role.shape.dtype)
        out = torch.zeros(rows, role.shape.out, device=device, dtype=x.dtype) if role.adds else None
        theirs, ours = (milliseconds(partial(use, is_ours, x=x, out=out)) for is_ours in (False, True))
        self._ours[role, (rows - 1).bit_length()] = ours < theirs
        log.info("%s of %d rows: library %.1f us, ours %.1f us", role.shape, rows, 1000 * theirs, 1000 * ours)

    @torch.inference_mode()
    def _measure_attention(self, decodes: int, cache: Tensor, milliseconds: Milliseconds) -> None:
        """Let the first layer stand for all; what it writes is no request's."""
        (layer, heads), block_size = self._layers[0], cache.shape[1]
        each = min(-(-_DECODED // block_size), len(cache) // 2 // decodes)
        lies = [QuerySpan(1, min(_DECODED, each * block_size), range(n * each, (n + 1) * each)) for n in range(decodes)]
        memory = StepMemory(each * decodes, decodes, cache.device)
        spans = StaticSpans(StepSize(decodes, decodes), lies, block_size, memory)
        qkv = torch.randn(decodes, layer.qkv.shape.out, device=cache.device).to(layer.qkv.shape.dtype)
        drawn = torch.randn(decodes, layer.turned // 2, device=cache.device)
        turns = (drawn.cos(), drawn.sin()) if layer.turned else None
        two, one = (
            milliseconds(partial(self._attended, at_once, layer, heads, cache, spans, qkv, turns))
            for at_once in (False, True)
        )
        self._at_once[decodes] = one < two
        log.info("attention of %d decodes: two kernels %.1f us, one %.1f us", decodes, 1000 * two, 1000 * one)

    def _attended(
        self,
        at_once: bool,
        layer: Layer,
        heads: Heads,
        cache: Tensor,
        spans: Spans,
        qkv: Tensor,
        turns: Angles | None,
    ) -> Tensor:
        """Write K and V of the rows, and return their attention: in one kernel where that is asked for, and there is
        one for this step."""
        if at_once:
            attended = self._kernels.attend_new(cache, spans, qkv, heads, turns, layer.scoring)
            if attended is not None:
                return attended
        query = self._kernels.rotate_and_write(cache, spans, qkv, heads, turns)
        return self._kernels.attend(query, cache, spans, layer.scoring)

    def _is_ours(
        self, plain: bool, linear: Linear, rows: int, norm: Norm | None, inner: Inner | None, adds: bool
    ) -> bool:
        """Return whether our product is the faster. What adapters add comes from the layer itself."""
        if not plain or rows > MOST_ROWS or not self._ours:
            return False
        role = _role(linear, norm, inner, adds)
        return role is not None and self._ours.get((role, (rows - 1).bit_length()), False)

    def _of_norm(
        self, plain: bool, linear: Linear, residual: Residual, norm: Norm, inner: Inner | None = None
    ) -> Tensor:
        """Return the product of the residual's norm, and what becomes of it."""
        x, within = (residual.x, norm) if residual.is_whole else (residual.normed(norm), None)
        return self._run_as(self._is_ours(plain, linear, len(x), within, inner, False), x, linear, within, inner, None)

    def _add(self, plain: bool, linear: Linear, after: Norm | None, rows: Tensor, residual: Residual) -> None:
        """Add the product of rows to the residual."""
        adds = self._may_add(after)
        is_ours = self._is_ours(plain, linear, len(rows), None, None, adds)
        if adds and (is_ours or linear.adds_at_once(len(rows))):
            self._run_as(is_ours, rows, linear, None, None, residual.x)
        else:
            residual.add(self._run_as(is_ours, rows, linear, None, None, None), after)

    def _may_add(self, after: Norm | None) -> bool:
        """Return whether nothing stands between a product and the residual."""
        return after is None and self._is_alone

    def _run_as(
        self, is_ours: bool, x: Tensor, linear: Linear, norm: Norm | None, inner: Inner | None, out: Tensor | None
    ) -> Tensor:
        within = None
        if is_ours and norm is not None and not norm.centred and len(x) == 1:
            within = norm  # of more rows, each program would take longer for it than a kernel of its own
        elif norm is not None:
            x = self._kernels.normed(x, norm)
        if is_ours:
            return self._kernels.few_rows(x, linear.memory, linear.bias, within, inner, out)
        if out is not None:
            linear.add_to(x, out)
            return out
        made = linear.share(x)
        return made if inner is None else self._inner(inner, made)

    def _inner(self, inner: Inner, up: Tensor) -> Tensor:
        match inner:
            case Inner.SILU:
                return self._kernels.silu_mul(up)
            case Inner.GELU:
                return self._kernels.gelu_mul(up)
        return torch.relu_(up)


def _role(linear: Linear, norm: Norm | None, inner: Inner | None, adds: bool) -> _Role | None:
    """Return the role of a product that a kernel of ours computes; None where there is none."""
    if type(linear) is not Linear or linear.shape.dtype not in _HALVES or inner is Inner.RELU:
        return None
    return _Role(linear.shape, linear.bias is not None, norm is not None and not norm.centred, inner, adds)
