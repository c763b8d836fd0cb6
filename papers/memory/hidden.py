"""Requests that are kept as hidden vectors: of each token, the input of each layer after its norm (Apt-Serve §4).

Every step computes K and V of the earlier tokens from these vectors, in scratch memory that all layers of the step
share, puts K and V of the step's new tokens beside these, and attends there. A request's vectors fill one half of each
block, then the other half; a vector takes the first numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import FormOrder, units_for
from alignedserve.engine.forms.other import OtherForm
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.runs import Run
from alignedserve.errors import PlanError
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.papers.rules import HIDDEN
from alignedserve.protocol.form_orders import ProjectKv


class HiddenVectors(OtherForm):
    def __init__(self, config: ModelConfig, kv_dtype: KvDtype, kernels: Kernels, model: Model | None) -> None:
        """Without `model`, of an encoder, there is nothing that could make K and V again."""
        self._config, self._kernels, self._decoder = config, kernels, model
        self.why_not = config.why_not_hidden or kv_dtype.why_not_hidden  # why no request can have this form here

    @property
    def _model(self) -> Model:
        assert self._decoder is not None, "an encoder keeps nothing, and `why_not` says so"
        return self._decoder

    def problem(self, run: Run) -> str | None:
        if run.kv.form != HIDDEN:
            return super().problem(run)
        if self.why_not is not None:
            return f"cannot keep hidden vectors: {self.why_not}"
        return None if run.adapter is None else "has an adapter: it keeps KV, not hidden vectors"

    def attention(self, for_kv: Attention | None, rows: int, runs: Sequence[Run], cache: Tensor) -> Attention:
        for_hidden = _HiddenAttention(runs, cache.unbind(0), self._config, self._kernels, self._model)
        return for_hidden if for_kv is None else _MixedAttention(for_kv, for_hidden, rows)

    @torch.inference_mode()
    def perform(self, order: FormOrder, cache: Tensor) -> None:
        assert isinstance(order, ProjectKv), "there is no other order for hidden vectors"
        self._check(order, cache)
        self._project(order.kept, order.blocks, order.num_tokens, cache)

    @torch.inference_mode()
    def remake(self, blocks: Sequence[int], tokens: int, cache: Tensor) -> None:
        self._project(blocks, blocks, tokens, cache)

    def _check(self, order: ProjectKv, cache: Tensor) -> None:
        if self.why_not is not None:
            raise PlanError(f"request {order.request} cannot keep hidden vectors: {self.why_not}")
        num_blocks, block_size = cache.shape[1] // 2, cache.shape[2]
        for blocks, held in ((order.kept, 2 * block_size), (order.blocks, block_size)):
            if order.num_tokens > len(blocks) * held:
                raise PlanError(
                    f"request {order.request} has {len(blocks)} blocks, too few for {order.num_tokens} tokens"
                )
            if not all(0 <= block < num_blocks for block in blocks):
                raise PlanError(f"request {order.request} names a block outside 0..{num_blocks - 1}")

    def _project(self, kept: Sequence[int], blocks: Sequence[int], tokens: int, cache: Tensor) -> None:
        block_size = cache.shape[2]
        slots, spans = slots_of(kept, block_size, tokens), Spans([QuerySpan(tokens, tokens, blocks)], block_size)
        for layer, of_layer in enumerate(cache.unbind(0)):
            vectors = _rows(of_layer, slots, self._config.hidden_size)
            self._kernels.write(of_layer, spans, *self._model.project(layer, vectors, spans.positions))


class _HiddenAttention:
    paged = None

    def __init__(
        self, runs: Sequence[Run], layers: Sequence[Tensor], config: ModelConfig, kernels: Kernels, model: Model
    ) -> None:
        self._layers, self._config, self._kernels, self._model = layers, config, kernels, model
        block_size, lies, before, old, new = layers[0].shape[1], [], [], [], []
        first = 0  # the next free block of the scratch memory
        for run in runs:
            blocks = range(first, first + units_for(run.end, block_size))
            first = blocks.stop
            slots = slots_of(run.kv.blocks, block_size, run.end)
            lies.append(QuerySpan(len(run.tokens), run.end, blocks))
            new.append(slots[run.start :])
            if run.start:
                before.append(QuerySpan(run.start, run.start, blocks))
                old.append(slots[: run.start])
        self._spans, self._new_slots = Spans(lies, block_size), torch.cat(new)
        self._before = Spans(before, block_size) if before else None
        self._old_slots = torch.cat(old) if old else torch.empty(0)
        self._scratch = layers[0].new_empty(2 * first, block_size, config.kv_dim)

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, inputs: Tensor | None = None
    ) -> Tensor:
        assert inputs is not None, "a model that projects hands over the vectors that K and V are computed from"
        cache, kernels, size = self._layers[layer], self._kernels, self._config.hidden_size
        cache.view(-1, cache.shape[-1])[self._new_slots.to(cache.device), :size] = inputs
        kernels.write(self._scratch, self._spans, k, v)
        if self._before is not None:
            kept = _rows(cache, self._old_slots, size)
            kernels.write(self._scratch, self._before, *self._model.project(layer, kept, self._before.positions))
        return kernels.attend(query, self._scratch, self._spans, scoring)


class _MixedAttention:
    """Attention of a step whose first rows belong to requests of KV."""

    paged = None

    def __init__(self, for_kv: Attention, for_hidden: _HiddenAttention, rows: int) -> None:
        self._for_kv, self._for_hidden, self._rows = for_kv, for_hidden, rows

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, inputs: Tensor | None = None
    ) -> Tensor:
        assert inputs is not None, "a model that projects hands over the vectors that K and V are computed from"
        rows = self._rows
        first = self._for_kv.attend(layer, query[:rows], k[:rows], v[:rows], scoring)
        rest = self._for_hidden.attend(layer, query[rows:], k[rows:], v[rows:], scoring, inputs[rows:])
        return torch.cat((first, rest))


def _rows(cache: Tensor, slots: Tensor, size: int) -> Tensor:
    return cache.view(-1, cache.shape[-1])[slots.to(cache.device), :size]


def slots_of(blocks: Sequence[int], block_size: int, tokens: int) -> Tensor:
    """Return the slots of a request's first tokens."""
    firsts = torch.tensor(blocks, dtype=torch.long) * 2 * block_size
    return (firsts[:, None] + torch.arange(2 * block_size)).flatten()[:tokens]
