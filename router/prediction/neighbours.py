"""Store prompts with the lengths of their outputs, and find those most similar to another prompt (ALISE §3.1).

A prompt is a vector of small integers. Products of such vectors are sums of integers below 2^24, which float32 holds
exactly: so the fast routine gives the same bits on every machine, in whatever order it adds. Equal prompts share one
entry, with the mean of the recent outputs. The oldest entry makes room for a new one.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CAPACITY = 50_000  # entries
MOST_SEEN = 16  # outputs in the mean of a prompt: older ones fade
_FIRST_ROWS = 1024
_TOGETHER = 64  # prompts that are compared with the whole past at a time
MOST_EXACT = 1 << 24  # float32 holds integers below this exactly


class PastPrompts:
    def __init__(self, dimensions: int, capacity: int = CAPACITY) -> None:
        self._capacity, self._dimensions = capacity, dimensions
        rows = min(_FIRST_ROWS, capacity)
        self._vectors = np.zeros((rows, dimensions), dtype=np.float32)
        self._norms = np.zeros(rows)
        self.num_prompt = np.zeros(rows, dtype=np.int64)
        self.num_seen = np.zeros(rows, dtype=np.int64)  # number of outputs in the mean
        self.total = np.zeros(rows, dtype=np.int64)  # sum of their tokens
        self.last = np.zeros(rows, dtype=np.int64)  # tokens of the newest output
        self.serial = np.zeros(rows, dtype=np.int64)  # number of entries that were ever made before this one
        self._at: dict[bytes, int] = {}
        self._num_ever = 0

    def __len__(self) -> int:
        return min(self._num_ever, self._capacity)

    @property
    def vectors(self) -> NDArray[np.float32]:
        return self._vectors[: len(self)]

    @property
    def means(self) -> Floats:
        """Return the mean output of each entry, in tokens."""
        return np.asarray(self.total[: len(self)] / self.num_seen[: len(self)])

    def means_of(self, entries: Ints) -> Floats:
        """Return the mean outputs of these entries alone."""
        return np.asarray(self.total[entries] / self.num_seen[entries])

    def add(self, vector: NDArray[np.int8], num_prompt: int, num_output: int) -> None:
        name = _name_of(vector)
        row = self._at.get(name)
        if row is None:
            row = self._new(name, vector, num_prompt)
        if self.num_seen[row] < MOST_SEEN:
            self.num_seen[row] += 1
        else:
            self.total[row] -= self.total[row] // MOST_SEEN
        self.total[row] += num_output
        self.last[row] = num_output

    def restore(self, vector: NDArray[np.int8], num_prompt: int, num_seen: int, total: int, last: int) -> None:
        """Add an entry as it was saved."""
        self.add(vector, num_prompt, last)
        row = self._at[_name_of(vector)]
        self.num_seen[row], self.total[row] = min(num_seen, MOST_SEEN), total

    def _new(self, name: bytes, vector: NDArray[np.int8], num_prompt: int) -> int:
        row = self._num_ever % self._capacity
        if row == len(self._norms):
            self._grow()
        if self._num_ever >= self._capacity:
            del self._at[_name_of(self._vectors[row].astype(np.int8))]
        self._vectors[row] = vector
        squares = int((vector.astype(np.int64) ** 2).sum())
        if squares >= MOST_EXACT:
            raise ValueError(f"the integers of a prompt's vector are too large: the sum of their squares is {squares}")
        self._norms[row] = max(1, squares) ** 0.5
        self.num_prompt[row], self.serial[row] = num_prompt, self._num_ever
        self.num_seen[row] = self.total[row] = 0
        self._at[name] = row
        self._num_ever += 1
        return row

    def _grow(self) -> None:
        rows = min(2 * len(self._norms), self._capacity)
        for name in ("_vectors", "_norms", "num_prompt", "num_seen", "total", "last", "serial"):
            setattr(self, name, _longer(getattr(self, name), rows))

    def similar(self, asked: NDArray[np.int8], k: int) -> tuple[Ints, Floats]:
        """Return the k entries most similar to each prompt, best first, and their cosines; -1 where there are fewer.

        This is by brute force: some milliseconds for the largest past."""
        norms = np.sqrt(np.maximum(1, (asked.astype(np.int64) ** 2).sum(axis=1)))
        entries, best = np.full((len(asked), k), -1), np.zeros((len(asked), k))
        for start in range(0, len(asked), _TOGETHER):
            products = asked[start : start + _TOGETHER].astype(np.float32) @ self.vectors.T
            for row, product in enumerate(products, start):
                similarity = product / (norms[row] * self._norms[: len(self)])
                chosen = _best(similarity, k)
                entries[row, : len(chosen)], best[row, : len(chosen)] = chosen, similarity[chosen]
        return entries, best

    def in_order(self) -> Ints:
        """Return all entries, the oldest first."""
        return np.argsort(self.serial[: len(self)], kind="stable")


def _name_of(vector: NDArray[np.int8]) -> bytes:
    """Return a hash that stands for the vector: the vector itself would take half a kilobyte again."""
    return blake2b(vector.tobytes(), digest_size=16).digest()


def _best(similarity: Floats, k: int) -> Ints:
    """Return the k most similar entries; among equals the older, since a partition's order depends on the processor."""
    if len(similarity) > k:
        least = np.partition(similarity, len(similarity) - k)[len(similarity) - k]
        candidates = np.flatnonzero(similarity >= least)
    else:
        candidates = np.arange(len(similarity))
    return candidates[np.argsort(-similarity[candidates], kind="stable")][:k]


def _longer(array: NDArray[np.generic], rows: int) -> NDArray[np.generic]:
    longer = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
