"""Makes a model's layers from a folder: what is fused is read part by part into its place, never copied together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from alignedserve.engine.large_pages import Slabs
from alignedserve.engine.models.model import MakeLinear
from alignedserve.engine.tensors import Tensors
from alignedserve.kernels.decoder import Norm
from alignedserve.kernels.dispatch import Kernels
from alignedserve.kernels.linear import Linear


@dataclass(frozen=True)
class Fused:
    """A layer's query, key and value in one: the rows of all queries, then those of K and of V."""

    linear: Linear
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Loader:
    tensors: Tensors
    dtype: torch.dtype
    kernels: Kernels
    make_linear: MakeLinear
    _made: list[int] = field(default_factory=list)  # bytes of each tensor
    _slabs: Slabs = field(default_factory=Slabs)

    @property
    def num_bytes(self) -> int:
        """Of all that was made so far."""
        return sum(self._made)

    def count(self, num_bytes: int) -> None:
        """Of weights that were not made here."""
        self._made.append(num_bytes)

    def _empty(self, *shape: int) -> torch.Tensor:
        out = self._slabs.empty(shape, self.dtype)
        self._made.append(out.nbytes)
        return out

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor as it is."""
        out = self._empty(*shape)
        self.tensors.read_into(out, name)
        return out

    def layer_norm(self, name: str, size: int, eps: float, affine: bool = True) -> Norm:
        weight, bias = (self.vector(f"{name}.{part}", size) if affine else None for part in ("weight", "bias"))
        return Norm(weight, bias, eps, centred=True)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool) -> Linear:
        """Layers of so many outputs each, one above the other."""
        return self.make_linear(*self.stacked(names, outputs, inputs, bias))

    def fused(self, names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool) -> Fused:
        weight, biases = self.stacked(names, outputs, inputs, bias)
        return Fused(self.make_linear(weight, biases), weight, biases)

    def stacked(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self._empty(sum(outputs), inputs)
        biases = self._empty(sum(outputs)) if bias else None
        for name, part in zip(names, weight.split(list(outputs)), strict=True):
            self.tensors.read_into(part, f"{name}.weight")
        if biases is not None:
            for name, part in zip(names, biases.split(list(outputs)), strict=True):
                self.tensors.read_into(part, f"{name}.bias")
        return weight, biases

    def interleaved(self, name: str, heads: int, head_dim: int, inputs: int, bias: bool) -> Fused:
        """Query, key and value as GPT-NeoX stores them, head by head: brought into the order of `Fused`."""
        outputs = 3 * heads * head_dim
        weight = self._empty(outputs, inputs)
        by_head = weight.view(3, heads, head_dim, inputs).transpose(0, 1)
        self.tensors.read_into(by_head, f"{name}.weight", (outputs, inputs))
        biases = self._empty(outputs) if bias else None
        if biases is not None:
            self.tensors.read_into(biases.view(3, heads, head_dim).transpose(0, 1), f"{name}.bias", (outputs,))
        return Fused(self.make_linear(weight, biases), weight, biases)

    def head(self, name: str, embedding: torch.Tensor, tied: bool) -> Linear:
        """From the last layer to logits."""
        return self.make_linear(embedding if tied else self.vector(name, *embedding.shape), None)


class KVProjections:
    """The part of each layer's fused query, key and value that makes K and V. Made when first asked for: only requests
    that keep hidden vectors need them."""

    def __init__(self, fused: Sequence[Fused], query_dim: int, kv_dim: int, make_linear: MakeLinear) -> None:
        self._fused, self._query_dim, self._kv_dim, self._make_linear = fused, query_dim, kv_dim, make_linear
        self._made: dict[int, Linear] = {}

    def __call__(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._made:
            fused, first = self._fused[layer], self._query_dim
            self._made[layer] = self._make_linear(
                fused.weight[first:], None if fused.bias is None else fused.bias[first:]
            )
        k, v = self._made[layer](hidden).split(self._kv_dim, dim=1)
        return k, v
