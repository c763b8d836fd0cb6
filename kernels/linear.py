"""Linear layers: for a shape and a number of rows, the fastest of our kernel, torch and zentorch.

All of them read the same weight, row-major as the model has it, so that one copy serves any number of rows. Which is
fastest, tuning.py measures at load. They differ in rounding: in bf16 a row may come out a last place differently in a
step with more rows, as it may from torch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from alignedserve.kernels.native import DTYPES, Library
from alignedserve.kernels.zentorch_linear import ZenLinear, zen_linear

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # each for up to so many rows, the last for any more
_MOST_BITS = 64  # that a number of rows has


class Way(Enum):
    NATIVE = "native"
    TORCH = "torch"
    ZENTORCH = "zentorch"


@dataclass(frozen=True)
class Shape:
    out: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> Shape:
        out, inputs = weight.shape
        return cls(out, inputs, weight.dtype)

    def __str__(self) -> str:
        return f"{self.out}x{self.inputs} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Tuning:
    """The way to go for each shape and bucket of rows."""

    ways: Mapping[Shape, tuple[Way, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{shape}: {', '.join(_ranges(ways))}" for shape, ways in self.ways.items())


def _ranges(ways: tuple[Way, ...]) -> Iterator[str]:
    """native to 64 rows, torch above"""
    for way, same in groupby(zip(ways, BUCKETS, strict=True), key=lambda pair: pair[0]):
        last = list(same)[-1][1]
        if last == BUCKETS[-1]:
            yield way.value if len(set(ways)) == 1 else f"{way.value} above"
        else:
            yield f"{way.value} to {last} rows"


class Path(Protocol):
    """A linear layer by one of the ways."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def add_to(self, x: torch.Tensor, residual: torch.Tensor, /) -> None: ...


Total = Callable[[torch.Tensor], None]  # sums a tensor over all that have a share, in place


class Linear:
    """x W^T + b of rows x [rows, inputs], with the weight [out, inputs] and, where there is one, the bias [out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, library: Library | None = None) -> None:
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        self.shape = Shape.of(weight)
        self.library = library if weight.device.type == "cpu" and weight.dtype in DTYPES else None
        self._total: Total | None = None
        self.use(Tuning())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._paths[(x.shape[0] - 1).bit_length()](x)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += its output, in place; rounded once, but by zentorch and by torch with a bias."""
        self._paths[(x.shape[0] - 1).bit_length()].add_to(x, residual)

    def use(self, tuning: Tuning) -> None:
        """From now on by the ways it has for this shape; without them by our kernel for few rows, torch for many."""
        few = Way.NATIVE if self.library and self.library.isa != "generic" else Way.TORCH
        default = tuple(few if bucket <= 64 else Way.TORCH for bucket in BUCKETS)
        chosen = tuning.ways.get(self.shape, default)
        paths = [self._whole(self.by(way)) for way in chosen]
        self._paths = paths + paths[-1:] * (_MOST_BITS - len(paths))
        others = [bucket for bucket, way in zip(BUCKETS, chosen, strict=True) if way is not Way.NATIVE]
        # Above the last bucket all goes as in it.
        self.native_to = (BUCKETS[BUCKETS.index(others[0]) - 1] if others[0] > 1 else 0) if others else sys.maxsize

    def sum_with(self, total: Total) -> None:
        """From now on it is one share of a layer, with some of its inputs: the outputs of all shares are summed."""
        self._total = total
        self._paths = [self._whole(path) for path in self._paths]

    def _whole(self, path: Path) -> Path:
        return path if self._total is None else _Summed(path, self._total)

    @property
    def ways(self) -> list[Way]:
        """Those there are to choose from."""
        zen = self.weight.device.type == "cpu" and self.shape.dtype is torch.bfloat16 and zen_linear()
        there = {Way.NATIVE: self.library, Way.TORCH: True, Way.ZENTORCH: zen}
        return [way for way in Way if there[way]]

    def by(self, way: Way) -> Path:
        """Itself by one way; by torch where that one is not there."""
        if way is Way.NATIVE and self.library:
            return _Native(self.library, self.weight, self.bias)
        if way is Way.ZENTORCH and (zen := zen_linear()):
            return _Zentorch(zen, self.weight, self.bias)
        return _Torch(self.weight, self.bias)


class _Summed:
    def __init__(self, share: Path, total: Total) -> None:
        self._share, self._total = share, total

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._share(x)
        self._total(out)
        return out

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self(x))


class _Torch:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        if self._bias is None:
            residual.addmm_(x, self._transposed)
        else:
            residual.add_(self(x))


class _Zentorch:
    def __init__(self, linear: ZenLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._linear, self._weight, self._bias = linear, weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self._weight, self._bias)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self(x))


class CLayer(Structure):
    """As csrc/kernels.h has it: addresses, so what it is of must live as long."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("out", c_int64),
        ("dtype", c_int32),
    )

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> CLayer:
        out, inputs = weight.shape
        return cls(weight.data_ptr(), None if bias is None else bias.data_ptr(), inputs, out, DTYPES[weight.dtype])


class _Native:
    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kept = weight, bias  # for the layer has addresses only
        self._dtype = weight.dtype
        self._out, self._inputs = weight.shape
        self._layer = CLayer.of(weight, bias)
        self._at = addressof(self._layer)
        self._linear = library.kernel("linear", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self._out))
        self._into(out, x, 0)
        return out

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        if residual.shape != (x.shape[0], self._out) or not residual.is_contiguous() or residual.dtype is not x.dtype:
            raise ValueError(f"the residual is {tuple(residual.shape)} {residual.dtype}, not {x.shape[0]}x{self._out}")
        self._into(residual, x, 1)

    def _into(self, out: torch.Tensor, x: torch.Tensor, add: int) -> None:
        rows, inputs = x.shape
        if inputs != self._inputs or x.dtype is not self._dtype:
            raise ValueError(f"rows of {inputs} {x.dtype} do not fit a layer of {self._inputs} {self._dtype}")
        between, within = x.stride()
        if within != 1:
            x = x.contiguous()
            between = inputs
        self._linear(self._at, x.data_ptr(), between, out.data_ptr(), rows, add)
