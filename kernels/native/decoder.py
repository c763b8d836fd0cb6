"""Run all layers of a decoder in one call of C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from itertools import chain

import torch
from torch import Tensor

from alignedserve.kernels.common.decoder import Angles, Decoder, DecoderLayer, Norm, Paged, Pauses
from alignedserve.kernels.common.int8_kv import check_dtypes, num_kv_heads
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import CScoring
from alignedserve.kernels.library import DTYPES, KEPT, Library

_POINTERS = c_void_p * 2


class CNorm(Structure):
    """The struct of csrc/kernels.h, like the structs below."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("centred", c_int32), ("wide", c_int32))


class CDecoderLayer(Structure):
    _fields_ = (
        ("attention_norm", CNorm),
        ("mlp_norm", CNorm),
        ("after_attention", CNorm),
        ("after_mlp", CNorm),
        ("query_norm", CNorm),
        ("k_norm", CNorm),
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("half", c_int64),
        ("angles", c_int64),
        ("scoring", CScoring),
        ("activation", c_int32),
        ("dtype", c_int32),
    )


class CStep(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("cos", _POINTERS),
        ("sin", _POINTERS),
        ("cache", c_void_p),
        ("cache_layer", c_int64),
        ("spans", c_void_p),
        ("kept", c_int64),
        ("adapters", c_void_p),
        ("read", c_void_p),
        ("count_read", c_int64),
    )


def decoder_of(library: Library, layers: Sequence[DecoderLayer]) -> Decoder | None:
    """Return the decoder, or None where tensors have several types or a type that the C++ kernels do not know."""
    dtypes = {dtype for layer in layers for dtype in _dtypes(layer)}
    norms = {norm.weight.dtype for layer in layers for norm in _rms_norms(layer) if norm.weight is not None}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES) or not norms <= {*dtypes, torch.float32}:
        return None
    return NativeDecoder(library, layers)


class NativeDecoder:
    def __init__(self, library: Library, layers: Sequence[DecoderLayer]) -> None:
        self._layers = layers  # keeps the tensors alive: C++ has only their addresses
        self._linears = [linear for layer in layers for linear in _linears(layer)]
        self._dtype = layers[0].qkv.shape.dtype
        self._hidden, self._kv_heads, self._head_dim = (
            layers[0].qkv.shape.inputs,
            layers[0].kv_heads,
            layers[0].head_dim,
        )
        self._turned = layers[0].turned
        self._num_angles = 1 + max(layer.angles for layer in layers) if self._turned else 0
        self._table = (CDecoderLayer * len(layers))(*map(_in_c, layers))
        self.pauses = Pauses()
        self._run = library.kernel("decoder", c_void_p, c_int64, c_int64, c_void_p, c_void_p)

    def takes(self, rows: int) -> bool:
        """Return whether C++ is the fastest way of every linear layer."""
        return all(linear.native_to >= rows for linear in self._linears)

    def rehearsals(self, cache: Tensor) -> Sequence[Callable[[], None]]:
        return ()  # tuning.py measures

    def run(self, x: Tensor, angles: Sequence[Angles], paged: Paged, rows: Tensor | None = None) -> None:
        cache, spans = paged.cache, paged.spans
        self._check(x, angles, paged)
        cos, sin = (_POINTERS(*(both[part].data_ptr() for both in angles)) for part in (0, 1))
        apart, kept = cache.stride(0) * cache.itemsize, KEPT[cache.dtype]
        adapters = None if paged.adapters is None else addressof(paged.adapters.in_c)
        # What adapters change is told by row, so with them all rows run through all of the last layer.
        read = None if rows is None or paged.adapters is not None else rows.unique().int()
        last = (None, -1) if read is None else (read.data_ptr(), len(read))
        step = CStep(x.data_ptr(), x.shape[0], cos, sin, cache.data_ptr(), apart, spans.table, kept, adapters, *last)
        num_run, count, pauses = 0, len(self._table), self.pauses
        while (num_run := self._run(self._table, num_run, count, byref(step), pauses.address)) < count:
            pauses.take()

    def _check(self, x: Tensor, angles: Sequence[Angles], paged: Paged) -> None:
        """Raise ValueError for faults that C++ would not notice."""
        cache, rows = paged.cache, x.shape[0]
        if x.shape[1] != self._hidden or not x.is_contiguous() or rows != paged.spans.num_rows:
            raise ValueError(f"{tuple(x.shape)} is not {paged.spans.num_rows} rows of {self._hidden}, side by side")
        layers, heads, size = len(self._layers), self._kv_heads, self._head_dim
        if cache.shape[0] != layers or num_kv_heads(cache, size) != heads or not cache.is_contiguous():
            raise ValueError(f"a cache {tuple(cache.shape)} is not of {layers} layers of {heads} heads of {size}")
        if x.dtype is not self._dtype:
            raise TypeError(f"rows are {x.dtype}, the layers {self._dtype}: they must be the same")
        check_dtypes("rows are", x.dtype, cache)
        if paged.adapters is not None:
            paged.adapters.check(x)
        if len(angles) != self._num_angles:
            raise ValueError("cosines and sines are for layers that turn their heads, and only for them")
        for angle in chain(*angles):
            half = self._turned // 2
            if angle.dtype is not torch.float32 or angle.shape != (rows, half) or not angle.is_contiguous():
                raise ValueError(
                    f"cosines and sines are {tuple(angle.shape)} {angle.dtype}, not float32 ({rows}, {half})"
                )


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    return (layer.qkv, layer.out, layer.up, layer.down)


def _dtypes(layer: DecoderLayer) -> Iterator[torch.dtype]:
    yield from (linear.shape.dtype for linear in _linears(layer))
    centred = [norm for norm in (layer.attention_norm, layer.mlp_norm) if norm.centred]
    vectors = (vector for norm in centred for vector in (norm.weight, norm.bias))
    yield from (vector.dtype for vector in vectors if vector is not None)


def _rms_norms(layer: DecoderLayer) -> Iterator[Norm]:
    norms = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
    yield from (norm for norm in norms if norm is not None and not norm.centred)
    yield from (_head_norm(layer, weight) for weight in (layer.query_norm, layer.k_norm))


def _head_norm(layer: DecoderLayer, weight: Tensor | None) -> Norm:
    return Norm(weight, None, layer.attention_norm.eps, centred=False)


def _in_c(layer: DecoderLayer) -> CDecoderLayer:
    return CDecoderLayer(
        *map(_norm, (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)),
        *(_norm(_head_norm(layer, weight)) for weight in (layer.query_norm, layer.k_norm)),
        *(addressof(linear.in_c) for linear in _linears(layer) if linear.in_c is not None),  # every layer has one
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.turned // 2,
        layer.angles,
        layer.scoring.struct,
        layer.inner,
        DTYPES[layer.qkv.shape.dtype],
    )


def _norm(norm: Norm | None) -> CNorm:
    if norm is None:
        return CNorm()
    wide = norm.weight is not None and norm.weight.dtype is torch.float32
    return CNorm(_address(norm.weight), _address(norm.bias), norm.eps, norm.centred, wide)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
