"""Norms, rotation and activation of each token, and greedy tokens, in C++; the torch reference fills in the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from alignedserve.core import Sampling
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import PanelLinear, QuantisedLinear, QuantisedWeight
from alignedserve.kernels.library import DTYPES, Library
from alignedserve.kernels.native.library import NativeLibrary


class NativeTokens(NativeLibrary):
    def __init__(self, library: Library) -> None:
        super().__init__(library)
        pointer, rows_heads = c_void_p, (c_int64,) * 6
        self._rms_norm = library.kernel("rms_norm", c_int, *(pointer,) * 3, c_int, pointer, *rows_heads, c_float)
        self._layer_norm = library.kernel("layer_norm", c_int, *(pointer,) * 5, *(c_int64,) * 4, c_float)
        self._rotate = library.kernel("rotate", c_int, *(pointer,) * 3, *(c_int64,) * 5)
        gating = (c_int, pointer, pointer, *(c_int64,) * 3)
        self._silu_mul, self._gelu_mul = library.kernel("silu_mul", *gating), library.kernel("gelu_mul", *gating)
        self._gelu = library.kernel("gelu", c_int, pointer, c_int64)
        self._likeliest = library.kernel("likeliest", pointer, *(c_int64,) * 3, pointer)

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


def _plain_rows(x: Tensor) -> bool:
    """Return whether x is [rows, width] of a known dtype, with the numbers of a row side by side."""
    return x.dim() == 2 and x.stride(1) == 1 and x.dtype in DTYPES
