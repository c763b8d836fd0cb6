"""Steps become smaller where memory is too little, and large again with time."""

from __future__ import annotations

from alignedserve.worker.pace import StepRoom


def test_half_of_what_failed_and_no_less_than_one() -> None:
    room = StepRoom(512)
    assert room.shrink(300)
    assert room.tokens == 150
    assert room.shrink(150)
    assert room.tokens == 75
    assert room.shrink(3)
    assert room.tokens == 1
    assert not room.shrink(1)
    assert room.tokens == 1


def test_it_grows_back_slowly_and_no_further_than_it_was() -> None:
    room = StepRoom(512)
    room.shrink(300)
    seen = []
    for _ in range(100):
        room.grow()
        seen.append(room.tokens)
    assert seen == [150] * 15 + [300] * 16 + [512] * 69


def test_a_failure_begins_the_count_anew() -> None:
    room = StepRoom(64)
    room.shrink(64)
    for _ in range(15):
        room.grow()
    room.shrink(32)
    for _ in range(15):
        room.grow()
    assert room.tokens == 16
