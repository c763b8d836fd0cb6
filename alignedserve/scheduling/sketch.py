"""A prompt as a few hundred small integers, by which the length predictor compares prompts (predictor: hash).

Each token, and each pair of neighbours, is hashed to one of DIMENSIONS buckets and counted there. A count is kept as 0,
1, 2 or 3 (for four and more): a word that comes a hundred times tells little more than a word that comes four times.
Small integers have exact sums, in whatever order a processor adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alignedserve.core import Sketch

DIMENSIONS = 512  # a power of 2
ENDS = 256  # tokens at each end that are read: the question stands there, even in a long document
_LEVELS = np.array([0, 1, 2, 2, 3], dtype=np.int8)  # count -> kept value
_MULTIPLIERS = tuple(np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HALF = np.uint64(32)
_BUCKET = np.uint64(DIMENSIONS - 1)


def sketch_of(prompt: Sequence[int]) -> Sketch:
    """Return the sketch of a prompt; this takes some tens of microseconds."""
    ends = prompt if len(prompt) <= 2 * ENDS else (*prompt[:ENDS], *prompt[-ENDS:])
    tokens = np.array(ends, dtype=np.uint64)
    single, first, second = _MULTIPLIERS
    hashes = np.concatenate((tokens * single, tokens[:-1] * first + tokens[1:] * second))
    hashes ^= hashes >> _HALF
    hashes *= single
    counts = np.bincount(((hashes >> _HALF) & _BUCKET).astype(np.int64), minlength=DIMENSIONS)
    return Sketch(_LEVELS[np.minimum(counts, len(_LEVELS) - 1)].tobytes())
