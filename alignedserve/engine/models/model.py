"""The interface between the engine and a model.

A model knows its weights but no requests: it runs the concatenated tokens of a step, and asks the step's attention for
everything that depends on a token's request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor

from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import AnyQuantised
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels


class Attention(Protocol):
    """A step's attention: it keeps K and V of the step's tokens and attends for them."""

    @property
    def paged(self) -> Paged | None:
        """Return the places of the step's K and V, if all its requests are kept as KV: then kernels may attend."""

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, inputs: Tensor | None = None
    ) -> Tensor:
        """Keep the step's K and V, [rows, kv_dim], attend with query [rows, heads, head_dim], and return that shape.

        `inputs`, [rows, hidden_size], are the vectors from which k and v were computed; a model without `project`
        leaves them out. All tensors may be strided in all but the last dimension.
        """


class Model(Protocol):
    """A model with its weights."""

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        """Return the logits, in fp32, of the tokens at `rows`, or of all tokens if `rows` is None.

        `positions` holds the position of each token in its request. Layers are numbered as in the device cache.
        """
        return self.logits(self.states(tokens, positions, rows, attention))

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        """Return the states of the tokens at `rows`, or of all tokens: what the head for words makes logits of."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits, in fp32, of states."""

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, [tokens, kv_dim] each, of tokens at these positions, from a layer's inputs after its norm.

        It is called only for models whose configuration `projects`.
        """


# From a weight [outputs, inputs] and a bias.
MakeLinear = Callable[[Tensor | AnyQuantised, Tensor | None], Linear]


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
