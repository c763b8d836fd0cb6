"""Makes the vectors that requests ask for from the states of tokens, as the folder says (architectures/vectors.py).

states of all tokens that count ─▶ one per text ─▶ Dense layers ─▶ cut ─▶ length 1 ─▶ bytes
                                        └────────▶ head for scores ─▶ activation ─▶ bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import ModelConfig
from alignedserve.architectures.vectors import Dense, DenseActivation, PooledRule, PoolKind
from alignedserve.core import POOLED, Chunk, PooledTask, Pooling, StepPlan, StepResult
from alignedserve.engine.models.activations import OF_VECTORS
from alignedserve.engine.models.encoder import Encoder, Text
from alignedserve.engine.models.runs import Run
from alignedserve.engine.weights.tensors import Tensors
from alignedserve.errors import PlanError


@dataclass(frozen=True)
class _DenseLayer:
    weight: Tensor
    bias: Tensor | None
    activation: DenseActivation

    def __call__(self, x: Tensor) -> Tensor:
        return OF_VECTORS[self.activation](F.linear(x, self.weight, self.bias))


class Pooler:
    """The vectors of a model. `head` makes the numbers of a whole text of the state that counts, in fp32."""

    def __init__(self, rule: PooledRule, device: torch.device, head: Callable[[Tensor], Tensor] | None = None) -> None:
        self.rule, self._head = rule, head
        self._dense = [_dense_layer(dense, device) for dense in rule.dense]

    def rows(self, chunk: Chunk, start: int) -> range:
        """Return the rows of the states that count, where the chunk's tokens begin at row `start` of the step."""
        end = start + len(chunk.tokens)
        if chunk.pooling is not None and chunk.start and self.rule.is_whole:
            raise PlanError(f"request {chunk.request} asks for a vector of all its tokens, and is to start behind some")
        match self.rule.kind:
            case PoolKind.LAST:
                return range(end - 1, end)
            case PoolKind.FIRST:
                return range(start, start + 1)
        return range(start, end)

    def vectors(self, states: Tensor, lengths: Sequence[int], poolings: Sequence[Pooling]) -> list[bytes]:
        """Return the vector of each text; `states` are the rows that count, `lengths` says how many a text has."""
        pooled = self._pooled(states.float(), lengths)
        vectors: list[bytes] = [b""] * len(poolings)
        for task, make in ((PooledTask.EMBED, self._embedded), (PooledTask.SCORE, self._scored)):
            places = [place for place, pooling in enumerate(poolings) if pooling.task is task]
            if places:
                made = make(pooled[places], [poolings[place] for place in places])
                for place, vector in zip(places, made, strict=True):
                    vectors[place] = vector
        return vectors

    def _pooled(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        if len(states) == len(lengths):
            return states
        counts = torch.tensor(lengths, device=states.device)
        of_text = torch.repeat_interleave(torch.arange(len(lengths), device=states.device), counts)
        sums = torch.zeros(len(lengths), states.shape[1], device=states.device).index_add_(0, of_text, states)
        return sums / counts[:, None]

    def _embedded(self, pooled: Tensor, poolings: Sequence[Pooling]) -> list[bytes]:
        for layer in self._dense:
            pooled = layer(pooled)
        if all(pooling.dimensions is None for pooling in poolings):
            return _as_bytes(self._normalised(pooled))
        cut = (row[None, : pooling.dimensions] for row, pooling in zip(pooled, poolings, strict=True))
        return [vector for row in cut for vector in _as_bytes(self._normalised(row))]

    def _normalised(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1) if self.rule.is_normalised else vectors

    def _scored(self, pooled: Tensor, _: Sequence[Pooling]) -> list[bytes]:
        if self._head is None:
            raise PlanError("this model has no head for scores")
        return _as_bytes(OF_VECTORS[self.rule.score_activation](self._head(pooled)))


def _as_bytes(vectors: Tensor) -> list[bytes]:
    """Return the bytes of each row; none for a row that is not finite."""
    rows = vectors.cpu().numpy().astype("<f4")
    return [
        row.tobytes() if is_finite else b""
        for row, is_finite in zip(rows, vectors.isfinite().all(1).tolist(), strict=True)
    ]


def _dense_layer(dense: Dense, device: torch.device) -> _DenseLayer:
    tensors = Tensors(dense.folder)
    weight, bias = torch.empty(dense.outputs, dense.inputs), torch.empty(dense.outputs)
    tensors.read_into(weight, "linear.weight")
    if dense.has_bias:
        tensors.read_into(bias, "linear.bias")
    return _DenseLayer(weight.to(device), bias.to(device) if dense.has_bias else None, dense.activation)


class Vectors:
    """The vectors that the chunks of a step ask for."""

    def __init__(self, pooler: Pooler, plan: StepPlan) -> None:
        self._pooler = pooler
        self.chunks = [chunk for chunk in plan.chunks if chunk.pooling is not None]
        self._lengths: list[int] = []  # of each chunk, how many states count
        self._states: Tensor | None = None

    def rows(self, first: Mapping[str, int]) -> list[int]:
        """Return the rows of the states that count; `first` has the row of each request's first token."""
        ranges = [self._pooler.rows(chunk, first[chunk.request]) for chunk in self.chunks]
        self._lengths = [*map(len, ranges)]
        return [row for rows in ranges for row in rows]

    def take(self, states: Tensor) -> None:
        """Take the states of these rows."""
        self._states = states

    def added_to(self, result: StepResult) -> StepResult:
        """Add the vectors to a step's result: a vector that is not finite counts as a missing next token."""
        if self._states is None:
            return result
        poolings = [chunk.pooling for chunk in self.chunks if chunk.pooling is not None]
        made = self._pooler.vectors(self._states, self._lengths, poolings)
        found = [(chunk.request, vector) for chunk, vector in zip(self.chunks, made, strict=True)]
        result.vectors = tuple((request, vector) for request, vector in found if vector)
        result.tokens += tuple((request, POOLED) for request, vector in found if vector)
        result.unsampled += tuple(request for request, vector in found if not vector)
        return result


def encoded(encoder: Encoder, vectors: Vectors, plan: StepPlan, runs: Sequence[Run]) -> StepResult:
    """Return the result of an encoder's step. A trial, which asks for tokens, is a step of texts too."""
    second_at = {chunk.request: chunk.pooling.second_at for chunk in vectors.chunks if chunk.pooling is not None}
    states = encoder.states([Text(run.tokens, second_at.get(run.request)) for run in runs])
    first, end = {}, 0
    for run, found in zip(runs, states, strict=True):
        first[run.request], end = end, end + len(found)
    if vectors.chunks:
        vectors.take(torch.cat(states)[vectors.rows(first)])
    tokens = tuple((part.request, POOLED) for part in plan.parts if part.sampling is not None)
    return vectors.added_to(StepResult(plan.number, tokens))


def head_of(folder: Path, config: ModelConfig, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Return the head of a decoder that was trained to score texts, if it has one."""
    if not config.labels:
        return None
    weight = torch.empty(config.labels, config.hidden_size)
    Tensors(folder).read_into(weight, "score.weight")
    placed = weight.to(device)
    return lambda states: F.linear(states, placed)
