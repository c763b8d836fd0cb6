"""Tests that another key's flood hardly moves the first tokens of chats, simulated: on a CPU, whose steps can pause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from alignedserve.lab.benchmarks.floods import CPU, GUESTS, first_token_ms, flood_of, runs
from alignedserve.lab.benchmarks.hostile import MOST_TIMES
from alignedserve.lab.loads.figures.request_figures import finished
from tests.rare import rare

SEEDS: Sequence[int] = [0]


@rare
@pytest.mark.parametrize(("flood", "keys"), [("sessions", 1), ("long_prompts", 1), ("documents", 1), ("chats", 2)])
def test_first_tokens_of_chats_hardly_move(flood: str, keys: int, tmp_path: Path) -> None:
    alone = runs(tmp_path, CPU, SEEDS, GUESTS)
    beside = runs(tmp_path, CPU, SEEDS, GUESTS, *flood_of(flood, keys))
    assert len(finished(beside[0].guests)) == len(beside[0].guests)
    assert beside[0].tokens_s > 0
    assert first_token_ms(beside) <= MOST_TIMES * first_token_ms(alone)
