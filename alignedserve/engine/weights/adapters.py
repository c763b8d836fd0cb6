"""The linear layers of a model that adapters may change, and the adapters of the running step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignedserve.architectures.config import ModelConfig
from alignedserve.architectures.families.lora import LoraFiles, read_lora
from alignedserve.core import Adapter
from alignedserve.engine.weights.tensors import Cut
from alignedserve.errors import AdapterError
from alignedserve.kernels.common.adapters import AdapterPart, AdapterWeights, LayerAdapter, StepAdapters
from alignedserve.kernels.common.linear import Linear

Adapting = Callable[[StepAdapters, int, Tensor, Tensor], None]  # Reference.adapt, or a faster kernel
# Returns A [rank, inputs] and B [outputs, rank] of a layer by its name; None where an adapter does not change it.
FactorsOf = Callable[[str], tuple[Tensor, Tensor] | None]


RowOrder = Callable[[Tensor], Tensor]  # returns rows of a layer's outputs in the order that they have here


def in_halves(rows: Tensor, head_dim: int, turned: int) -> Tensor:
    """Return rows of heads in another order: in the files two neighbours turn together, here they lie half of all that
    turns apart. Query and K are compared number by number, so both may have any order, if it is the same."""
    heads = rows.unflatten(0, (-1, head_dim))
    turning = heads[:, :turned].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turning, heads[:, turned:]), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class LayerPart:
    """A layer of the files that is a part of a linear layer here, or all of it."""

    name: str
    outputs: int  # of this rank
    cut: Cut | None = None  # this rank's outputs
    order: RowOrder | None = None  # of this rank's outputs, where the files have another

    def own(self, b: Tensor) -> Tensor:
        """Return this rank's rows of a whole B, in the order of our outputs."""
        if self.cut is not None:
            b = b.narrow(0, self.cut.start, self.outputs)
        return b if self.order is None else self.order(b)


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer that adapters may change."""

    parts: tuple[LayerPart, ...]
    inputs: int  # of this rank
    cut: Cut | None  # this rank's inputs
    dtype: torch.dtype
    device: torch.device

    def read(self, factors_of: FactorsOf) -> LayerAdapter | None:
        """Return what an adapter adds to this layer, or None where it adds nothing."""
        first_out, first_rank, rows, parts = 0, 0, [], []
        for part in self.parts:
            factors = factors_of(part.name)
            if factors is not None:
                a, b = factors
                own = self._placed(part.own(b))
                rows.append(a if self.cut is None else a.narrow(1, self.cut.start, self.inputs))
                parts.append(AdapterPart.from_matrix(own, first_rank, first_out))
                first_rank += len(a)
            first_out += part.outputs
        return LayerAdapter(self._placed(torch.cat(rows)).contiguous(), tuple(parts)) if parts else None

    def not_numbers(self) -> LayerAdapter:
        """Return what makes the output not a number, for an adapter that cannot be read."""
        outputs = sum(part.outputs for part in self.parts)
        a = torch.zeros(1, self.inputs, dtype=self.dtype, device=self.device)
        b = torch.full((outputs, 1), torch.nan, dtype=self.dtype, device=self.device)
        return LayerAdapter(a, (AdapterPart.from_matrix(b, 0, 0),))

    def _placed(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, self.dtype)


class AdaptedLayers:
    """All layers that adapters may change, in the order in which they were loaded."""

    def __init__(self, adapt: Adapting | None = None) -> None:
        self._adapt = adapt
        self.layers: list[AdaptedLayer] = []
        self.step: StepAdapters | None = None  # of the step that runs, where any of its rows has an adapter

    def add(self, linear: Linear, parts: Sequence[LayerPart], cut: Cut | None = None) -> Linear:
        """Let adapters change a layer; `cut` are this rank's inputs."""
        shape = linear.shape
        linear.adapt_with(partial(self.add_to, len(self.layers)), len(self.layers))
        self.layers.append(AdaptedLayer(tuple(parts), shape.inputs, cut, shape.dtype, linear.memory.device))
        return linear

    def add_to(self, layer: int, x: Tensor, out: Tensor) -> None:
        """Add to the outputs of x what the step's adapters add to this layer."""
        if self.step is not None:
            assert self._adapt is not None, "a step has adapters where there is a kernel for them"
            self._adapt(self.step, layer, x, out)


log = logging.getLogger("alignedserve.engine")


class KeptAdapters:
    """The adapters whose numbers an engine keeps: read when a step first needs them, forgotten when memory is short.

    An adapter that cannot be read any more, or with files changed since it was named, makes the outputs of its own
    requests not numbers: these end with an error, as for any such row, and no other request notices. Each step tries
    to read it again.
    """

    def __init__(self, layers: Sequence[AdaptedLayer], model: ModelConfig, most_bytes: int | None = None) -> None:
        """`model` is the whole model, not a rank's share; the adapters of a step stay even above `most_bytes`."""
        self._layers, self._model, self.most_bytes = layers, model, most_bytes
        self._kept: dict[str, AdapterWeights] = {}  # by id, the least recently used first

    @property
    def num_bytes(self) -> int:
        return sum(weights.num_bytes for weights in self._kept.values())

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter.id in self._kept

    def step(self, rows: Mapping[Adapter, Sequence[int]]) -> StepAdapters | None:
        """Return the adapters of a step with these rows; None where it has none."""
        if not rows:
            return None
        weights: dict[AdapterWeights, list[int]] = {}
        for adapter, own in rows.items():  # two names may stand for one content
            weights.setdefault(self._weights(adapter), []).extend(own)
        self._forget({adapter.id for adapter in rows})
        return StepAdapters.from_rows(weights)

    def load(self, adapters: Sequence[Adapter], advance: Callable[[], object] = lambda: None) -> None:
        """Read adapters before a step needs them; `advance` is called after each."""
        for adapter in adapters:
            self._weights(adapter)
            advance()

    def _weights(self, adapter: Adapter) -> AdapterWeights:
        weights = self._kept.pop(adapter.id, None)
        if weights is None:
            try:
                weights = self._read(adapter)
            except AdapterError as error:
                log.warning("adapter %s cannot be read, its requests end with an error: %s", adapter.name, error)
                return AdapterWeights([layer.not_numbers() for layer in self._layers])
        self._kept[adapter.id] = weights
        return weights

    def _read(self, adapter: Adapter) -> AdapterWeights:
        began, files = time.perf_counter(), read_lora(Path(adapter.folder), self._model)
        if files.id != adapter.id:
            raise AdapterError(f"{adapter.folder} has other content than when it was loaded: load it again")
        weights = read_weights(files, self._layers)
        seconds, megabytes = time.perf_counter() - began, weights.num_bytes / (1 << 20)
        log.info("loaded adapter %s in %.2f s, %.1f MB", adapter.name, seconds, megabytes)
        return weights

    def _forget(self, needed: set[str]) -> None:
        for id in [id for id in self._kept if id not in needed]:
            if self.most_bytes is None or self.num_bytes <= self.most_bytes:
                return
            del self._kept[id]


def read_weights(files: LoraFiles, layers: Sequence[AdaptedLayer]) -> AdapterWeights:
    """Return an adapter's numbers for these layers; its scale is in B."""
    try:
        with safe_open(files.weights, "pt") as tensors:

            def factors_of(layer: str) -> tuple[Tensor, Tensor] | None:
                if layer not in files.ranks:
                    return None
                a, b = map(tensors.get_tensor, LoraFiles.tensor_names(layer))
                return a, b.float() * files.scales[layer]

            return AdapterWeights([layer.read(factors_of) for layer in layers])
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{files.weights} cannot be read: {error}") from error
