"""Run all layers of a decoder with fewer launches: what lies between two products is one kernel where there is one, and
products of few rows take in what lies beside them, where that is measured to be faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.kernels.common.decoder import Angles, DecoderLayer, Inner, Norm, Paged
from alignedserve.kernels.common.linear import LayerShape, Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.few_rows import MOST_ROWS
from alignedserve.kernels.triton.launch import benchmark

log = logging.getLogger("alignedserve.kernels")

MEASURED_ROWS = (1, 2, 4, MOST_ROWS)
_HALVES = (torch.bfloat16, torch.float16)
Milliseconds = Callable[[Callable[[], object]], float]


def milliseconds_on_gpu(call: Callable[[], object]) -> float:
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
    """Runs layers by these kernels: they are looked up in each step, since one that fails is replaced."""

    pauses = None  # the host launches all layers long before the first has run

    def __init__(self, kernels: Reference, layers: Sequence[DecoderLayer]) -> None:
        self._kernels = kernels
        self._layers = [(layer, layer.split) for layer in layers]
        self._ours = dict[tuple[_Role, int], bool]()  # whether our product is faster, by the bits of the rows

    def takes(self, rows: int) -> bool:
        return True

    def run(self, x: Tensor, angles: Sequence[Angles], paged: Paged, rows: Tensor | None = None) -> None:
        kernels, spans, plain = self._kernels, paged.spans, paged.adapters is None
        for (layer, heads), cache in zip(self._layers, paged.cache.unbind(0), strict=True):
            qkv = self._product(plain, layer.qkv, x, layer.attention_norm)
            turns = angles[layer.angles] if layer.turned else None
            query = kernels.rotate_and_write(cache, spans, qkv, heads, turns)
            attended = kernels.attend(query, cache, spans, layer.scoring)
            self._add(plain, layer.out, layer.after_attention, attended.flatten(1), x)
            inner = self._product(plain, layer.up, x, layer.mlp_norm, layer.inner)
            self._add(plain, layer.down, layer.after_mlp, inner, x)

    def rehearsals(self, milliseconds: Milliseconds = milliseconds_on_gpu) -> list[Callable[[], None]]:
        """Return what measures, role by role, whether our product or the library's is faster for some rows."""
        uses = dict[_Role, Callable[..., Tensor]]()
        for layer, _ in self._layers:
            attended, done = layer.after_attention is None, layer.after_mlp is None
            for linear, norm, inner, adds in (
                (layer.qkv, layer.attention_norm, None, False),
                (layer.out, None, None, attended),
                (layer.up, layer.mlp_norm, layer.inner, False),
                (layer.down, None, None, done),
            ):
                role = _role(linear, norm, inner, adds)
                if role is not None:
                    uses.setdefault(role, partial(self._run_as, linear=linear, norm=norm, inner=inner))
        return [
            partial(self._measure, role, rows, use, milliseconds)
            for role, use in uses.items()
            for rows in MEASURED_ROWS
        ]

    @torch.inference_mode()
    def _measure(self, role: _Role, rows: int, use: Callable[..., Tensor], milliseconds: Milliseconds) -> None:
        device = self._layers[0][0].qkv.memory.device
        x = torch.randn(rows, role.shape.inputs, device=device).to(role.shape.dtype)
        out = torch.zeros(rows, role.shape.out, device=device, dtype=x.dtype) if role.adds else None
        theirs, ours = (milliseconds(partial(use, is_ours, x=x, out=out)) for is_ours in (False, True))
        self._ours[role, (rows - 1).bit_length()] = ours < theirs
        log.info("%s of %d rows: library %.1f us, ours %.1f us", role.shape, rows, 1000 * theirs, 1000 * ours)

    def _product(
        self,
        plain: bool,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        inner: Inner | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product of the norm of x, and what becomes of it, or add it to `out`. What adapters add comes
        from the layer itself."""
        is_ours = False
        if plain and len(x) <= MOST_ROWS and self._ours:
            role = _role(linear, norm, inner, out is not None)
            is_ours = role is not None and self._ours.get((role, (len(x) - 1).bit_length()), False)
        return self._run_as(is_ours, x, linear, norm, inner, out)

    def _run_as(
        self, is_ours: bool, x: Tensor, linear: Linear, norm: Norm | None, inner: Inner | None, out: Tensor | None
    ) -> Tensor:
        within = None
        if is_ours and norm is not None and not norm.centred and len(x) == 1:
            within = norm  # of more rows, each program would take longer for it than a kernel of its own
        elif norm is not None:
            x = self._normed(x, norm)
        if is_ours:
            return self._kernels.few_rows(x, linear.memory, linear.bias, within, inner, out)
        if out is not None:
            linear.add_to(x, out)
            return out
        made = linear(x)
        return made if inner is None else self._inner(inner, made)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.centred:
            return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
        assert norm.weight is not None
        return self._kernels.rms_norm(x, norm.weight, norm.eps)

    def _inner(self, inner: Inner, up: Tensor) -> Tensor:
        match inner:
            case Inner.SILU:
                return self._kernels.silu_mul(up)
            case Inner.GELU:
                return self._kernels.gelu_mul(up)
        return torch.relu_(up)

    def _add(self, plain: bool, linear: Linear, after: Norm | None, rows: Tensor, x: Tensor) -> None:
        if after is None:
            self._product(plain, linear, rows, out=x)
        else:
            x += self._normed(self._product(plain, linear, rows), after)


def _role(linear: Linear, norm: Norm | None, inner: Inner | None, adds: bool) -> _Role | None:
    """Return the role of a product that a kernel of ours computes; None where there is none."""
    if type(linear) is not Linear or linear.shape.dtype not in _HALVES or inner is Inner.RELU:
        return None
    return _Role(linear.shape, linear.bias is not None, norm is not None and not norm.centred, inner, adds)
