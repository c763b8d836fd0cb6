"""Builds a model's layers from a folder: a fused layer is read part by part into its place, with no further copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.quantization import Quantization, group_of
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.device.large_pages import KeptMemory, Slabs
from alignedserve.engine.device.ranks import ALONE, RankLinks
from alignedserve.engine.device.shared_sums import SharedSums
from alignedserve.engine.models.model import MakeLinear
from alignedserve.engine.weights.adapters import AdaptedLayers, LayerPart, RowOrder
from alignedserve.engine.weights.packed import inputs_of
from alignedserve.engine.weights.tensors import Cut, Weights, expand_into
from alignedserve.kernels.common import fp8
from alignedserve.kernels.common.decoder import Decoder, Layer, Norm
from alignedserve.kernels.common.experts import ExpertLinear, ExpertPacking, ExpertWeights
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import (
    AnyQuantised,
    Fp8Weight,
    QuantisedLinear,
    QuantisedWeight,
    joined,
    quantised,
    rows_at_once,
    stacked,
)
from alignedserve.kernels.common.summing import SumThenNorm
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.signs import NO_SIGNS, Signs

_HEAD_BITS = 8  # of the output head, where weights are quantised while they are loaded


class Embedding:
    """The vectors of tokens. If the head is tied to this table, the head's layer holds the table, and may pack it."""

    def __init__(self, memory: Tensor | Linear | AnyQuantised, words: int, size: int, dtype: torch.dtype) -> None:
        self._memory, self._dtype = memory, dtype
        self.shape = words, size

    @property
    def head(self) -> Linear | None:
        """Return the layer of the head that holds the table, if it is there already."""
        return self._memory if isinstance(self._memory, Linear) else None

    def outputs(self, first: int, count: int) -> Tensor | AnyQuantised:
        """Return the weight of some of the head's outputs."""
        if isinstance(self._memory, QuantisedLinear):
            part = self._memory.outputs(first, count)
            assert isinstance(part, AnyQuantised)
            return part
        table = self._memory.weight if isinstance(self._memory, Linear) else self._memory
        assert isinstance(table, Tensor), "a head is tied to a layer, or to plain numbers"
        return table[first : first + count]

    def give_to(self, head: Linear) -> None:
        """Leave the table to the head."""
        self._memory = head

    def __call__(self, tokens: Tensor) -> Tensor:
        memory = self._memory
        if isinstance(memory, AnyQuantised):
            return memory.rows(tokens.flatten()).expanded().to(self._dtype).view(*tokens.shape, -1)
        return F.embedding(tokens, memory) if isinstance(memory, Tensor) else memory.rows(tokens)


@dataclass(frozen=True)
class Loader:
    """Reads a model's weights into layers.

    If several ranks share the model, it reads this rank's part, and all sizes are those of this part.
    """

    tensors: Weights
    dtype: torch.dtype
    kernels: Kernels
    make_linear: MakeLinear
    ranks: RankLinks = ALONE
    device: torch.device = CPU
    quantization: Quantization = Quantization.NONE
    squares: Mapping[str, Tensor] = field(default_factory=dict)  # of layers' inputs, by which they are quantised
    adapted: AdaptedLayers = field(default_factory=AdaptedLayers)  # the layers that adapters may change
    mixtures: list[ExpertWeights] = field(default_factory=list)  # of each layer whose experts run at once
    at_once: bool = False  # whether the layers read are of experts that a kernel may run at once
    in_turn: list[str] = field(default_factory=list)  # why experts run one after another here, though kernels could
    decoders: list[Decoder] = field(default_factory=list)  # that run all layers in one call: one at most
    sums: list[SharedSums] = field(default_factory=list)  # of such a decoder, where several ranks share it
    signs: Signs = NO_SIGNS  # of how many bytes are read
    _made: list[int] = field(default_factory=list)  # bytes of each tensor made
    _slabs: Slabs = field(default_factory=Slabs)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights made so far."""
        return sum(self._made)

    def count(self, num_bytes: int) -> None:
        """Count weights that were not made here."""
        self._made.append(num_bytes)
        self.signs.advance(num_bytes)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self.device.type == "cpu":
            out = self._slabs.empty(shape, dtype)
        else:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        self.count(out.nbytes)
        return out

    def _linear(self, weight: Tensor | AnyQuantised, bias: Tensor | None) -> Linear:
        packing = ExpertPacking.from_weight(weight) if self.at_once and not isinstance(weight, Tensor) else None
        made = self.make_linear(weight, bias) if packing is None else ExpertLinear(packing, bias, self.dtype)
        if isinstance(made, QuantisedLinear):
            self.count(made.num_bytes)
        elif not isinstance(weight, Tensor):
            self.count(made.memory.nbytes)
        return made

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a whole tensor, of any shape, in the dtype that the model computes in, or in another."""
        out = self._empty(*shape, dtype=dtype)
        self.tensors.read_into(out, name)
        return out

    def share(self, name: str, size: int) -> Tensor:
        """Return this rank's part of a vector; the part has `size` numbers."""
        out = self._empty(size)
        self.tensors.read_into(out, name, cut=self._cut(0, size))
        return out

    def expanded(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Return this rank's rows of a layer's weight as plain numbers, whatever form the files have them in."""
        out, cut = self._empty(outputs, inputs), self._cut(0, outputs)
        found = self.tensors.quantised(name, (outputs, inputs), cut)
        if found is None:
            self.tensors.read_into(out, f"{name}.weight", cut=cut)
        else:
            expand_into(out, found)
        return out

    def embedding(self, name: str, words: int, size: int, tied: bool) -> Embedding:
        """Return the vectors of tokens. A table that the head is not `tied` to is quantised if the files have it so."""
        layer = name.removesuffix(".weight")
        table: Tensor | Linear | AnyQuantised
        if tied:
            read = self._weight([layer], [words], size, [None], self._head_bits)
            table = read if isinstance(read, Tensor) else self._linear(read, None)
        elif (found := self.tensors.quantised(layer, (words, size))) is not None:
            table = found.on(self.device)
            self.count(table.num_bytes)
        else:
            table = self.vector(name, words, size)
        return Embedding(table, words, size, self.dtype)

    @property
    def _head_bits(self) -> int | None:
        return self.quantization.bits and _HEAD_BITS

    def layer_norm(self, name: str, size: int, eps: float, affine: bool = True, bias: bool = True) -> Norm:
        weight = self.vector(f"{name}.weight", size) if affine else None
        return Norm(weight, self.vector(f"{name}.bias", size) if affine and bias else None, eps, centred=True)

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = False, is_head: bool = False) -> Linear:
        """Return a layer that every rank holds whole."""
        weight = self._weight([name], [outputs], inputs, [None], self._head_bits if is_head else None)
        return self._linear(weight, self.vector(f"{name}.bias", outputs) if bias else None)

    def by_rows(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool,
        copies: Sequence[int] | None = None,
        orders: Sequence[RowOrder | None] | None = None,
    ) -> Linear:
        """Return layers with these numbers of outputs, stacked into one; this rank holds its rows of each.

        `copies` ranks in a row hold the same rows of a layer; without it every rank holds other ones. `orders` are
        those of the rows of each layer, where the files have other ones."""
        copies = copies or [1] * len(outputs)
        cuts = [self._cut(0, share, same) for share, same in zip(outputs, copies, strict=True)]
        return self._stack(names, outputs, inputs, bias, cuts, orders)

    def fused(
        self, name: str, outputs: Sequence[int], inputs: int, bias: bool, copies: Sequence[int] | None = None
    ) -> Linear:
        """Return layers with these numbers of outputs, which the files have stacked into one; this rank holds its rows
        of each. `copies`: as of `by_rows`."""
        rank, copies = self.ranks.rank, copies or [1] * len(outputs)
        wholes = [share * self.ranks.size // same for share, same in zip(outputs, copies, strict=True)]
        cuts = [
            Cut(0, end - whole + rank // same * share, sum(wholes))
            for end, whole, share, same in zip(accumulate(wholes), wholes, outputs, copies, strict=True)
        ]
        return self._stack([name] * len(outputs), outputs, inputs, bias, cuts)

    def _stack(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool,
        cuts: Sequence[Cut | None],
        orders: Sequence[RowOrder | None] | None = None,
    ) -> Linear:
        """Return parts of layers of the files as one layer."""
        orders = orders or [None] * len(outputs)
        parts = [LayerPart(*part) for part in zip(names, outputs, cuts, orders, strict=True)]
        biases = self._empty(sum(outputs)) if bias else None
        weight = self._weight(names, outputs, inputs, cuts)
        if biases is not None:
            for name, part, cut in zip(names, biases.split(list(outputs)), cuts, strict=True):
                self.tensors.read_into(part, f"{name}.bias", cut=cut)
        if any(orders):
            rows = _rows_of(parts).to(self.device)
            weight = weight.copy_(weight[rows]) if isinstance(weight, Tensor) else weight.rows(rows)
            biases = None if biases is None else biases.copy_(biases[rows])
        return self.adapted.add(self._linear(weight, biases), parts)

    def transposed(self, name: str, outputs: int, inputs: int) -> Linear:
        """Return a layer with a bias whose weight, where it is not quantised, the files have as [inputs, outputs]."""
        found, bits = self._stacked([self.tensors.quantised(name, (outputs, inputs))]), self.quantization.bits
        if found is None:
            plain = torch.empty(inputs, outputs, dtype=self.dtype, device=self.device)
            self.tensors.read_into(plain, f"{name}.weight")
            found = quantised(plain.t(), bits, group_of(inputs), self.squares.get(name)) if bits else None
        weight = self._empty(outputs, inputs).copy_(plain.t()) if found is None else found.on(self.device)
        return self._linear(weight, self.vector(f"{name}.bias", outputs))

    def by_columns(self, name: str, outputs: int, inputs: int, bias: bool) -> Linear:
        """Return a layer that continues from this rank's part of a layer; its outputs are summed over the ranks."""
        cut, biases = self._cut(1, inputs), None
        weight = self._weight([name], [outputs], inputs, [cut])
        if bias and self.ranks.rank == 0:  # so that the sum contains it once
            biases = self.vector(f"{name}.bias", outputs)
        made = self.adapted.add(self._linear(weight, biases), [LayerPart(name, outputs)], cut)
        if self.ranks.size > 1:
            made.sum_with(self.ranks.total)
        return made

    def _cut(self, dim: int, share: int, copies: int = 1) -> Cut | None:
        """Return this rank's cut of a dimension: each rank has `share` of it, and `copies` ranks have the same."""
        rank, size = self.ranks.rank // copies, self.ranks.size // copies
        return Cut(dim, rank * share, size * share) if self.ranks.size > 1 else None

    def decoder(self, layers: Sequence[Layer]) -> Decoder | None:
        """Return a decoder that runs all layers in one call; None where these kernels have none for such layers."""
        sums = None
        if self.ranks.size > 1:
            sums = SharedSums(self.ranks, SumThenNorm(self.kernels, self.ranks.total), layers)
        made = self.kernels.decoder(layers, sums)
        self.sums.extend([sums] if made is not None and sums is not None else [])
        self.decoders.extend(filter(None, [made]))
        return made

    def _weight(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        cuts: Sequence[Cut | None],
        bits: int | None = None,
    ) -> Tensor | AnyQuantised:
        """Return the weights of layers stacked into one: of each layer this rank's part.

        It is quantised where it is to be, in `bits` where they are not those of most layers, or where the files have
        all of them so, and in forms that fit together.
        """
        shapes = [(share, inputs) for share in outputs]
        if bits := bits or self.quantization.bits:
            parts = (part for layer in zip(names, shapes, cuts, strict=True) for part in self._quantised(*layer, bits))
            return joined(parts, sum(outputs))
        read = [self.tensors.quantised(*layer) for layer in zip(names, shapes, cuts, strict=True)]
        whole = self._stacked(read)
        if whole is not None:
            return whole.on(self.device)
        weight = self._empty(sum(outputs), inputs)
        for name, part, cut, out in zip(names, read, cuts, weight.split(list(outputs)), strict=True):
            if part is None:
                self.tensors.read_into(out, f"{name}.weight", cut=cut)
            else:
                expand_into(out, part)
        return weight

    def _quantised(self, name: str, shape: tuple[int, int], cut: Cut | None, bits: int) -> Iterator[QuantisedWeight]:
        """Quantise a layer some rows at a time, and yield this rank's part of them.

        Rows are quantised before their inputs are cut, so weights are the same for any number of ranks.
        """
        outputs, inputs = shape
        first, whole = (cut.start, cut.whole) if cut is not None and cut.dim == 0 else (0, outputs)
        read = cut.whole if cut is not None and cut.dim == 1 else inputs
        at_once, squares = rows_at_once(read), self.squares.get(name)
        for begin in range(first, first + outputs, at_once):
            rows = torch.empty(min(at_once, first + outputs - begin), read, dtype=self.dtype, device=self.device)
            self.tensors.read_into(rows, f"{name}.weight", cut=Cut(0, begin, whole))
            made = quantised(rows, bits, group_of(read), squares)
            yield made if cut is None or cut.dim == 0 else inputs_of(made, name, cut.start, inputs)

    def _stacked(self, parts: Sequence[AnyQuantised | None]) -> AnyQuantised | None:
        """Return quantised weights as one; None where they do not fit together, or no kernel here multiplies them."""
        floats = [part for part in parts if isinstance(part, Fp8Weight)]
        if floats and len(floats) == len(parts):
            by_kernels = self.kernels.multiplies_fp8(self.device, self.dtype) and not any(of.group for of in floats)
            return fp8.stacked(floats) if by_kernels or self.at_once else None
        whole = [part for part in parts if isinstance(part, QuantisedWeight)]
        return stacked(whole) if len(whole) == len(parts) else None

    def head(self, name: str, embedding: Embedding, tied: bool) -> Callable[[Tensor], Tensor]:
        """Return the layer from the last hidden vectors to logits in fp32.

        Each rank computes the logits of its part of the vocabulary; the last rank may have fewer.
        """
        if tied and embedding.head is not None and self.ranks.size == 1:
            return Head(embedding.head)
        words, inputs = embedding.shape
        per_rank = -(-words // self.ranks.size)
        start = min(words, self.ranks.rank * per_rank)
        count, layer, cut = min(per_rank, words - start), name.removesuffix(".weight"), Cut(0, start, words)
        share: Tensor | AnyQuantised
        if tied:
            share = embedding.outputs(start, count)
        else:
            share = self._weight([layer], [count], inputs, [cut], self._head_bits)
        linear = self._linear(share, None)
        if self.ranks.size > 1:
            linear.shared = tied
            return SharedHead(linear, words, per_rank, self.ranks)
        if tied:
            embedding.give_to(linear)
        return Head(linear)


def _rows_of(parts: Sequence[LayerPart]) -> Tensor:
    """Return which rows of layers that lie one after the other, as the files have them, are those of our layer."""
    rows = torch.arange(sum(part.outputs for part in parts)).split([part.outputs for part in parts])
    return torch.cat([of if part.order is None else part.order(of) for part, of in zip(parts, rows, strict=True)])


class Head:
    """The head of a model on one rank."""

    def __init__(self, linear: Linear) -> None:
        self.linear, self._logits = linear, KeptMemory()

    def __call__(self, x: Tensor) -> Tensor:
        if self.linear.library is None:
            return self.linear.wide(x)
        return self.linear.wide(x, self._logits.empty((x.shape[0], self.linear.shape.out), torch.float32))


class SharedHead:
    """The head of a model that several ranks share: each computes the logits of `per_rank` words."""

    def __init__(self, share: Linear, words: int, per_rank: int, ranks: RankLinks) -> None:
        self._share, self._words, self._per_rank, self._ranks = share, words, per_rank, ranks

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._share(x)
        whole = self._ranks.side_by_side(F.pad(logits, (0, self._per_rank - logits.shape[1])))
        return whole[:, : self._words].float().contiguous()  # if they are fp32 already, `float` returns a view


class KVProjections:
    """The part of each layer's fused query, key and value that computes K and V.

    It is built at its first use: only requests that keep hidden vectors need it.
    """

    def __init__(self, fused: Sequence[Linear], query_dim: int, kv_dim: int) -> None:
        self._fused, self._query_dim, self._kv_dim = fused, query_dim, kv_dim
        self._made: dict[int, Linear] = {}

    def __call__(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._made:
            self._made[layer] = self._fused[layer].below(self._query_dim)
        k, v = self._made[layer](hidden).split(self._kv_dim, dim=1)
        return k, v
