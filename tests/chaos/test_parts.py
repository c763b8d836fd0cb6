"""Tests of which parts a trial hurts: never those that the launcher would give up for it."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos import parts
from tests.chaos.parts import RESTED_S, Parts

START = "python -m alignedserve.launch.start "


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(parts, "time", made)
    return made


def test_parts_of_both_launchers_are_found_and_nothing_else(clock: Clock) -> None:
    titles = [
        f"{START}router",
        "ray::decode-0.run()",
        "ray::gateway-0",
        "ray::IDLE",
        "python -m alignedserve serve demo",
    ]
    found = Parts(lambda: dict(enumerate(titles, start=1)))
    clock.now = RESTED_S + 1
    assert {found.choose(Random(seed)) for seed in range(50)} == {("router", 1), ("decode-0", 2), ("gateway-0", 3)}
    assert found.choose(Random(1), ("pool",)) is None


def test_a_part_is_hurt_early_once_and_then_rests(clock: Clock) -> None:
    running = {1: f"{START}decode-0", 2: f"{START}decode-0-rank-1"}
    found, draw = Parts(lambda: running), Random(1)
    early = [found.choose(draw) for _ in range(200)]
    assert sum(chosen is not None for chosen in early) == 1, "both ranks are one worker"
    running = {3: f"{START}decode-0", 2: f"{START}decode-0-rank-1"}
    found.look()
    clock.now = RESTED_S + 1
    assert found.choose(draw) is not None
    assert found.was_hurt("decode", RESTED_S, RESTED_S + 2)
    assert not found.was_hurt("gateway", 0.0, RESTED_S + 2)


def test_a_worker_whose_rank_has_just_come_back_is_not_rested(clock: Clock) -> None:
    running = {1: f"{START}decode-0", 2: f"{START}decode-0-rank-1"}
    found, draw = Parts(lambda: running), Random(1)
    while found.choose(draw) is None:
        pass
    clock.now = RESTED_S + 1
    running = {1: f"{START}decode-0", 3: f"{START}decode-0-rank-1"}
    assert {found.choose(draw) for _ in range(200)} == {None}
