"""A step's attention: it keeps K and V of the step's tokens, and attends to what is kept, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from alignedserve.engine.models.model import Attention
from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels


def attention_of(spans: Spans, cache: Tensor, kernels: Kernels, adapters: StepAdapters | None = None) -> Attention:
    """Return the attention of a step whose requests are all kept as KV."""
    return KvAttention(cache, spans, kernels, Paged(cache, spans, adapters))


class KvAttention:
    """Attention of requests that are kept as K and V."""

    def __init__(self, cache: Tensor, spans: Spans, kernels: Kernels, paged: Paged | None = None) -> None:
        self._cache, self._spans, self._kernels = cache, spans, kernels
        self.paged = paged  # of the whole step

    @cached_property
    def _layers(self) -> Sequence[Tensor]:  # not used where one call runs all layers
        return self._cache.unbind(0)

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, inputs: Tensor | None = None
    ) -> Tensor:
        cache = self._layers[layer]
        self._kernels.write(cache, self._spans, k, v)
        return self._kernels.attend(query, cache, self._spans, scoring)
