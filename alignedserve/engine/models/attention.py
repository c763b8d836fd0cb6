"""A step's attention: it keeps vectors of the step's tokens, and attends to kept vectors, request by request.

For most requests K and V are kept. For a hidden request, each layer's input after its norm is kept instead: every step
computes K and V of the earlier tokens from it, in scratch memory that all layers of the step share, puts K and V of the
step's own tokens beside them, and attends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.core import units_for
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.runs import Run
from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels


def attention_of(
    runs: Sequence[Run],
    spans: Spans,
    cache: Tensor,
    config: ModelConfig,
    kernels: Kernels,
    model: Model,
    adapters: StepAdapters | None = None,
) -> Attention:
    """Return the step's attention. `runs` begin with requests of kind KV, and `spans` belong to exactly these."""
    hidden = [run for run in runs if run.is_hidden]
    if not hidden:
        return _KVAttention(cache, spans, kernels, Paged(cache, spans, adapters))
    for_hidden = _HiddenAttention(hidden, cache.unbind(0), config, kernels, model)
    if len(hidden) == len(runs):
        return for_hidden
    return _MixedAttention(_KVAttention(cache, spans, kernels), for_hidden, spans.num_rows)


class _KVAttention:
    """Attention of requests whose K and V are kept."""

    def __init__(self, cache: Tensor, spans: Spans, kernels: Kernels, paged: Paged | None = None) -> None:
        self._cache, self._spans, self._kernels = cache, spans, kernels
        self.paged = paged  # of the whole step

    @cached_property
    def _layers(self) -> Sequence[Tensor]:  # not used where one call runs all layers
        return self._cache.unbind(0)

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, hidden: Tensor | None = None
    ) -> Tensor:
        cache = self._layers[layer]
        self._kernels.write(cache, self._spans, k, v)
        return self._kernels.attend(query, cache, self._spans, scoring)


class _HiddenAttention:
    """Attention of requests whose hidden vectors are kept."""

    paged = None

    def __init__(
        self, runs: Sequence[Run], layers: Sequence[Tensor], config: ModelConfig, kernels: Kernels, model: Model
    ) -> None:
        self._layers, self._config, self._kernels, self._model = layers, config, kernels, model
        block_size, lies, before, old, new = layers[0].shape[1], [], [], [], []
        first = 0  # the next free pair of the scratch memory
        for run in runs:
            pairs = range(first, first + units_for(run.end, block_size))
            first = pairs.stop
            slots = hidden_slots(run.blocks, block_size, run.end)
            lies.append(Lie(len(run.tokens), run.end, pairs))
            new.append(slots[run.start :])
            if run.start:
                before.append(Lie(run.start, run.start, pairs))
                old.append(slots[: run.start])
        self._spans, self._new_slots = Spans(lies, block_size), torch.cat(new)
        self._before = Spans(before, block_size) if before else None
        self._old_slots = torch.cat(old) if old else torch.empty(0)
        self._scratch = layers[0].new_empty(2 * first, block_size, config.kv_dim)

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, hidden: Tensor | None = None
    ) -> Tensor:
        assert hidden is not None, "a model that projects hands over the vectors that K and V are computed from"
        cache, config, kernels = self._layers[layer], self._config, self._kernels
        kernels.write_hidden(cache, self._new_slots, hidden)
        kernels.write(self._scratch, self._spans, k, v)
        if self._before is not None:
            kept = kernels.read_hidden(cache, self._old_slots, config.hidden_size)
            kernels.write(self._scratch, self._before, *self._model.project(layer, kept, self._before.positions))
        return kernels.attend(query, self._scratch, self._spans, scoring)


class _MixedAttention:
    """Attention of a step with both kinds: its first rows belong to requests whose K and V are kept."""

    paged = None

    def __init__(self, for_kv: _KVAttention, for_hidden: _HiddenAttention, rows: int) -> None:
        self._for_kv, self._for_hidden, self._rows = for_kv, for_hidden, rows

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, hidden: Tensor | None = None
    ) -> Tensor:
        assert hidden is not None, "a model that projects hands over the vectors that K and V are computed from"
        rows = self._rows
        first = self._for_kv.attend(layer, query[:rows], k[:rows], v[:rows], scoring)
        rest = self._for_hidden.attend(layer, query[rows:], k[rows:], v[rows:], scoring, hidden[rows:])
        return torch.cat((first, rest))


def hidden_slots(blocks: Sequence[int], block_size: int, tokens: int) -> Tensor:
    """Return the slots of a request's first tokens in single blocks that are filled from the left."""
    firsts = torch.tensor(blocks[: units_for(tokens, block_size)], dtype=torch.long) * block_size
    return (firsts[:, None] + torch.arange(block_size)).flatten()[:tokens]
