"""Predictions as wrong as those of real predictors, for outputs whose lengths are known.

A table has what a predictor said of real outputs: for each range of their lengths, how often it said what. The tables
were compiled from published pairs of predicted and true lengths; predictions.json names the sources.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random

from alignedserve.core import Estimate

TABLES = Path(__file__).parent / "predictions.json"


class Predictions(str, Enum):
    EXACT = "exact"
    LMSYS = "lmsys"  # five classes, by a BERT
    SHAREGPT = "sharegpt"  # tokens, by a regression

    def draw(self, length: int, seed: int) -> Estimate | None:
        """Return what the predictor says of an output of this length; None: the length itself."""
        if self is Predictions.EXACT:
            return None
        return prediction_table(self).draw(length, Random(f"{seed}/predicted"))


@dataclass(frozen=True)
class PredictionTable:
    edges: tuple[int, ...]  # between the ranges of true lengths
    said: tuple[Estimate, ...]  # the predictions that there are
    often: tuple[tuple[int, ...], ...]  # how often each was said, of outputs in each range

    def draw(self, length: int, draw: Random) -> Estimate:
        (said,) = draw.choices(self.said, self.often[bisect_right(self.edges, length)])
        return said


@cache
def prediction_table(source: Predictions) -> PredictionTable:
    table = json.loads(TABLES.read_text(encoding="utf-8"))[source.value]
    said = tuple(Estimate(*estimate) for estimate in table["said"])
    return PredictionTable(tuple(table["edges"]), said, tuple(map(tuple, table["often"])))
