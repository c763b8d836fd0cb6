"""Attention of a step with requests that have folded blocks, and the copy that folds them.

    cache          room of layer 0   room of layer 1   room of layer 2
    all layers     [K V of layer 0]  [K V of layer 1]  [K V of layer 2]      layers 0 and 1 have windows
    folded block   [layer 2 of b]    [layer 2 of c]    [layer 2 of a]        of layer 2, of three old blocks a b c

A layer with a window or with stretches reads the blocks that are not folded. Other layers read all: to the kernels, the
rooms of such a layer from its first to its last are one layer with a multiple of the blocks, and a folded block is as
many blocks of it as were folded. The tables of layers whose rooms lie alike are the same, so a step mostly makes two.

Kernels count the tokens of a table, and so find where a window begins, but not where a stretch does. So tables of
layers with stretches have all tokens: folded blocks stand where the old ones stood, and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from alignedserve.architectures.config import LayerFold
from alignedserve.engine.models.runs import Run
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels


def fold_blocks(memory: Tensor, layers: LayerFold, folds: Sequence[Sequence[int]]) -> None:
    """Copy what layers that read all keep of the blocks behind the first one of each fold into that one."""
    num_layers, halves, *_ = memory.shape
    most = layers.fold.blocks
    if any(len(blocks) != 1 + most or not all(0 <= block < halves // 2 for block in blocks) for blocks in folds):
        raise PlanError(f"a fold is not of a block and {most} others within 0..{halves // 2 - 1}")
    by_block = memory.view(num_layers, halves // 2, -1)
    into, *old = on_device(torch.tensor(folds), memory.device).unbind(1)
    whole, *rooms = on_device(
        torch.tensor([(layer, *layers.rooms[layer]) for layer in layers.rooms]), memory.device
    ).unbind(1)
    for room, blocks in zip(rooms, old, strict=True):
        by_block[room[:, None], into] = by_block[whole[:, None], blocks]


class FoldedAttention:
    """Attention of requests that are kept as K and V, some in folded blocks."""

    paged = None

    def __init__(self, runs: Sequence[Run], memory: Tensor, layers: LayerFold, kernels: Kernels) -> None:
        """`memory` is the device cache, [layers, 2 * blocks, block_size, vector]."""
        assert not any(run.kv.form for run in runs), "by no policy some requests fold and others have another form"
        self._runs, self._memory, self._layers, self._kernels = runs, memory, layers, kernels
        self._block_size = memory.shape[2]
        self._of_whole = cache(self._spans_of_whole)  # layers whose rooms lie alike have the same
        if layers.fold.sight.stretch is None:
            self._of_narrow = Spans(map(self._unfolded, runs), self._block_size)
        else:
            self._of_narrow = self._of_whole((0,) * layers.fold.blocks)

    def attend(
        self, layer: int, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring, inputs: Tensor | None = None
    ) -> Tensor:
        of_layer, spans = self._memory[layer], self._of_narrow
        if (rooms := self._layers.rooms.get(layer)) is not None:
            first = min(rooms)
            of_layer = self._memory[first : max(rooms) + 1].flatten(0, 1)
            spans = self._of_whole(tuple(room - first for room in rooms))
        self._kernels.write(of_layer, spans, k, v)
        return self._kernels.attend(query, of_layer, spans, scoring)

    def _unfolded(self, run: Run) -> QuerySpan:
        """Return where those tokens lie whose K and V all layers keep."""
        folded, count = self._folded(run)
        return QuerySpan(len(run.tokens), run.end - folded, run.kv.blocks[count:], dropped=folded)

    def _spans_of_whole(self, rooms: tuple[int, ...]) -> Spans:
        """Return where all tokens lie for a layer whose rooms are these, counted from the first of them."""
        starts = torch.tensor(rooms) * (self._memory.shape[1] // 2)

        def lie(run: Run) -> QuerySpan:
            blocks, (_, count) = torch.tensor(run.kv.blocks), self._folded(run)
            places = torch.cat(((blocks[:count, None] + starts).flatten(), blocks[count:] + starts[0]))
            return QuerySpan(len(run.tokens), run.end, places.tolist())

        return Spans(map(lie, self._runs), self._block_size)

    def _folded(self, run: Run) -> tuple[int, int]:
        """Return how many first tokens of a request are folded, and into how many blocks."""
        folded = self._layers.fold.folded(run.kv.dropped)
        return folded, folded // (self._block_size * self._layers.fold.blocks)
