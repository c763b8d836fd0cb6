"""Lengths of outputs, predicted by those of similar prompts: how good and how sure they are, and when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Estimate, Request
from alignedserve.router.lengths import MOST_KEPT, OutputLengths
from alignedserve.scheduling.lengths import LEAST_ENDED, SPREAD
from alignedserve.scheduling.sketch import sketch_of
from tests.samples import request

KINDS = {"short": (100, 10), "middle": (200, 60), "long": (300, 400)}  # first word of its prompts, and mean of outputs
ASKED = replace(request("a", max_tokens=4000), stop_tokens=(1,))


def drawn(draw: Random) -> tuple[tuple[int, ...], int]:
    """Draw a prompt of some kind, and its output length: from a half to twice the mean of the kind."""
    word, length = draw.choice(list(KINDS.values()))
    prompt = [word + number for number in range(8)] * 2 + draw.choices(range(1000, 9000), k=draw.randint(4, 12))
    return tuple(prompt), max(1, round(length * 2 ** draw.uniform(-1, 1)))


def said(lengths: OutputLengths, prompt: Sequence[int], asked: Request = ASKED) -> Estimate | None:
    return lengths.opened(asked, sketch_of(prompt))


def teach(lengths: OutputLengths, prompt: Sequence[int], length: int) -> Estimate | None:
    found = said(lengths, prompt)
    lengths.ended(ASKED, length)
    lengths.closed(ASKED.id)
    return found


def taught(count: int, seed: int = 0) -> OutputLengths:
    draw, lengths = Random(seed), OutputLengths()
    for _ in range(count):
        teach(lengths, *drawn(draw))
    return lengths


def test_prompts_are_predicted_by_those_that_are_like_them() -> None:
    lengths, draw = taught(300), Random("new")
    asked = [drawn(draw) for _ in range(300)]
    found = [found.mean for prompt, _ in asked if (found := said(lengths, prompt)) is not None]
    error = mean(abs(each - length) for each, (_, length) in zip(found, asked, strict=True))
    of_all = mean(length for _, length in asked)
    assert error < 0.5 * mean(abs(length - of_all) for _, length in asked)


@pytest.mark.parametrize("longer", [1, 4])
def test_nine_of_ten_are_no_longer_than_the_upper_value_also_after_a_change(longer: int) -> None:
    lengths, draw = taught(400), Random("upper")
    asked = [(prompt, longer * length) for prompt, length in (drawn(draw) for _ in range(600))]
    found = [(teach(lengths, *each), each[1]) for each in asked][300:]
    covered = mean(estimate is not None and length <= estimate.upper for estimate, length in found)
    assert 0.84 <= covered <= 0.96


def test_a_prompt_that_came_before_is_what_came_of_it() -> None:
    lengths, prompt = taught(100), (7, 7, 8, 9, 100, 11)
    for length in (900, 1000, 1100):
        teach(lengths, prompt, length)
    found = said(lengths, prompt)
    assert found is not None
    assert found.mean == 1000


def test_nothing_is_said_before_some_outputs_have_ended() -> None:
    lengths = OutputLengths()
    for number in range(LEAST_ENDED):
        assert teach(lengths, (number,), 10) is None
    assert said(lengths, (500, 600)) == Estimate(10, SPREAD * 10)


def test_prompts_that_tell_nothing_are_all_predicted_alike() -> None:
    lengths, draw = OutputLengths(), Random("useless")
    for _ in range(200):
        prompt, _ = drawn(draw)
        teach(lengths, prompt, draw.choice((10, 60, 400)))
    found = {said(lengths, drawn(draw)[0]) for _ in range(50)}
    assert len(found) == 1


def test_an_old_prompt_makes_room_for_a_new_one() -> None:
    lengths = OutputLengths()
    for length in (10, *[50] * MOST_KEPT):
        teach(lengths, (1, 2, 3) if length == 10 else (4, 5, 6), length)
    found = said(lengths, (1, 2, 3))
    assert found is not None
    assert found.mean == 50


@pytest.mark.parametrize(
    ("num_output", "estimate", "learnt"),
    [(50, Estimate(60, 90), False), (50, Estimate(50, 90), True), (50, None, True), (0, None, False)],
)
def test_what_was_cut_off_sooner_than_predicted_teaches_nothing(
    num_output: int, estimate: Estimate | None, learnt: bool
) -> None:
    lengths, asked = OutputLengths(), replace(ASKED, max_tokens=50, estimate=estimate)
    for _ in range(LEAST_ENDED):
        said(lengths, (1, 2), asked)
        lengths.ended(asked, num_output)
        lengths.closed(asked.id)
    assert (said(lengths, (1, 2)) is not None) == learnt


def test_an_output_of_one_length_alone_neither_tells_nor_teaches() -> None:
    lengths, asked = taught(20), replace(ASKED, stop_tokens=())
    assert said(lengths, (1, 2), asked) is None
    assert lengths.num_open == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 9000)), max_size=40))
def test_an_estimate_is_at_least_a_token_and_no_more_than_its_upper_value(ended: list[tuple[list[int], int]]) -> None:
    lengths = OutputLengths()
    for prompt, length in ended:
        found = teach(lengths, prompt, length)
        assert found is None or 1 <= found.mean <= found.upper
    assert lengths.num_open == 0
