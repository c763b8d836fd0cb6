"""Linear layers: for a shape and a number of rows, the fastest of our kernel, torch and zentorch.

All of them read the same weight, row-major as the model has it, so that one copy serves any number of rows. Or the
weight is packed in its place, for a kernel of ours that then serves any number of rows alone. Which is fastest,
tuning.py measures at load. They differ in rounding: in bf16 a row may come out a last place differently in a step with
more rows, as it may from torch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from alignedserve.kernels.common.zentorch_linear import ZenLinear, zen_linear
from alignedserve.kernels.library import DTYPES, Library

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # each for up to so many rows, the last for any more
_MOST_BITS = 64  # that a number of rows has
_PANEL = 64  # outputs of a packed panel


class Way(Enum):
    NATIVE = "native"
    TORCH = "torch"
    ZENTORCH = "zentorch"
    PACKED = "packed"  # for all numbers of rows or none: others cannot read the weight then


class _Into(IntEnum):
    """What becomes of the products, as csrc/kernels.h has it."""

    ROUNDED = 0
    ADDED = 1
    WIDE = 2


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

    def wide(self, x: torch.Tensor, out: torch.Tensor | None, /) -> torch.Tensor: ...


Total = Callable[[torch.Tensor], None]  # sums a tensor over all that have a share, in place


class Linear:
    """x W^T + b of rows x [rows, inputs], with the weight [out, inputs] and, where there is one, the bias [out].

    A weight that others read as well, and not through this layer, is `shared`: it is never packed."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        library: Library | None = None,
        shared: bool = False,
    ) -> None:
        self.memory = weight.detach().contiguous()  # the weight as it lies
        self.bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        self.shape = Shape.of(weight)
        self.library = library if weight.device.type == "cpu" and weight.dtype in DTYPES else None
        self.in_c = CLayer.of(self.memory, self.bias) if self.library else None
        self.shared = shared
        self._total: Total | None = None
        self.use(Tuning())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._paths[(x.shape[0] - 1).bit_length()](x)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += its output, in place; rounded once, but by zentorch and by torch with a bias."""
        self._paths[(x.shape[0] - 1).bit_length()].add_to(x, residual)

    def wide(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Its output in fp32, in `out` where that is given; our kernels do not round it before."""
        return self._paths[(x.shape[0] - 1).bit_length()].wide(x, out)

    @property
    def packed(self) -> bool:
        return self.in_c is not None and bool(self.in_c.packed)

    @property
    def weight(self) -> torch.Tensor:
        """Row-major; a copy where it is packed."""
        if not self.packed:
            return self.memory
        copy = Linear(self.memory.clone(), None, self.library)
        copy.in_c.packed = 1  # type: ignore[union-attr]  # it has one, as this has
        copy.pack(back=True)
        return copy.memory

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as of an embedding that is the head too."""
        if not self.packed:
            return F.embedding(tokens, self.memory)
        out, inputs = self.memory.shape
        whole = out // _PANEL * _PANEL
        pairs = self.memory.view(torch.int32)  # csrc/packed.cpp: of each panel [inputs / 2, its outputs]
        first = tokens // _PANEL
        within = pairs[:whole].view(-1, inputs // 2, _PANEL)
        if whole == out:
            return within[first, :, tokens % _PANEL].view(self.memory.dtype)
        last = pairs[whole:].view(inputs // 2, out - whole)
        rows = torch.empty(len(tokens), inputs // 2, dtype=torch.int32)
        is_last = tokens >= whole
        rows[~is_last] = within[first[~is_last], :, tokens[~is_last] % _PANEL]
        rows[is_last] = last[:, tokens[is_last] - whole].t()
        return rows.view(self.memory.dtype)

    def below(self, first: int) -> Linear:
        """The layer of its outputs from `first` on, of the same memory where that can be."""
        bias = None if self.bias is None else self.bias[first:]
        if not self.packed:
            return Linear(self.memory[first:], bias, self.library, shared=True)
        if first % _PANEL:
            return Linear(self.weight[first:].clone(), bias, self.library)
        part = Linear(self.memory[first:], bias, self.library, shared=True)
        part.in_c.packed = 1  # type: ignore[union-attr]  # as its panels are
        part.use(Tuning({part.shape: (Way.PACKED,) * len(BUCKETS)}))
        return part

    def pack(self, back: bool = False) -> bool:
        """Brings the weight into our kernel's order, or back, in place. False where there is no kernel for that."""
        if self.in_c is None or self.library is None:
            return False
        if self.packed == (not back):
            return True
        if not self.library.kernel("pack", c_void_p, c_int)(addressof(self.in_c), int(back)):
            return False
        self.in_c.packed = int(not back)
        return True

    def use(self, tuning: Tuning) -> None:
        """From now on by the ways it has for this shape; without them by our kernel for few rows, torch for many."""
        few = Way.NATIVE if self.library and self.library.isa != "generic" else Way.TORCH
        default = tuple(few if bucket <= 64 else Way.TORCH for bucket in BUCKETS)
        chosen = tuning.ways.get(self.shape, default)
        if chosen[0] is Way.PACKED and not (self.packed or (not self.shared and self.pack())):
            chosen = default
        elif chosen[0] is not Way.PACKED and self.packed:
            self.pack(back=True)
        paths = [self._whole(self.by(way)) for way in chosen]
        self._paths = paths + paths[-1:] * (_MOST_BITS - len(paths))
        ours = (Way.NATIVE, Way.PACKED)
        others = [bucket for bucket, way in zip(BUCKETS, chosen, strict=True) if way not in ours]
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
        """Those there are to choose from while the weight is row-major."""
        zen = self.memory.device.type == "cpu" and self.shape.dtype is torch.bfloat16 and zen_linear()
        there = {Way.NATIVE: self.library, Way.TORCH: True, Way.ZENTORCH: zen}
        return [way for way, is_there in there.items() if is_there]

    def by(self, way: Way) -> Path:
        """Itself by one way; by torch where that one is not there."""
        if way in (Way.NATIVE, Way.PACKED) and self.library and self.in_c:
            return _Native(self.library, self.memory, self.bias, self.in_c)
        if way is Way.ZENTORCH and (zen := zen_linear()):
            return _Zentorch(zen, self.memory, self.bias)
        return _Torch(self.memory, self.bias)


class _Summed:
    def __init__(self, share: Path, total: Total) -> None:
        self._share, self._total = share, total

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._share(x)
        self._total(out)
        return out

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self(x))

    def wide(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return _widened(self(x), out)


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

    def wide(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return _widened(self(x), out)


class _Zentorch:
    def __init__(self, linear: ZenLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._linear, self._weight, self._bias = linear, weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self._weight, self._bias)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self(x))

    def wide(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return _widened(self(x), out)


def _widened(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return made.float() if out is None else out.copy_(made)


class CLayer(Structure):
    """As csrc/kernels.h has it: addresses, so what it is of must live as long."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("out", c_int64),
        ("dtype", c_int32),
        ("packed", c_int32),
    )

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> CLayer:
        out, inputs = weight.shape
        return cls(weight.data_ptr(), None if bias is None else bias.data_ptr(), inputs, out, DTYPES[weight.dtype], 0)


class _Native:
    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, layer: CLayer) -> None:
        self._kept = weight, bias, layer  # for C++ has addresses only
        self._dtype = weight.dtype
        self._out, self._inputs = weight.shape
        self._at = addressof(layer)
        self._linear = library.kernel("linear", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self._out))
        self._write(out, x, _Into.ROUNDED)
        return out

    def wide(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            out = x.new_empty((x.shape[0], self._out), dtype=torch.float32)
        elif out.shape != (x.shape[0], self._out) or not out.is_contiguous() or out.dtype is not torch.float32:
            raise ValueError(f"the output is {tuple(out.shape)} {out.dtype}, not {x.shape[0]}x{self._out} float32")
        self._write(out, x, _Into.WIDE)
        return out

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        if residual.shape != (x.shape[0], self._out) or not residual.is_contiguous() or residual.dtype is not x.dtype:
            raise ValueError(f"the residual is {tuple(residual.shape)} {residual.dtype}, not {x.shape[0]}x{self._out}")
        self._write(residual, x, _Into.ADDED)

    def _write(self, out: torch.Tensor, x: torch.Tensor, into: _Into) -> None:
        rows, inputs = x.shape
        if inputs != self._inputs or x.dtype is not self._dtype:
            raise ValueError(f"rows of {inputs} {x.dtype} do not fit a layer of {self._inputs} {self._dtype}")
        between, within = x.stride()
        if within != 1:
            x = x.contiguous()
            between = inputs
        self._linear(self._at, x.data_ptr(), between, out.data_ptr(), rows, into)
