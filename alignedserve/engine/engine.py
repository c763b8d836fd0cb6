"""The engine: owns the weights and the device cache, and executes step plans.

A step is one pass over all of its tokens, prompt chunks and decodes alike: concatenated for the
linear layers, by request for attention. Which requests run, and in which blocks their KV lies, the
plan says.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from alignedserve.core import Chunk, Decode, Sampling, StepPlan, StepResult
from alignedserve.engine.models.llama import Llama
from alignedserve.engine.sampling import sample
from alignedserve.engine.tensors import Tensors
from alignedserve.errors import PlanError
from alignedserve.kernels.reference import Span, attention, k_slots, write_slots
from alignedserve.model_config import read_config


@dataclass(frozen=True)
class _Run:
    """One request's share of a step: its tokens, and where they and those before them lie."""

    request: str
    tokens: Sequence[int]
    start: int
    pairs: Sequence[int]
    sampling: Sampling | None
    index: int


class Engine:
    def __init__(self, folder: Path, *, num_pairs: int, block_size: int = 16, dtype: str | None = None) -> None:
        self.config = read_config(folder)
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, dtype or self.config.dtype)
        self._model = Llama(self.config, Tensors(folder), self.dtype)
        self.cache = self._new_cache(num_pairs)
        self._num_pairs = num_pairs
        self._sampled: dict[str, int] = {}  # request -> its token of the last step

    def _new_cache(self, num_pairs: int) -> torch.Tensor:
        """Zeros that take memory only once they are written: an idle worker stays small."""
        shape = (self.config.num_layers, 2 * num_pairs, self.block_size, self.config.kv_dim)
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        runs = [*map(self._chunk_run, plan.chunks), *map(self._decode_run, plan.decodes)]
        for run in runs:
            self._check(run)
        sampling = [run for run in runs if run.sampling is not None]
        logits = self._forward(runs) if runs else torch.empty(0)
        wanted = [(run.sampling, run.index) for run in sampling if run.sampling is not None]
        chosen = sample(logits, wanted) if wanted else []
        self._sampled = {run.request: token for run, token in zip(sampling, chosen, strict=True)}
        return StepResult(plan.number, tuple(self._sampled.items()))

    def _chunk_run(self, chunk: Chunk) -> _Run:
        return _Run(chunk.request, chunk.tokens, chunk.start, chunk.pairs, chunk.sampling, chunk.index)

    def _decode_run(self, decode: Decode) -> _Run:
        token = self._sampled.get(decode.request) if decode.token is None else decode.token
        if token is None:
            raise PlanError(f"request {decode.request} is to go on from the step before, which sampled nothing for it")
        return _Run(decode.request, (token,), decode.start, decode.pairs, decode.sampling, decode.index)

    def _check(self, run: _Run) -> None:
        end = run.start + len(run.tokens)
        if not run.tokens:
            raise PlanError(f"request {run.request} is to run no token")
        if not all(0 <= token < self.config.vocab_size for token in run.tokens):
            raise PlanError(f"request {run.request} names a token outside 0..{self.config.vocab_size - 1}")
        if run.start < 0:
            raise PlanError(f"request {run.request} is to start at {run.start}")
        if end > self.config.max_positions:
            most = self.config.max_positions
            raise PlanError(f"request {run.request} would reach {end} tokens, the model has {most} positions")
        if end > len(run.pairs) * self.block_size:
            raise PlanError(f"request {run.request} has {len(run.pairs)} block pairs, too few for {end} tokens")
        if not all(0 <= pair < self._num_pairs for pair in run.pairs):
            raise PlanError(f"request {run.request} names a block pair outside 0..{self._num_pairs - 1}")

    def _forward(self, runs: Sequence[_Run]) -> torch.Tensor:
        """Logits of the last token of each run that samples."""
        spans, written, positions, rows = [], [], [], []
        first = 0
        for run in runs:
            queries = len(run.tokens)
            slots = k_slots(run.pairs, self.block_size)[: run.start + queries]
            spans.append(Span(first, queries, slots))
            written.append(slots[run.start :])
            positions.append(torch.arange(run.start, run.start + queries))
            first += queries
            if run.sampling is not None:
                rows.append(first - 1)
        new_slots = torch.cat(written)
        scale = self.config.head_dim**-0.5

        def attend(layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            write_slots(self.cache[layer], new_slots, k, v)
            return attention(query, self.cache[layer], spans, scale)

        tokens = torch.tensor([token for run in runs for token in run.tokens])
        return self._model.forward(tokens, torch.cat(positions), torch.tensor(rows, dtype=torch.long), attend)
