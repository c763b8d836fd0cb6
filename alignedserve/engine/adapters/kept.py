"""The adapters whose numbers an engine keeps: read when a step first needs them, forgotten when memory is short.

An adapter that cannot be read any more, or with files changed since it was named, makes the outputs of its own requests
not numbers: these end with an error, as for any such row, and no other request notices. Each step tries to read it
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignedserve.architectures.adapters.lora import LoraFiles, read_lora
from alignedserve.architectures.config import ModelConfig
from alignedserve.core import Adapter
from alignedserve.engine.adapters.layers import AdaptedLayer
from alignedserve.errors import AdapterError
from alignedserve.kernels.common.adapters import AdapterWeights, StepAdapters

log = logging.getLogger("alignedserve.engine")


class KeptAdapters:
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
