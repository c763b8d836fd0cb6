"""Linear layers: for each shape and number of rows, the faster of our kernel and torch.

Both read the same weight, row-major as the model has it, so that one copy serves any number of rows. Or the weight is
packed in its place, and then one kernel of ours serves any number of rows alone. tuning.py measures at load which way
is fastest. The ways round differently: in bf16 the last place of a row may differ in a step with more rows, as it may
with torch alone.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.kernels.library import DTYPES, Library

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # each for up to this number of rows, the last for any more
_MOST_BITS = 64  # that a number of rows has
_PANEL = 64  # outputs of a packed panel


class Way(Enum):
    NATIVE = "native"
    TORCH = "torch"
    PACKED = "packed"  # for all numbers of rows or none: the other ways cannot read a packed weight


class _Into(IntEnum):
    """Say where the products go; csrc/kernels.h has the same numbers."""

    ROUNDED = 0
    ADDED = 1
    WIDE = 2


@dataclass(frozen=True)
class LayerShape:
    out: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def from_weight(cls, weight: Tensor) -> LayerShape:
        out, inputs = weight.shape
        return cls(out, inputs, weight.dtype)

    def __str__(self) -> str:
        return f"{self.out}x{self.inputs} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Tuning:
    """The way that is used for each shape and bucket of rows."""

    ways: Mapping[LayerShape, tuple[Way, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{shape}: {', '.join(_ranges(ways))}" for shape, ways in self.ways.items())


def _ranges(ways: tuple[Way, ...]) -> Iterator[str]:
    """Yield the ways as a log line has them: native to 64 rows, torch above."""
    for way, same in groupby(zip(ways, BUCKETS, strict=True), key=lambda pair: pair[0]):
        last = list(same)[-1][1]
        if last == BUCKETS[-1]:
            yield way.value if len(set(ways)) == 1 else f"{way.value} above"
        else:
            yield f"{way.value} to {last} rows"


class LinearPath(ABC):
    """A linear layer that is computed in one of the ways."""

    adds_at_once = False  # whether `add_to` takes no more launches than the output alone

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        residual.add_(self(x))

    def wide(self, x: Tensor, out: Tensor | None) -> Tensor:
        return self(x).float() if out is None else out.copy_(self(x))


Total = Callable[[Tensor], None]  # sums a tensor in place over all ranks that have a share of it
Adapt = Callable[[Tensor, Tensor], None]  # adds to a layer's output, from its input, what the step's adapters add


class Linear:
    """Compute x W^T + b for rows x [rows, inputs], the weight [out, inputs] and, where there is one, the bias [out].

    A `shared` weight is also read without this layer, so it is never packed.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, library: Library | None = None, shared: bool = False
    ) -> None:
        self.memory = weight.detach().contiguous()  # the weight as it lies in memory: row-major or packed
        self.bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        self.shape = LayerShape.from_weight(weight)
        self.library = library if weight.device.type == "cpu" and weight.dtype in DTYPES else None
        self.in_c = CLayer.from_tensors(self.memory, self.bias) if self.library else None
        self.shared = shared
        self._total: Total | None = None
        self._adapt: Adapt | None = None
        self.use(Tuning())

    def __call__(self, x: Tensor) -> Tensor:
        return self._paths[(x.shape[0] - 1).bit_length()](x)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's share of the output, before the sum over ranks."""
        return self._shares[(x.shape[0] - 1).bit_length()](x)

    def adds_at_once(self, rows: int) -> bool:
        """Return whether `add_to` takes no more launches than the output alone."""
        return self._paths[(rows - 1).bit_length()].adds_at_once

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """Add the output to the residual, in place. The sum is rounded once, except by torch with a bias."""
        self._paths[(x.shape[0] - 1).bit_length()].add_to(x, residual)

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the output in fp32, in `out` where that is given; our kernels do not round it before."""
        return self._paths[(x.shape[0] - 1).bit_length()].wide(x, out)

    @property
    def packed(self) -> bool:
        return self.in_c is not None and bool(self.in_c.packed)

    @property
    def weight(self) -> Tensor:
        """Return the weight row-major: a copy where it is packed."""
        if not self.packed:
            return self.memory
        copy = Linear(self.memory.clone(), None, self.library)
        copy.in_c.packed = 1  # pyrefly: ignore[missing-attribute]  # this layer is packed, so both layers have one
        copy.pack(back=True)
        return copy.memory

    def rows(self, tokens: Tensor) -> Tensor:
        """Return rows of the weight, for an embedding that is the output head too."""
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
        """Return the layer of the outputs from `first` on, in the same memory where that is possible."""
        bias = None if self.bias is None else self.bias[first:]
        if not self.packed:
            return Linear(self.memory[first:], bias, self.library, shared=True)
        if first % _PANEL:
            return Linear(self.weight[first:].clone(), bias, self.library)
        part = Linear(self.memory[first:], bias, self.library, shared=True)
        part.in_c.packed = 1  # pyrefly: ignore[missing-attribute]  # its panels are packed
        part.use(Tuning({part.shape: (Way.PACKED,) * len(BUCKETS)}))
        return part

    def pack(self, back: bool = False) -> bool:
        """Bring the weight into our kernel's order, or back, in place; return whether there is a kernel for that."""
        if self.in_c is None or self.library is None:
            return False
        if self.packed == (not back):
            return True
        if not self.library.kernel("pack", c_void_p, c_int)(addressof(self.in_c), int(back)):
            return False
        self.in_c.packed = int(not back)
        return True

    def use(self, tuning: Tuning) -> None:
        """Use the tuning's ways for this shape; where it has none, use our kernel for few rows and torch for many."""
        few = Way.NATIVE if self.library and self.library.isa != "generic" else Way.TORCH
        default = tuple(few if bucket <= 64 else Way.TORCH for bucket in BUCKETS)
        chosen = tuning.ways.get(self.shape, default)
        if chosen[0] is Way.PACKED and not (self.packed or (not self.shared and self.pack())):
            chosen = default
        elif chosen[0] is not Way.PACKED and self.packed:
            self.pack(back=True)
        self._bare = [self.by(way) for way in chosen]
        self._complete()
        ours = (Way.NATIVE, Way.PACKED)
        torch_buckets = [bucket for bucket, way in zip(BUCKETS, chosen, strict=True) if way not in ours]
        # More rows than the last bucket has go the way of the last bucket.
        self.native_to = (
            (BUCKETS[BUCKETS.index(torch_buckets[0]) - 1] if torch_buckets[0] > 1 else 0)
            if torch_buckets
            else sys.maxsize
        )

    def sum_with(self, total: Total) -> None:
        """Make this layer one share of a larger one, with some of its inputs: the outputs of all shares are summed."""
        self._total = total
        self._complete()

    def adapt_with(self, adapt: Adapt, number: int) -> None:
        """Let adapters change the output; `number` is this layer's among those that adapters may change."""
        self._adapt = adapt
        if self.in_c is not None:
            self.in_c.number = number
        self._complete()

    def _complete(self) -> None:
        adapt, total = self._adapt, self._total
        shares = self._bare if adapt is None else [_AdaptedPath(path, adapt) for path in self._bare]
        self._shares = shares + shares[-1:] * (_MOST_BITS - len(shares))
        self._paths = self._shares if total is None else [_SummedPath(share, total) for share in self._shares]

    @property
    def ways(self) -> list[Way]:
        """Return the ways to choose from while the weight is row-major."""
        return [Way.NATIVE, Way.TORCH] if self.library else [Way.TORCH]

    def by(self, way: Way) -> LinearPath:
        """Return the path of one way, or torch's where this layer lacks that way."""
        if way in (Way.NATIVE, Way.PACKED) and self.library and self.in_c:
            return NativePath(self.library, self.in_c, self.shape, (self.memory, self.bias))
        return _TorchPath(self.memory, self.bias)


class _AdaptedPath(LinearPath):
    def __init__(self, path: LinearPath, adapt: Adapt) -> None:
        self._path, self._adapt = path, adapt
        self.adds_at_once = path.adds_at_once

    def __call__(self, x: Tensor) -> Tensor:
        out = self._path(x)
        self._adapt(x, out)
        return out

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        self._path.add_to(x, residual)
        self._adapt(x, residual)


class _SummedPath(LinearPath):
    def __init__(self, share: LinearPath, total: Total) -> None:
        self._share, self._total = share, total

    def __call__(self, x: Tensor) -> Tensor:
        out = self._share(x)
        self._total(out)
        return out


class _TorchPath(LinearPath):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()
        self.adds_at_once = bias is None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if self._bias is None:
            residual.addmm_(x, self._transposed)
        else:
            super().add_to(x, residual)

    def wide(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the output in fp32: on GPUs of 16 bits by one product, whose sums nothing rounds before."""
        if self._bias is not None or not x.is_cuda or x.dtype is torch.float32:
            return super().wide(x, out)
        return torch.mm(x, self._transposed, out_dtype=torch.float32, out=out)


class CLayer(Structure):
    """A layer as csrc/kernels.h has it. It holds addresses, so its tensors must live as long as it does."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("out", c_int64),
        ("dtype", c_int32),
        ("packed", c_int32),
        ("quantised", c_void_p),  # a CQuantised of quantised.py, or null
        ("number", c_int64),
    )

    @classmethod
    def from_tensors(cls, weight: Tensor, bias: Tensor | None) -> CLayer:
        out, inputs = weight.shape
        of_bias = None if bias is None else bias.data_ptr()
        return cls(weight.data_ptr(), of_bias, inputs, out, DTYPES[weight.dtype], 0, None)


class NativePath(LinearPath):
    adds_at_once = True

    def __init__(self, library: Library, layer: CLayer, shape: LayerShape, alive: object) -> None:
        self._alive = layer, alive  # C++ has only addresses of them
        self._out, self._inputs, self._dtype = shape.out, shape.inputs, shape.dtype
        self._at = addressof(layer)
        self._linear = library.kernel("linear", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self._out))
        self._write(out, x, _Into.ROUNDED)
        return out

    def wide(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty((x.shape[0], self._out), dtype=torch.float32)
        elif out.shape != (x.shape[0], self._out) or not out.is_contiguous() or out.dtype is not torch.float32:
            raise ValueError(f"the output is {tuple(out.shape)} {out.dtype}, not {x.shape[0]}x{self._out} float32")
        self._write(out, x, _Into.WIDE)
        return out

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if residual.shape != (x.shape[0], self._out) or not residual.is_contiguous() or residual.dtype is not x.dtype:
            raise ValueError(f"the residual is {tuple(residual.shape)} {residual.dtype}, not {x.shape[0]}x{self._out}")
        self._write(residual, x, _Into.ADDED)

    def _write(self, out: Tensor, x: Tensor, into: _Into) -> None:
        rows, inputs = x.shape
        if inputs != self._inputs or x.dtype is not self._dtype:
            raise ValueError(f"rows of {inputs} {x.dtype} do not fit a layer of {self._inputs} {self._dtype}")
        between, within = x.stride()
        if within != 1:
            x = x.contiguous()
            between = inputs
        self._linear(self._at, x.data_ptr(), between, out.data_ptr(), rows, into)
