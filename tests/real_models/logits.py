"""All logits of a step of the engine, whose results have the best few only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from alignedserve.core import Chunk, KvForm, Scoring, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Computed


def prompt_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each token of a prompt that runs as a single chunk."""
    blocks = tuple(range(-(-len(tokens) // engine.block_size)))
    scoring = Scoring((*tokens[1:], 0), top=0)
    with kept_logits(engine) as kept:
        engine.step(StepPlan(1, (Chunk("text", tuple(tokens), 0, KvForm(blocks), None, scoring=scoring),), ()))
    return kept[0]


@contextmanager
def kept_logits(engine: Engine) -> Iterator[list[Tensor]]:
    """Keep the logits of each step: a step's result has the best few only."""
    kept: list[Tensor] = []
    compute = engine._compute

    def keep(*step: Any) -> Computed:
        computed = compute(*step)
        kept.append(computed.logits.clone())  # a later step writes to the same memory
        return computed

    engine._compute = keep  # pyrefly: ignore[bad-assignment, method-assign]
    try:
        yield kept
    finally:
        del engine._compute
