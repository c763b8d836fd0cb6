"""A step's attention: what is kept of its tokens, and what they attend to, request by request.

Of most requests K and V are kept. Of a hidden one, each layer's input after its norm is: in every step K and V of the
tokens before it are made of that, in memory that the layers of the step share, beside those of the step's own tokens,
and attended to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from alignedserve.architectures.model_config import ModelConfig
from alignedserve.core import units_for
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.runs import Run
from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels


def attention_of(
    runs: Sequence[Run],
    spans: Spans,
    cache: torch.Tensor,
    config: ModelConfig,
    kernels: Kernels,
    model: Model,
) -> Attention:
    """`runs` begin with those whose K and V are kept; `spans` are all of theirs."""
    hidden = [run for run in runs if run.is_hidden]
    if not hidden:
        return _OfKV(cache, spans, config, kernels, Paged(cache, spans))
    kept = _OfHidden(hidden, cache.unbind(0), config, kernels, model)
    if len(hidden) == len(runs):
        return kept
    return _Mixed(_OfKV(cache, spans, config, kernels), kept, spans.num_rows)


class _OfKV:
    def __init__(
        self,
        cache: torch.Tensor,
        spans: Spans,
        config: ModelConfig,
        kernels: Kernels,
        paged: Paged | None = None,
    ) -> None:
        self._cache, self._spans, self._config, self._kernels = cache, spans, config, kernels
        self.paged = paged  # of the whole step

    @cached_property
    def _layers(self) -> Sequence[torch.Tensor]:  # nobody asks for them where all layers go in one call
        return self._cache.unbind(0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache, config = self._layers[layer], self._config
        self._kernels.write(cache, self._spans, k, v)
        return self._kernels.attend(query, cache, self._spans, config.scale(layer), config.window(layer))


class _OfHidden:
    paged = None

    def __init__(
        self,
        runs: Sequence[Run],
        layers: Sequence[torch.Tensor],
        config: ModelConfig,
        kernels: Kernels,
        model: Model,
    ) -> None:
        self._layers, self._config, self._kernels, self._model = layers, config, kernels, model
        block_size, lies, before, old, new = layers[0].shape[1], [], [], [], []
        first = 0  # pair of the scratch memory
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
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert hidden is not None, "a model that projects hands over what its K and V are made of"
        cache, config, kernels = self._layers[layer], self._config, self._kernels
        kernels.write_hidden(cache, self._new_slots, hidden)
        kernels.write(self._scratch, self._spans, k, v)
        if self._before is not None:
            kept = kernels.read_hidden(cache, self._old_slots, config.hidden_size)
            kernels.write(self._scratch, self._before, *self._model.project(layer, kept, self._before.positions))
        return kernels.attend(query, self._scratch, self._spans, config.scale(layer), config.window(layer))


class _Mixed:
    """The first rows are of requests whose K and V are kept."""

    paged = None

    def __init__(self, of_kv: _OfKV, of_hidden: _OfHidden, rows: int) -> None:
        self._of_kv, self._of_hidden, self._rows = of_kv, of_hidden, rows

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert hidden is not None, "a model that projects hands over what its K and V are made of"
        rows = self._rows
        first = self._of_kv.attend(layer, query[:rows], k[:rows], v[:rows])
        rest = self._of_hidden.attend(layer, query[rows:], k[rows:], v[rows:], hidden[rows:])
        return torch.cat((first, rest))


def hidden_slots(blocks: Sequence[int], block_size: int, tokens: int) -> torch.Tensor:
    """Of a request's first tokens, in single blocks that are filled from the left."""
    firsts = torch.tensor(blocks[: units_for(tokens, block_size)], dtype=torch.long) * block_size
    return (firsts[:, None] + torch.arange(block_size)).flatten()[:tokens]
