"""Store all steps of a run in packed form: a long run has millions, and an object for each step would fill the memory.

A row holds the fields of a step that have a fixed size. The requests that got a token are numbers in a separate list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from math import nan
from struct import Struct
from typing import overload

from alignedserve.core import StepPlan
from alignedserve.cost.model import Shape
from alignedserve.loads.records.records import StepRecord

# worker; began_at, seconds, predicted_s; the shape; shortest, free share; end of the step's requests in the list
_ROW = Struct("=I3d2I2QIQ2IIdQ")


class _Numbers(dict[str, int]):
    """Numbers for names, in order of first use."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


class StepLog(Sequence[StepRecord]):
    """The steps in the order in which they ended. Reading a step builds its record."""

    def __init__(self, budget: int) -> None:
        self._budget = budget  # of every worker, in tokens
        self._rows = bytearray()
        self._emitted = array("I")
        self._workers, self._requests = _Numbers(), _Numbers()

    def add(self, worker: str, began_at: float, seconds: float, free_share: float, plan: StepPlan) -> None:
        numbers, decodes = self._requests, plan.decodes
        if plan.chunks:
            self._emitted.extend([numbers[chunk.request] for chunk in plan.chunks if chunk.sampling is not None])
        self._emitted.extend([numbers[decode.request] for decode in decodes])
        prefixes = [decode.start - decode.kv.dropped for decode in decodes]
        shape = Shape.build(
            [(len(chunk.tokens), chunk.start - chunk.kv.dropped) for chunk in plan.chunks] if plan.chunks else (),
            prefixes,
        )
        shortest = min(prefixes) if prefixes else 0
        self._rows += _ROW.pack(
            *(self._workers[worker], began_at, seconds, plan.predicted_s or nan),
            *shape,
            *(shortest, free_share, len(self._emitted)),
        )

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[StepRecord]:
        workers, requests, budget, start = list(self._workers), list(self._requests), self._budget, 0
        for worker, began_at, seconds, predicted_s, *shape, shortest, free_share, end in _ROW.iter_unpack(self._rows):
            emitted = tuple([requests[number] for number in self._emitted[start:end]])
            start = end
            yield StepRecord(
                workers[worker], began_at, seconds, predicted_s, Shape(*shape), shortest, budget, free_share, emitted
            )

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepRecord]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(at, slice):
            return list(self)[at]
        return next(islice(self, range(len(self))[at], None))
