"""Frames in the pipes of the router's side process: msgpack arrays, each after its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from msgspec import msgpack

from alignedserve.core import Sketch
from alignedserve.protocol.commands import Learn, Predict, Retrain
from alignedserve.protocol.events import Predicted

PredictorOrder = Predict | Learn | Retrain
_HEADER = 4


def write(order: PredictorOrder) -> bytes:
    match order:
        case Predict(request, attempt, sketch, num_prompt):
            return _frame(["predict", request, attempt, sketch.counts, sketch.text, num_prompt])
        case Learn(sketch, num_prompt, num_output):
            return _frame(["learn", sketch.counts, sketch.text, num_prompt, num_output])
        case Retrain():
            return _frame(["retrain"])


def read(file: IO[bytes]) -> Iterator[PredictorOrder]:
    """Yield orders until the file ends."""
    for frame in frames(file):
        match frame:
            case ["predict", request, attempt, counts, text, num_prompt]:
                yield Predict(request, attempt, Sketch(counts, text), num_prompt)
            case ["learn", counts, text, num_prompt, num_output]:
                yield Learn(Sketch(counts, text), num_prompt, num_output)
            case _:
                yield Retrain()


def frames(file: IO[bytes]) -> Iterator[list[Any]]:
    while len(header := file.read(_HEADER)) == _HEADER:
        size = int.from_bytes(header, "little")
        frame = file.read(size)
        if len(frame) < size:
            return
        yield msgpack.decode(frame)


def _frame(values: list[object]) -> bytes:
    packed: bytes = msgpack.encode(values)
    return len(packed).to_bytes(_HEADER, "little") + packed


def answer(predicted: Predicted) -> bytes:
    estimate = predicted.estimate
    return _frame([predicted.request, predicted.attempt, estimate.mean, estimate.upper])
