"""Run all layers of a decoder with fewer launches: what lies between two products is one kernel where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.kernels.common.decoder import Angles, DecoderLayer, Inner, Norm, Paged
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference


class TritonDecoder:
    """Runs layers by these kernels: they are looked up in each step, since one that fails is replaced."""

    pauses = None  # the host launches all layers long before the first has run

    def __init__(self, kernels: Reference, layers: Sequence[DecoderLayer]) -> None:
        self._kernels = kernels
        self._layers = [(layer, layer.split) for layer in layers]

    def takes(self, rows: int) -> bool:
        return True

    def run(self, x: Tensor, angles: Sequence[Angles], paged: Paged, rows: Tensor | None = None) -> None:
        kernels, spans = self._kernels, paged.spans
        for (layer, heads), cache in zip(self._layers, paged.cache.unbind(0), strict=True):
            qkv = layer.qkv(self._normed(x, layer.attention_norm))
            turns = angles[layer.angles] if layer.turned else None
            query = kernels.rotate_and_write(cache, spans, qkv, heads, turns)
            attended = kernels.attend(query, cache, spans, layer.scoring)
            self._add(layer.out, layer.after_attention, attended.flatten(1), x)
            up = layer.up(self._normed(x, layer.mlp_norm))
            self._add(layer.down, layer.after_mlp, self._inner(layer.inner, up), x)

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

    def _add(self, linear: Linear, after: Norm | None, rows: Tensor, x: Tensor) -> None:
        if after is None:
            linear.add_to(rows, x)
        else:
            x += self._normed(linear(rows), after)
