"""How far logits are from those of the same weights in fp32: Kullback-Leibler divergence of the next token, on a text.

reference = load(folder)(torch.tensor([tokens])).logits[0]   # transformers, in fp32
found = divergence(reference, prompt_logits(engine, tokens))
found.mean, found.most, found.same                           # nats a token, of the worst token, share of tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignedserve.core import Chunk, KvForm, Scoring, StepPlan
from alignedserve.engine.engine import Engine

_ROWS = 64  # whose distributions are compared at once, in fp64


class Divergence(NamedTuple):
    mean: float
    most: float
    same: float  # share of tokens with the same best next token


def divergence(expected: Tensor, logits: Tensor) -> Divergence:
    """Return how far each token's distribution is from the expected one (Kullback and Leibler).

    Both are [tokens, vocabulary], and may be log-probabilities as well.
    """
    if expected.shape != logits.shape:
        raise ValueError(f"logits of different shapes: {tuple(expected.shape)} and {tuple(logits.shape)}")
    each = torch.cat([_each(*rows) for rows in zip(expected.split(_ROWS), logits.split(_ROWS), strict=True)])
    same = (expected.argmax(-1) == logits.argmax(-1)).double()
    return Divergence(each.mean().item(), each.max().item(), same.mean().item())


def _each(expected: Tensor, logits: Tensor) -> Tensor:
    wanted, found = (rows.double().log_softmax(-1) for rows in (expected, logits))
    return (wanted.exp() * (wanted - found)).sum(-1)


def prompt_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each token of a prompt that runs as a single chunk."""
    pairs = tuple(range(-(-len(tokens) // engine.block_size)))
    scoring = Scoring((*tokens[1:], 0), top=0)
    with kept_logits(engine) as kept:
        engine.step(StepPlan(1, (Chunk("text", tuple(tokens), 0, KvForm(pairs), None, scoring=scoring),), ()))
    return kept[0]


@contextmanager
def kept_logits(engine: Engine) -> Iterator[list[Tensor]]:
    """Keep the logits of each step: a step's result has the best few only."""
    kept: list[Tensor] = []
    compute = engine._logits

    def keep(*step: Any) -> Tensor:
        logits = compute(*step)
        kept.append(logits.clone())  # a later step writes to the same memory
        return logits

    engine._logits = keep  # type: ignore[method-assign, assignment]
    try:
        yield kept
    finally:
        del engine._logits
