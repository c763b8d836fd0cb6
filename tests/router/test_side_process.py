"""The side process: messages through its pipes, predictions in batches, fits, and another life of it."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from alignedserve.core import Estimate, Sketch
from alignedserve.protocol.commands import Learn, Predict, Retrain
from alignedserve.protocol.events import Event, Predicted
from alignedserve.router.prediction.predictor import HashEncoder, LengthModel, Vectors
from alignedserve.router.side.frames import PredictorOrder, answer, frames, read, write
from alignedserve.router.side.hands import SideProcess
from alignedserve.router.side.process import Service, serve
from alignedserve.scheduling.sketch import sketch_of

PATIENCE_S = 60.0
DRAW = Random(0)
PAST = [Learn(sketch_of(DRAW.choices(range(500), k=20)), 20, 1 + number) for number in range(30)]

ORDERS_OF_PAST: list[PredictorOrder] = [*PAST, Retrain()]


def asked(number: int, words: Sequence[int] = (1, 2, 3)) -> Predict:
    return Predict(f"r{number}", 0, sketch_of(words), len(words))


ORDERS: list[PredictorOrder] = [*PAST[:3], asked(1), Retrain(), Predict("x", 2, Sketch(b"counts"), 9)]


def test_orders_come_back_as_they_were() -> None:
    assert list(read(io.BytesIO(b"".join(map(write, ORDERS))))) == ORDERS


def test_a_frame_that_is_cut_ends_it() -> None:
    assert list(read(io.BytesIO(b"".join(map(write, ORDERS))[:-1]))) == ORDERS[:-1]
    assert list(read(io.BytesIO(b"\x01"))) == []


def test_an_answer_names_its_request() -> None:
    said = answer(Predicted("r", 3, Estimate(5, 9)))
    assert list(frames(io.BytesIO(said))) == [["r", 3, 5, 9]]


class _Counting(HashEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        self.sizes.append(len(sketches))
        return super().vectors(sketches)


def served(service: Service, *orders: PredictorOrder) -> list[list[object]]:
    arrived: queue.SimpleQueue[PredictorOrder | None] = queue.SimpleQueue()
    for order in (*orders, None):
        arrived.put(order)
    said = io.BytesIO()
    serve(service, arrived, said)
    return list(frames(io.BytesIO(said.getvalue())))


def test_predictions_that_have_come_together_are_made_together() -> None:
    encoder = _Counting()
    service = Service(LengthModel(encoder), None)
    service.perform([*PAST, Retrain()])
    encoder.sizes.clear()
    said = served(service, asked(1), asked(2), asked(3), PAST[0], asked(4))
    assert [answer[0] for answer in said] == ["r1", "r2", "r3", "r4"]
    assert encoder.sizes == [3, 1, 1]


def test_what_was_learnt_is_saved_where_the_router_was_killed_and_nothing_is_said(tmp_path: Path) -> None:
    saved, (reads, writes) = tmp_path / "learnt", os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "alignedserve.router.side.process", str(saved)]
    later = Learn(sketch_of([600, 601]), 2, 7)
    orders = b"".join(map(write, [*ORDERS_OF_PAST, asked(1), later]))
    done = subprocess.run(command, input=orders, stdout=writes, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")
    model = LengthModel(HashEncoder())
    model.load(saved)
    assert len(model.past) == len(PAST) + 1


def test_what_is_not_known_is_not_answered() -> None:
    assert served(Service(LengthModel(HashEncoder()), None), asked(1)) == []


def test_orders_after_a_fit_are_answered_by_it() -> None:
    service = Service(LengthModel(HashEncoder()), None)
    [answer] = service.perform([*PAST, asked(1), Retrain(), asked(2)])
    assert answer.request == "r2"


def test_what_was_learnt_is_kept_and_fitted_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "kept.npz"
    served(Service(LengthModel(HashEncoder()), path), *PAST)
    model = LengthModel(HashEncoder())
    assert served(Service(model, path), asked(1))
    assert len(model.past) == len(PAST)


def test_where_nothing_can_be_kept_it_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    service = Service(LengthModel(HashEncoder()), tmp_path / "file" / "kept.npz")
    said = served(service, *PAST, Retrain(), asked(1))
    assert [answer[0] for answer in said] == ["r1"]
    assert "cannot be saved" in caplog.text


class TestProcess:
    @pytest.fixture
    def said(self) -> queue.Queue[Event]:
        return queue.Queue()

    @pytest.fixture
    def side(self, said: queue.Queue[Event], tmp_path: Path) -> Iterator[SideProcess]:
        process = SideProcess(tmp_path / "kept.npz")
        process.start(said.put)
        yield process
        process.stop()

    def test_it_answers_and_keeps_what_it_has_learnt(
        self, side: SideProcess, said: queue.Queue[Event], tmp_path: Path
    ) -> None:
        for order in [*ORDERS_OF_PAST, asked(1)]:
            assert side.perform(order) is None
        answer = said.get(timeout=PATIENCE_S)
        assert isinstance(answer, Predicted)
        assert (answer.request, answer.attempt) == ("r1", 0)
        side.stop()
        model = LengthModel(HashEncoder())
        model.load(tmp_path / "kept.npz")
        assert len(model.past) == len(PAST)

    def test_another_life_has_what_was_kept(self, side: SideProcess, said: queue.Queue[Event]) -> None:
        for order in [*ORDERS_OF_PAST, asked(1)]:
            side.perform(order)
        said.get(timeout=PATIENCE_S)
        pid = side.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for number in range(2, 10_000):  # requests to the first life are lost
            side.perform(asked(number))
            try:
                answer = said.get(timeout=0.2)
            except queue.Empty:
                continue
            if side.pid != pid:
                break
        assert isinstance(answer, Predicted)
        assert side.pid != pid
