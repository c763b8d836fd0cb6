"""Weights of 8-bit floats with a scale for each output, and linear layers of them by torch's scaled product.

GPUs multiply such floats from compute capability 8.9 on. There rows of x become such floats too, with a scale for each
row; elsewhere a layer expands its weight once, and is one like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from alignedserve.kernels.common.linear import Linear, LinearPath, Way
from alignedserve.kernels.common.quantised import FP8, Fp8Weight, QuantisedLinear

log = logging.getLogger("alignedserve.kernels")

MOST = torch.finfo(FP8).max
_EACH = 16  # inputs and outputs are a multiple of this in torch's product

RowsInFp8 = Callable[[Tensor], tuple[Tensor, Tensor]]  # from rows to rows of fp8, and the scale of each, [rows, 1]


def stacked(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Return weights of the same inputs as one, the outputs of each after those of the one before; None where their
    groups differ."""
    if len({weight.group for weight in weights}) > 1:
        return None
    as_bytes = torch.cat([weight.values.view(torch.uint8) for weight in weights])
    return Fp8Weight(as_bytes.view(FP8), torch.cat([weight.scale for weight in weights]), weights[0].group)


def in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as 8-bit floats, and the scale of each row, [rows, 1]."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-30) / MOST
    return (wide / scale).clamp(-MOST, MOST).to(FP8), scale


def fp8_weight(weight: Tensor) -> Fp8Weight:
    return Fp8Weight(*in_fp8(weight))


def why_not_fp8(weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """Return why torch cannot multiply with this weight as it is, or None."""
    if weight.group is not None:
        return "their scales are of groups of inputs"
    if any(size % _EACH for size in weight.shape):
        return f"{weight.shape[0]}x{weight.shape[1]} are no multiples of {_EACH}"
    return why_none(weight.values.device, dtype)


@cache
def why_none(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why there is no such product for x of this dtype on this device; it is tried once."""
    if dtype is not torch.bfloat16:
        return f"x is {dtype}, not bfloat16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no 8-bit floats"
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 32, generator=generator), torch.randn(48, 32, generator=generator)
    try:
        rows, of_rows = in_fp8(x.to(device))
        made = fp8_weight(weight.to(device))
        exact = (rows.float() * of_rows) @ made.expanded().t()
        off = float((_product(rows, of_rows, made).float() - exact).abs().max())
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # another torch, driver or GPU
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return None if off < 0.2 else f"its product of 8-bit floats is off by {off:.2g}"


def _product(rows: Tensor, of_rows: Tensor, weight: Fp8Weight) -> Tensor:
    return torch._scaled_mm(
        rows, weight.values.t(), scale_a=of_rows, scale_b=weight.scale.view(1, -1), out_dtype=torch.bfloat16
    )


def fp8_linear(weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, rows_in_fp8: RowsInFp8 = in_fp8) -> Linear:
    """Return a layer of the weight: as it is where the device can multiply so, else expanded."""
    why_not = why_not_fp8(weight, dtype)
    if why_not is None:
        return Fp8Linear(weight, bias, dtype, rows_in_fp8)
    _say_once(why_not)
    return Linear(weight.expanded().to(dtype), bias)


@cache
def _say_once(why: str) -> None:
    log.info("weights of 8-bit floats are expanded: %s", why)


class Fp8Linear(QuantisedLinear):
    """A layer that multiplies 8-bit floats."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, rows_in_fp8: RowsInFp8) -> None:
        self._weight, self._rows_in_fp8 = weight, rows_in_fp8
        super().__init__(weight, bias, dtype)

    def below(self, first: int) -> Linear:
        bias = None if self.bias is None else self.bias[first:]
        return fp8_linear(self._weight.rows(slice(first, None)), bias, self.shape.dtype, self._rows_in_fp8)

    def by(self, way: Way) -> LinearPath:
        return _Fp8Path(self._weight, self.bias, self._rows_in_fp8)


class _Fp8Path(LinearPath):
    def __init__(self, weight: Fp8Weight, bias: Tensor | None, rows_in_fp8: RowsInFp8) -> None:
        self._weight, self._bias, self._rows_in_fp8 = weight, bias, rows_in_fp8

    def __call__(self, x: Tensor) -> Tensor:
        made = _product(*self._rows_in_fp8(x), self._weight)
        return made if self._bias is None else made.add_(self._bias)
