"""The C++ kernels behind dispatcher.py's interface; the torch reference fills in what they lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_float, c_int, c_int64, c_uint32, c_void_p

import torch
from torch import Tensor

from alignedserve.core import Sampling
from alignedserve.kernels.build import sources
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.decoder import Decoder, DecoderLayer, Layer, Sums
from alignedserve.kernels.common.int8_kv import check_dtypes, heads_written, num_kv_heads
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import PanelLinear, QuantisedLinear, QuantisedWeight
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, TextRows
from alignedserve.kernels.library import DTYPES, KEPT, Library
from alignedserve.kernels.native.decoder import decoder_of


class _BlockRows(Structure):
    """The struct of csrc/kernels.h."""

    _fields_ = tuple(
        (name, c_int64)
        for name in "layers tokens slots v_after vector cache_layer row_layer row_half row_token".split()
    )


class Native(Reference):
    """All kernels of the C++ library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.name = f"C++, {library.isa}"
        pointer = c_void_p
        cache = (c_int, pointer, c_int64)  # the dtype of K and V, their address, and how many heads they have
        self._write = library.kernel("write", c_int, *cache, c_int64, pointer, *(pointer, c_int64) * 2)
        self._attend = library.kernel("attend", c_int, pointer, *(c_int64,) * 4, *cache, pointer, pointer, pointer)
        self._attend_latent = library.kernel(
            "attend_latent", c_int, pointer, *(c_int64,) * 5, pointer, pointer, c_float, pointer
        )
        heads = (pointer, c_int64, c_int64)
        self._attend_texts = library.kernel(
            "attend_texts", c_int, *heads * 3, c_int64, c_int64, pointer, c_int64, c_int64, c_float, pointer
        )
        rows_heads = (c_int64,) * 6
        self._rms_norm = library.kernel("rms_norm", c_int, *(pointer,) * 3, c_int, pointer, *rows_heads, c_float)
        self._layer_norm = library.kernel("layer_norm", c_int, *(pointer,) * 5, *(c_int64,) * 4, c_float)
        self._rotate = library.kernel("rotate", c_int, *(pointer,) * 3, *(c_int64,) * 5)
        gating = (c_int, pointer, pointer, *(c_int64,) * 3)
        self._silu_mul, self._gelu_mul = library.kernel("silu_mul", *gating), library.kernel("gelu_mul", *gating)
        self._gelu = library.kernel("gelu", c_int, pointer, c_int64)
        self._likeliest = library.kernel("likeliest", pointer, *(c_int64,) * 3, pointer)
        self._gather = library.kernel("gather", *[pointer] * 5, returns=c_int)
        self._scatter = library.kernel("scatter", *[pointer] * 5, returns=c_int)
        self._crc32 = library.kernel("crc32", pointer, c_int64, c_int64, c_int64, pointer)
        rows, levels = (c_int, pointer, c_int64, c_int64), (pointer, pointer, pointer, c_int64, c_int64, c_int64)
        self._quantise = library.kernel("quantise", *rows, *levels, returns=c_int)
        self._dequantise = library.kernel("dequantise", *rows, *levels)
        self._adapt = library.kernel("adapt", c_int, pointer, c_int64, c_int64, pointer, c_int64, pointer, c_int64)

    @property
    def identity(self) -> str:
        return f"{self.name}, {sources()}"

    def decoder(self, layers: Sequence[Layer], sums: Sums | None = None) -> Decoder | None:
        """Return a decoder of dense layers; None where ranks must meet between the parts of a layer."""
        dense = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        return decoder_of(self.library, dense) if len(dense) == len(layers) and sums is None else None

    # --- Attention over paged blocks

    def write(self, cache: Tensor, spans: Spans, k: Tensor, v: Tensor) -> None:
        for numbers in (k, v):
            check_dtypes(f"K and V are {k.dtype} and", numbers.dtype, cache)
        (k_stride, k_step), (v_stride, v_step) = k.stride(), v.stride()
        if k_step != 1 or v_step != 1:
            return self.write(cache, spans, k.contiguous(), v.contiguous())
        heads, kv_dim = heads_written(cache, k.shape[1]), k.shape[1]
        self._write(
            *(DTYPES[k.dtype], KEPT[cache.dtype], cache.data_ptr(), heads, kv_dim // heads, spans.table),
            *(k.data_ptr(), k_stride, v.data_ptr(), v_stride),
        )
        return None

    def attend(self, query: Tensor, cache: Tensor, spans: Spans, scoring: Scoring) -> Tensor:
        check_dtypes("queries are", query.dtype, cache)
        row_stride, head_stride, step = query.stride()
        if step != 1:
            return self.attend(query.contiguous(), cache, spans, scoring)
        _, heads, head_dim = query.shape
        kv_heads = num_kv_heads(cache, head_dim)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of {head_dim} do not divide among {kv_heads} heads of K")
        scoring.check(heads)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(
            *(DTYPES[query.dtype], query.data_ptr(), row_stride, head_stride, heads, head_dim, KEPT[cache.dtype]),
            *(cache.data_ptr(), kv_heads, spans.table, scoring.in_c, out.data_ptr()),
        )
        return out

    def attend_latent(self, query: Tensor, cache: Tensor, spans: Spans, scale: float, rank: int) -> Tensor:
        row_stride, head_stride, step = query.stride()
        if step != 1:
            return self.attend_latent(query.contiguous(), cache, spans, scale, rank)
        rows, heads, size = query.shape
        if query.dtype is not cache.dtype:
            raise TypeError(f"queries are {query.dtype}, the cache {cache.dtype}: they must be the same")
        if size != 2 * cache.shape[-1] or not 0 < rank <= size:
            raise ValueError(f"queries of {size} with V of {rank} do not fit halves of {cache.shape[-1]}")
        out = query.new_empty((rows, heads, rank))
        self._attend_latent(
            *(DTYPES[query.dtype], query.data_ptr(), row_stride, head_stride, heads, size, rank),
            *(cache.data_ptr(), spans.table, scale, out.data_ptr()),
        )
        return out

    def attend_texts(
        self, query: Tensor, k: Tensor, v: Tensor, texts: TextRows, scale: float, window: int | None = None
    ) -> Tensor:
        rows, heads, head_dim = query.shape
        for numbers in (query, k, v):
            if numbers.shape != query.shape or numbers.dtype is not query.dtype:
                raise ValueError(f"query, K and V are {tuple(query.shape)} {query.dtype}, and {tuple(numbers.shape)}")
        if rows != texts.num_rows:
            raise ValueError(f"the texts have {texts.num_rows} rows, the query has {rows}")
        placed = [x if x.stride(2) == 1 else x.contiguous() for x in (query, k, v)]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend_texts(
            DTYPES[query.dtype],
            *(number for x in placed for number in (x.data_ptr(), x.stride(0), x.stride(1))),
            *(heads, head_dim, texts.bounds.data_ptr(), len(texts.lengths), rows if window is None else window, scale),
            out.data_ptr(),
        )
        return out

    # --- Norms, rotation and activation of each token; greedy tokens

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight, bias, self.library)

    def quantised(self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedLinear:
        return PanelLinear(weight, bias, self.library, dtype)

    def draw(self, logits: Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]) -> Tensor:
        return drawing.draw(logits, wishes, numbers, self._greedy)

    def _greedy(self, logits: Tensor) -> Tensor:
        rows, width = logits.shape
        row, within = logits.stride()
        if logits.dtype is not torch.float32 or (within != 1 and width > 1) or not width:
            return drawing.greedy(logits)
        out = torch.empty(rows, dtype=torch.int64)
        self._likeliest(logits.data_ptr(), row, rows, width, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        known = x.dim() in (2, 3) and x.stride(-1) == 1 and x.dtype in DTYPES
        if not known or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        where = (*x.shape, *x.stride()[:2]) if x.dim() == 3 else (len(x), 1, x.shape[1], x.stride(0), 0)
        out, wide = x.new_empty(x.shape), weight.dtype is torch.float32
        read = (DTYPES[x.dtype], x.data_ptr(), None, weight.data_ptr(), wide)
        self._rms_norm(*read, out.data_ptr(), *where, 0, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if not _plain_rows(x) or any(of is not None and of.dtype is not x.dtype for of in (weight, bias)):
            return super().layer_norm(x, weight, bias, eps)
        out = torch.empty_like(x)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (x, None, weight, bias, out)]
        self._layer_norm(DTYPES[x.dtype], *pointers, *x.shape, x.stride(0), 0, eps)
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[-1]
        row, head, within = heads.stride()
        angles = cos.is_contiguous() and sin.is_contiguous() and cos.dtype is sin.dtype is torch.float32
        if within != 1 or not angles or heads.dtype not in DTYPES:
            return super().rotate(heads, cos, sin)
        rows, num_heads, _ = heads.shape
        pointers = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._rotate(DTYPES[heads.dtype], *pointers, rows, num_heads, half, row, head)
        return None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(self._silu_mul, gate_up) if _plain_rows(gate_up) else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(self._gelu_mul, gate_up) if _plain_rows(gate_up) else super().gelu_mul(gate_up)

    def _gated(self, kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        kernel(DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, both // 2, gate_up.stride(0))
        return out

    def gelu(self, x: Tensor) -> Tensor:
        if not x.is_contiguous() or x.dtype not in DTYPES:
            return super().gelu(x)
        self._gelu(DTYPES[x.dtype], x.data_ptr(), x.numel())
        return x

    # --- What adapters add to a linear layer

    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        step.check(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        if out.stride(1) != 1 or out.dtype is not x.dtype:
            raise ValueError(f"outputs {out.dtype} with steps {out.stride()} are not rows of {x.dtype}")
        self._adapt(
            DTYPES[x.dtype],
            addressof(step.in_c),
            layer,
            x.shape[1],
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
        )

    # --- Between the device and pages

    def gather(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        _copy(self._gather, cache, slots, out)

    def scatter(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        _copy(self._scatter, cache, slots, rows)

    def gather_and_sum(self, cache: Tensor, slots: Tensor, out: Tensor) -> int:
        crc = c_uint32()
        _copy(self._gather, cache, slots, out, crc)
        return crc.value

    def scatter_and_sum(self, cache: Tensor, slots: Tensor, rows: Tensor) -> int:
        crc = c_uint32()
        _copy(self._scatter, cache, slots, rows, crc)
        return crc.value

    def crc32(self, rows: Tensor) -> int:
        crc, (num, num_bytes) = c_uint32(), rows.shape
        _check(rows.dtype == torch.uint8 and rows.stride(1) == 1, "rows are bytes side by side")
        self._crc32(rows.data_ptr(), num, rows.stride(0), num_bytes, byref(crc))
        return crc.value

    # --- int8, per channel

    def quantise(self, rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        odd = self._quantise(
            *(DTYPES[rows.dtype], rows.data_ptr(), rows.stride(0), rows.stride(1)), *_levels(rows, q, least, step)
        )
        if odd:
            step.fill_(math.nan)

    def dequantise(self, q: Tensor, least: Tensor, step: Tensor, out: Tensor) -> None:
        self._dequantise(
            *(DTYPES[out.dtype], out.data_ptr(), out.stride(0), out.stride(1)), *_levels(out, q, least, step)
        )


def _plain_rows(x: Tensor) -> bool:
    """Return whether x is [rows, width] of a known dtype, with the numbers of a row side by side."""
    return x.dim() == 2 and x.stride(1) == 1 and x.dtype in DTYPES


def _copy(kernel: Callable[..., int], cache: Tensor, slots: Tensor, rows: Tensor, crc: c_uint32 | None = None) -> None:
    """Copy between the cache and the rows, and set `crc` to the CRC-32 of the rows."""
    where, slots = _block_rows(cache, slots, rows), slots.contiguous()
    into = None if crc is None else byref(crc)
    if kernel(byref(where), slots.data_ptr(), cache.data_ptr(), rows.data_ptr(), into):
        raise IndexError(f"a copy names a slot outside the {cache.shape[1]} blocks of the cache")


def _levels(rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> tuple[int, ...]:
    """Return the arguments that quantise and dequantise share."""
    groups, tokens, channels = rows.shape
    _check(tokens > 0 and rows.stride(2) == 1, "rows have at least one token, and their channels side by side")
    _check(
        q.shape == rows.shape and q.dtype == torch.uint8 and q.is_contiguous(), "q is uint8, packed, of the rows' shape"
    )
    for of_channel in (least, step):
        _check(of_channel.shape == (groups, channels), "least and step are [groups, channels]")
        _check(of_channel.dtype == torch.float32 and of_channel.is_contiguous(), "least and step are fp32, packed")
    return q.data_ptr(), least.data_ptr(), step.data_ptr(), groups, tokens, channels


def _block_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> _BlockRows:
    layers, _, block_size, kv_dim = cache.shape
    vectors = cache.view(layers, -1, kv_dim)
    _check(slots.dtype == torch.int64 and slots.dim() == 1, "slots are a list of int64")
    _check(rows.dtype == cache.dtype and rows.stride(3) == 1, "rows are vectors of the cache's dtype")
    _check(rows.shape == (layers, 2, len(slots), kv_dim), "rows are [layers, 2, tokens, kv_dim]")
    size = cache.element_size()
    strides = (stride * size for stride in rows.stride()[:3])
    return _BlockRows(
        layers, len(slots), vectors.shape[1], block_size, kv_dim * size, vectors.stride(0) * size, *strides
    )


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
