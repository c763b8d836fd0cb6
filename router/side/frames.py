"""Frames in the pipes of the router's side process: msgpack, each after its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import msgspec

from alignedserve.protocol.commands import Learn, Predict, Retrain
from alignedserve.protocol.events import Predicted

PredictorOrder = Predict | Learn | Retrain
_ORDERS: dict[str, Any] = {kind.__name__: kind for kind in (Predict, Learn, Retrain)}
_HEADER = 4


def write(order: PredictorOrder) -> bytes:
    return _frame([type(order).__name__, order])


def read(file: IO[bytes]) -> Iterator[PredictorOrder]:
    """Yield orders until the file ends."""
    for name, values in frames(file):
        order: PredictorOrder = msgspec.convert(values, _ORDERS[name])
        yield order


def frames(file: IO[bytes]) -> Iterator[list[Any]]:
    while len(header := file.read(_HEADER)) == _HEADER:
        size = int.from_bytes(header, "little")
        frame = file.read(size)
        if len(frame) < size:
            return
        yield msgspec.msgpack.decode(frame)


def _frame(values: list[object]) -> bytes:
    packed: bytes = msgspec.msgpack.encode(values)
    return len(packed).to_bytes(_HEADER, "little") + packed


def answer(predicted: Predicted) -> bytes:
    estimate = predicted.estimate
    return _frame([predicted.request, predicted.attempt, estimate.mean, estimate.upper])
