"""Fit the regression to the newest past prompts: a fit counts only what has changed since the last one.

Sums of the regression are exact (ridge.py). So what is taken out leaves no trace, and the sums equal those of a fit
that counts all newest prompts again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alignedserve.router.prediction.calibration import whole
from alignedserve.router.prediction.neighbours import Floats, Ints, PastPrompts
from alignedserve.router.prediction.ridge import Ridge

_AT_ONCE = 1024  # prompts that are summed at a time


@dataclass
class _CountedOutputs:
    """What the sums have of each entry: how often it counts, and with which output."""

    serials: Ints  # of the entries that were in these rows
    often: Ints  # 0: the sums have nothing of it
    lengths: Ints

    @classmethod
    def nothing(cls, num: int) -> _CountedOutputs:
        return cls(np.zeros(num, np.int64), np.zeros(num, np.int64), np.ones(num, np.int64))

    def longer(self, num: int) -> _CountedOutputs:
        """Return the same with room for `num` entries."""
        new = self.nothing(num - len(self.often))
        columns = (self.serials, new.serials), (self.often, new.often), (self.lengths, new.lengths)
        return _CountedOutputs(*map(np.concatenate, columns))


class NewestPrompts:
    """The newest past prompts, which the sums of a regression count; `inputs` returns what it sees of some entries."""

    def __init__(self, past: PastPrompts, ridge: Ridge, inputs: Callable[[Ints], Floats]) -> None:
        self._past, self._ridge, self._inputs = past, ridge, inputs
        self._counted = _CountedOutputs.nothing(0)

    def fit(self, newest: Ints) -> None:
        """Fit the regression to these entries."""
        before, now = self._before(), self._now(newest)
        changed = (before.often != now.often) | (before.lengths != now.lengths)
        self._count(np.flatnonzero(changed & (before.often > 0)), before, -1)
        self._count(np.flatnonzero(changed & (now.often > 0)), now, 1)
        self._counted = now
        self._ridge.fit()

    def _before(self) -> _CountedOutputs:
        """Return what the sums have. They begin again where an entry that they count has made room for another."""
        counted = self._counted.longer(len(self._past))
        gone = (counted.serials != self._past.serial[: len(self._past)]) & (counted.often > 0)
        if not gone.any():
            return counted
        self._ridge.forget()
        return _CountedOutputs.nothing(len(self._past))

    def _now(self, newest: Ints) -> _CountedOutputs:
        past, now = self._past, _CountedOutputs.nothing(len(self._past))
        now.serials[newest], now.often[newest] = past.serial[newest], past.num_seen[newest]
        now.lengths[newest] = whole(past.means[newest])
        return now

    def _count(self, rows: Ints, counted: _CountedOutputs, sign: int) -> None:
        for at in range(0, len(rows), _AT_ONCE):
            some = rows[at : at + _AT_ONCE]
            self._ridge.count(self._inputs(some), counted.lengths[some], sign * counted.often[some])
