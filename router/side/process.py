"""The router's side process: embeds prompts, searches past ones and trains, so that the router itself need not wait.

    router ── Predict, Learn, Retrain ─▶ standard input ─▶ all that has come ─▶ LengthModel
           ◀── Predicted ───────────── standard output ◀────────────┘
                                                training, step by step, while nothing comes

It ends when its input does: before that it keeps what it has learnt.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from alignedserve.protocol.commands import Learn, Predict
from alignedserve.protocol.events import Predicted
from alignedserve.router.prediction.predictor import Encoder, HashEncoder, LengthModel
from alignedserve.router.side.frames import Asked, answer, read
from alignedserve.scheduling.policy import Predictor

log = logging.getLogger("alignedserve.predictor")

MOST_TOGETHER = 64  # predictions of one pass


class Service:
    """What the process does, apart from its pipes. `path` is where it keeps what it has learnt, if anywhere."""

    def __init__(self, model: LengthModel, path: Path | None) -> None:
        self._model, self._path = model, path
        self._training: Iterator[None] | None = None
        if path is not None:
            model.load(path)
        if len(model.past):
            self._training = model.train()

    @property
    def is_training(self) -> bool:
        return self._training is not None

    def train_a_little(self) -> None:
        if self._training is not None and next(self._training, self) is self:
            self._training = None

    def do(self, asked: Sequence[Asked]) -> list[Predicted]:
        """In their order, but all predictions of a run of them together."""
        answers: list[Predicted] = []
        together: list[Predict] = []
        for one in asked:
            if isinstance(one, Predict):
                together.append(one)
                continue
            answers += self._predict(together)
            together = []
            if isinstance(one, Learn):
                self._model.learn([one.sketch], [one.num_prompt], [one.num_output])
            else:
                self._training = self._model.train()
                self.keep()
        return answers + self._predict(together)

    def _predict(self, together: Sequence[Predict]) -> list[Predicted]:
        answers: list[Predicted] = []
        for start in range(0, len(together), MOST_TOGETHER):
            some = together[start : start + MOST_TOGETHER]
            said = self._model.predict([one.sketch for one in some], [one.num_prompt for one in some])
            answers += [
                Predicted(one.request, one.attempt, estimate)
                for one, estimate in zip(some, said, strict=True)
                if estimate is not None
            ]
        return answers

    def keep(self) -> None:
        """Where that cannot be, as on a disk that is full or read only, this life goes on with what it has learnt."""
        if self._path is None or not len(self._model.past):
            return
        try:
            self._model.save(self._path)
        except OSError as error:
            log.warning("what was learnt of lengths is not kept for the next start: %s", error)


def serve(service: Service, arrived: queue.SimpleQueue[Asked | None], output: BinaryIO) -> None:
    """Until None arrives."""
    while True:
        asked: list[Asked] = []
        is_over = False
        try:
            first = arrived.get(timeout=None if not service.is_training else 0.0)
            asked, is_over = _with_all_that_is_there(first, arrived)
        except queue.Empty:
            service.train_a_little()
            continue
        said = b"".join(map(answer, service.do(asked)))
        if said:
            output.write(said)
            output.flush()
        if is_over:
            return service.keep()


def _with_all_that_is_there(first: Asked | None, arrived: queue.SimpleQueue[Asked | None]) -> tuple[list[Asked], bool]:
    asked: list[Asked] = []
    one = first
    while one is not None:
        asked.append(one)
        try:
            one = arrived.get_nowait()
        except queue.Empty:
            return asked, False
    return asked, True


def encoder_of(predictor: Predictor) -> Encoder:
    if predictor is Predictor.MINILM:
        from alignedserve.router.side.minilm import MiniLM

        return MiniLM()
    return HashEncoder()


def main() -> None:
    predictor, path = Predictor(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None
    arrived: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()

    def listen() -> None:
        for one in read(sys.stdin.buffer):
            arrived.put(one)
        arrived.put(None)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    serve(Service(LengthModel(encoder_of(predictor)), path), arrived, sys.stdout.buffer)


if __name__ == "__main__":
    main()
