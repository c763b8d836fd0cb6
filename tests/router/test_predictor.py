"""Predictions from past outputs: how good and how sure they are, and what is kept over a restart."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from alignedserve.core import Estimate, Sketch
from alignedserve.router.prediction.length import FitTimes
from alignedserve.router.prediction.neighbours import MOST_SEEN
from alignedserve.router.prediction.predictor import LEAST_KNOWN, HashEncoder, LengthModel
from alignedserve.scheduling.sketch import sketch_of

KINDS = {"short": (100, 10), "middle": (200, 60), "long": (300, 400)}  # first word of its prompts, and mean of outputs


def ask(draw: Random) -> tuple[tuple[int, ...], int]:
    """Draw a prompt of some kind, and its output length: from a half to twice the mean of the kind."""
    word, mean = draw.choice(list(KINDS.values()))
    prompt = [word + number for number in range(8)] * 2 + draw.choices(range(1000, 9000), k=draw.randint(4, 12))
    return tuple(prompt), max(1, round(mean * 2 ** draw.uniform(-1, 1)))


def taught(count: int, seed: int = 0, model: LengthModel | None = None) -> LengthModel:
    draw, model, fits = Random(seed), model or LengthModel(HashEncoder()), FitTimes()
    for _ in range(count):
        prompt, length = ask(draw)
        model.learn([sketch_of(prompt)], [len(prompt)], [length])
        if fits.is_due():
            model.fit()
    model.fit()
    return model


def said(model: LengthModel, *prompts: tuple[int, ...]) -> list[Estimate | None]:
    return model.predict([sketch_of(prompt) for prompt in prompts], [len(prompt) for prompt in prompts])


@pytest.fixture(scope="module")
def model() -> LengthModel:
    return taught(600)


def test_new_prompts_are_predicted_by_their_like(model: LengthModel) -> None:
    draw = Random("new")
    asked = [ask(draw) for _ in range(300)]
    found = [estimate for estimate in said(model, *(prompt for prompt, _ in asked)) if estimate is not None]
    error = np.mean([abs(estimate.mean - length) for estimate, (_, length) in zip(found, asked, strict=True)])
    assert error < 0.5 * np.mean([abs(length - np.mean([length for _, length in asked])) for _, length in asked])


def test_nine_of_ten_are_no_longer_than_the_upper_estimate(model: LengthModel) -> None:
    draw = Random("upper")
    asked = [ask(draw) for _ in range(500)]
    found = [estimate for estimate in said(model, *(prompt for prompt, _ in asked)) if estimate is not None]
    covered = np.mean([length <= estimate.upper for estimate, (_, length) in zip(found, asked, strict=True)])
    assert 0.84 <= covered <= 0.96


def test_a_prompt_that_came_before_is_what_came_of_it() -> None:
    model = taught(100)
    prompt = (7, 7, 8, 9, 100, 11)
    for length in (900, 1000, 1100):
        model.learn([sketch_of(prompt)], [len(prompt)], [length])
    [found] = said(model, prompt)
    assert found is not None
    assert found.mean == 1000


def test_nothing_is_said_before_the_first_fit() -> None:
    model = LengthModel(HashEncoder())
    assert said(model, (1, 2)) == [None]
    for number in range(LEAST_KNOWN):
        model.fit()
        assert said(model, (1, 2)) == [None]
        model.learn([sketch_of((number,))], [1], [10])
    model.fit()
    assert said(model, (1, 2)) == [Estimate(10, 20)]


def test_the_same_is_said_again() -> None:
    """Predictions are equal byte for byte, whether requested singly or together."""
    draw = Random("again")
    prompts = [ask(draw)[0] for _ in range(50)]
    together = said(taught(300), *prompts)
    one_by_one = taught(300)
    assert together == [found for prompt in prompts for found in said(one_by_one, prompt)]


class TestRestart:
    def test_what_was_learnt_is_there_again(self, model: LengthModel, tmp_path: Path) -> None:
        model.save(tmp_path / "folder" / "kept.npz")
        assert (tmp_path / "folder" / "kept.npz").stat().st_mode & 0o777 == 0o600
        again = LengthModel(HashEncoder())
        again.load(tmp_path / "folder" / "kept.npz")
        assert len(again.past) == len(model.past)
        for name in ("num_prompt", "num_seen", "total", "last"):
            mine, its = getattr(again.past, name)[: len(again.past)], getattr(model.past, name)[model.past.in_order()]
            assert mine.tolist() == its.tolist()
        assert again.past.vectors.tobytes() == model.past.vectors[model.past.in_order()].tobytes()
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept.npz"]

    def test_it_predicts_at_once_as_well_as_before(self, model: LengthModel, tmp_path: Path) -> None:
        model.save(tmp_path / "kept.npz")
        again = LengthModel(HashEncoder())
        again.load(tmp_path / "kept.npz")
        prompts = [ask(Random(number))[0] for number in range(40)]
        before, after = (
            np.array([each.mean for each in said(of, *prompts) if each is not None]) for of in (model, again)
        )
        assert np.corrcoef(np.log(before), np.log(after))[0, 1] > 0.95

    def test_a_file_that_is_not_there_is_no_news(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = LengthModel(HashEncoder())
        model.load(tmp_path / "none.npz")
        assert not len(model.past)
        assert not caplog.records

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(b"no zip at all"),
            lambda path: path.write_bytes(path.read_bytes()[:-200]),
            lambda path: path.write_bytes(path.read_bytes().replace(b"lengths", b"breadth")),
            lambda path: np.savez(path, format=np.array([99, 512])),
            lambda path: np.savez(path, format=np.array([1, 384]), vectors=np.zeros((1, 384), np.int8), lengths=0),
            lambda path: np.savez(
                path, format=np.array([1, 512]), vectors=np.zeros((1, 3), np.int8), lengths=np.ones((4, 1), np.int64)
            ),
            lambda path: np.savez(
                path, format=np.array([1, 512]), vectors=np.zeros((1, 512), np.int8), lengths=np.zeros((4, 1), np.int64)
            ),
            lambda path: np.savez(path, format=np.array([object()], dtype=object), vectors=0, lengths=0),
        ],
        ids=["empty", "text", "cut", "renamed", "format", "encoder", "shape", "zero", "pickled"],
    )
    def test_a_file_that_is_broken_is_passed_over(
        self, spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "kept.npz"
        taught(20).save(path)
        spoil(path)
        model = LengthModel(HashEncoder())
        with caplog.at_level(logging.WARNING):
            model.load(path)
        assert not len(model.past)
        assert "the predictor ignores" in caplog.text
        taught(20, model=model)
        assert len(model.past) == 20


def test_it_is_of_bounded_size() -> None:
    model = taught(300, model=LengthModel(HashEncoder(), capacity=100))
    assert len(model.past) == 100
    assert said(model, (1, 2, 3))[0] is not None


def test_fitting_takes_no_more_memory_where_prompts_came_often() -> None:
    """A prompt counts as often as it came, but is looked up once."""
    draw, model = Random("often"), LengthModel(HashEncoder())
    for _ in range(800):
        prompt, length = ask(draw)
        vector = np.frombuffer(sketch_of(prompt).counts, np.int8)
        model.past.restore(vector, len(prompt), MOST_SEEN, MOST_SEEN * length, length)
    tracemalloc.start()
    model.fit()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6


def test_an_encoder_of_other_dimensions() -> None:
    model = LengthModel(HashEncoder(4))
    for number in range(1, 20):
        model.learn([Sketch(bytes((number, 1, 0, 0)))], [1], [number])
    model.fit()
    assert model.predict([Sketch(bytes((19, 1, 0, 0)))], [1])[0] is not None
