"""Adapters (LoRA) as kernels read them: what each adds to linear layers, y += B (A x), for its own rows of a step.

A linear layer may be several layers of a model stacked, such as query, key and value. Each of them is a part with an A
and a B of its own: the A lie below each other, and each B adds to the outputs of its part. B lies in panels of 64
outputs, the last filled up with zeros; in bf16, whose products CPUs add in pairs, two ranks of an output lie side by
side, and an odd rank is filled up too.

    a    [ranks, inputs]    A of q          b of q   [panels, ranks of q, 64]  ─▶ outputs of q
                            A of k          b of k                             ─▶ outputs of k
                            A of v          b of v                             ─▶ outputs of v
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.kernels.common.spans import Refilled

PANEL = 64  # outputs
MOST_PARTS = 3  # csrc/kernels.h has the same number


@dataclass(frozen=True)
class AdapterPart:
    """An adapter's B for one part of a layer."""

    first_rank: int  # its first row of A
    ranks: int
    first_out: int
    outs: int
    b: Tensor  # [panels, ranks, 64, 1]; in bf16 [panels, ranks / 2, 64, 2]

    @classmethod
    def from_matrix(cls, b: Tensor, first_rank: int, first_out: int) -> AdapterPart:
        """Return the part of a B [outputs, ranks], which is copied into panels."""
        outs, ranks = b.shape
        together = 2 if b.dtype is torch.bfloat16 else 1
        filled = F.pad(b, (0, -ranks % together, 0, -outs % PANEL)).unflatten(0, (-1, PANEL))
        panels = filled.unflatten(2, (-1, together)).transpose(1, 2).contiguous()
        return cls(first_rank, ranks, first_out, outs, panels)

    @property
    def matrix(self) -> Tensor:
        """Return B [outputs, ranks]."""
        return self.b.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outs, : self.ranks]


@dataclass(frozen=True)
class LayerAdapter:
    """Holds the two matrices by which an adapter changes one linear layer."""

    a: Tensor  # [ranks of all parts, inputs]
    parts: tuple[AdapterPart, ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)

    def added(self, x: Tensor) -> list[tuple[AdapterPart, Tensor]]:
        """Return what is added to the outputs of each part, for rows of x."""
        sums = x @ self.a.t()
        return [
            (part, sums[:, part.first_rank : part.first_rank + part.ranks] @ part.matrix.t()) for part in self.parts
        ]


class CPart(Structure):
    """The struct of csrc/kernels.h, like the structs below. They hold addresses, so their tensors must outlive them."""

    _fields_ = (("first_rank", c_int64), ("ranks", c_int64), ("first_out", c_int64), ("outs", c_int64), ("b", c_void_p))


class CLayerAdapter(Structure):
    _fields_ = (("a", c_void_p), ("ranks", c_int64), ("num_parts", c_int64), ("parts", CPart * MOST_PARTS))

    @classmethod
    def from_layer(cls, layer: LayerAdapter | None) -> CLayerAdapter:
        if layer is None:
            return cls()
        parts = (CPart(p.first_rank, p.ranks, p.first_out, p.outs, p.b.data_ptr()) for p in layer.parts)
        return cls(layer.a.data_ptr(), len(layer.a), len(layer.parts), (CPart * MOST_PARTS)(*parts))


class CGroup(Structure):
    _fields_ = (("layers", c_void_p), ("rows", c_void_p), ("count", c_int64))


class CAdapters(Structure):
    _fields_ = (("groups", c_void_p), ("count", c_int64))


class AdapterWeights:
    """An adapter's numbers on a device."""

    def __init__(self, layers: Sequence[LayerAdapter | None]) -> None:
        """`layers` has an entry for each layer that adapters may change, None where this adapter changes nothing."""
        self.layers = tuple(layers)
        self.table: Tensor | None = None  # of addresses, on a GPU whose kernels need one
        changed = [layer for layer in layers if layer is not None]
        self.num_bytes = sum(layer.num_bytes for layer in changed)
        self.device, self.dtype = changed[0].a.device, changed[0].a.dtype

    @cached_property
    def in_c(self) -> Array[CLayerAdapter]:
        """Return an array with a CLayerAdapter for each layer."""
        return (CLayerAdapter * len(self.layers))(*map(CLayerAdapter.from_layer, self.layers))


@dataclass(frozen=True)
class AdapterGroup:
    """The rows of a step that belong to one adapter."""

    weights: AdapterWeights
    rows: Tensor  # in order; int32, on the CPU


class StepAdapters:
    """The adapters of a step; rows without an adapter are in no group."""

    def __init__(self, groups: Sequence[AdapterGroup]) -> None:
        self.groups = tuple(groups)
        self.tables: object = None  # what GPU kernels make of the groups, once for all layers

    @classmethod
    def from_rows(cls, rows: Mapping[AdapterWeights, Sequence[int]]) -> StepAdapters:
        return cls(
            [AdapterGroup(weights, torch.tensor(sorted(own), dtype=torch.int32)) for weights, own in rows.items()]
        )

    def check(self, x: Tensor) -> None:
        """Raise for rows x that the adapters cannot change, which C++ would not notice."""
        for group in self.groups:
            if group.weights.dtype is not x.dtype:
                raise TypeError(f"rows are {x.dtype}, an adapter {group.weights.dtype}: they must be the same")
        if self.last >= len(x):
            raise ValueError(f"row {self.last} has an adapter, and the step has {len(x)} rows")

    @cached_property
    def last(self) -> int:
        """Return the last row that has an adapter."""
        return max((group.rows.tolist()[-1] for group in self.groups), default=-1)

    @cached_property
    def indices(self) -> list[Tensor]:
        """Return the rows of each group as indices, on the device of the adapters."""
        return [group.rows.long().to(group.weights.device) for group in self.groups]

    @cached_property
    def in_c(self) -> CAdapters:
        return CAdapters(addressof(self._groups_in_c), len(self.groups))

    @cached_property
    def _groups_in_c(self) -> Array[CGroup]:  # kept, since C++ has only its address
        made = (CGroup(addressof(own.weights.in_c), own.rows.data_ptr(), len(own.rows)) for own in self.groups)
        return (CGroup * len(self.groups))(*made)


class StaticAdapters(StepAdapters):
    """The adapters of steps that are captured once and replayed: `place` puts those of another step there.

    Kernels that are captured read `tables`, in memory that stays, with room for steps of up to `rows` tokens.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(())
        self.rows = rows

    def place(self, step: StepAdapters) -> None:
        for name in ("last", "indices", "in_c", "_groups_in_c"):
            self.__dict__.pop(name, None)  # of the step before
        self.groups = step.groups
        if isinstance(self.tables, Refilled):
            self.tables.refill()
