"""How far logits are from those of the same weights in fp32: Kullback-Leibler divergence of the next token, on a text.

reference = load(folder)(torch.tensor([tokens])).logits[0]   # transformers, in fp32
found = divergence(reference, logits)
found.mean, found.most, found.same                           # nats a token, of the worst token, share of tokens
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
