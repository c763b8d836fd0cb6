"""The rows of a step that are whole texts, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


class TextRows:
    """Text i has the rows from bounds[i] to bounds[i + 1]; made once per step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])
