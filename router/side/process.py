"""The router's side process: it embeds prompts, searches past prompts and trains, so that the router need not wait.

    router ── Predict, Learn, Retrain ─▶ standard input ─▶ all orders so far ─▶ LengthModel
           ◀── Predicted ───────────── standard output ◀────────────┘
                                                training, step by step, while no order comes

The process ends when its input ends; before that it saves what it has learnt.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from alignedserve.protocol.commands import Learn, Predict
from alignedserve.protocol.events import Predicted
from alignedserve.router.prediction.predictor import HashEncoder, LengthModel
from alignedserve.router.side.frames import PredictorOrder, answer, read

log = logging.getLogger("alignedserve.predictor")

MOST_TOGETHER = 64  # predictions in one pass


class Service:
    """The work of the process, apart from its pipes. It saves what it has learnt at `path`, if one is given."""

    def __init__(self, model: LengthModel, path: Path | None) -> None:
        self._model, self._path = model, path
        if path is not None:
            model.load(path)

    def perform(self, orders: Sequence[PredictorOrder]) -> list[Predicted]:
        """Perform the orders one after the other; predictions that follow each other are made together."""
        answers: list[Predicted] = []
        together: list[Predict] = []
        for order in orders:
            if isinstance(order, Predict):
                together.append(order)
                continue
            answers += self._predict(together)
            together = []
            if isinstance(order, Learn):
                self._model.learn([order.sketch], [order.num_prompt], [order.num_output])
            else:
                self._model.fit()
                self.save()
        return answers + self._predict(together)

    def _predict(self, together: Sequence[Predict]) -> list[Predicted]:
        answers: list[Predicted] = []
        for start in range(0, len(together), MOST_TOGETHER):
            batch = together[start : start + MOST_TOGETHER]
            estimates = self._model.predict([order.sketch for order in batch], [order.num_prompt for order in batch])
            answers += [
                Predicted(order.request, order.attempt, estimate)
                for order, estimate in zip(batch, estimates, strict=True)
                if estimate is not None
            ]
        return answers

    def save(self) -> None:
        """Save what was learnt. Where the disk is full or read only, the process goes on with what it has learnt."""
        if self._path is None or not len(self._model.past):
            return
        try:
            self._model.save(self._path)
        except OSError as error:
            log.warning("the lengths that were learnt cannot be saved for the next start: %s", error)


def serve(service: Service, arrived: queue.SimpleQueue[PredictorOrder | None], output: BinaryIO) -> None:
    """Perform orders as they arrive, until None arrives."""
    while True:
        orders, is_over = _drain(arrived.get(), arrived)
        answers = b"".join(map(answer, service.perform(orders)))
        if answers:
            try:
                output.write(answers)
                output.flush()
            except BrokenPipeError:  # the router was killed: what was learnt is saved all the same
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        if is_over:
            return service.save()


def _drain(
    first: PredictorOrder | None, arrived: queue.SimpleQueue[PredictorOrder | None]
) -> tuple[list[PredictorOrder], bool]:
    """Return every order that has arrived so far, and whether the end has."""
    orders: list[PredictorOrder] = []
    order = first
    while order is not None:
        orders.append(order)
        try:
            order = arrived.get_nowait()
        except queue.Empty:
            return orders, False
    return orders, True


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else None
    arrived: queue.SimpleQueue[PredictorOrder | None] = queue.SimpleQueue()

    def listen() -> None:
        for order in read(sys.stdin.buffer):
            arrived.put(order)
        arrived.put(None)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    serve(Service(LengthModel(HashEncoder()), path), arrived, sys.stdout.buffer)


if __name__ == "__main__":
    main()
