"""From logits to tokens, by a generator that has no state.

The random number of a token is a function of the request's seed and of the token's index in its
output. So, given its logits, what a request samples depends neither on the batch it runs in nor on
how often it was moved, evicted or restarted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.core import Sampling

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for this token: two rounds of SplitMix64's finaliser over the counter."""
    return (_mixed(_mixed(seed & _MASK) + index) >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[int]:
    """The next token of each row of `logits` [requests, vocabulary], by its sampling and its index."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, index) in enumerate(wanted):
        if sampling.temperature > 0:
            chosen[row] = _drawn(logits[row], sampling, index)
    return chosen


def _drawn(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """Inverse transform over the tokens that top-k and top-p keep, likeliest first.

    In double precision, and with a stable order of equal logits: one uniform number means one token.
    """
    below_best = logits.double() - logits.max()  # so that no temperature, however low, overflows
    ordered, tokens = (below_best / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    reached = ordered.softmax(0).cumsum(0)
    if sampling.top_p < 1:
        # The smallest set whose probability reaches top_p, and at least the likeliest token.
        kept = int((reached < sampling.top_p).sum()) + 1
        reached = reached[:kept]
    place = torch.searchsorted(reached, uniform(sampling.seed, index) * reached[-1], right=True)
    return int(tokens[min(int(place), len(reached) - 1)])
