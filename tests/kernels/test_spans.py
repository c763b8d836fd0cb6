"""Tests of where vectors lie: kernels/common/reference.py draws it, and every kernel counts on it."""

from __future__ import annotations

import torch

from alignedserve.kernels.common import spans
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans


def slots(blocks: tuple[int, ...], tokens: int, block_size: int) -> list[int]:
    of_one: list[int] = Spans([QuerySpan(1, tokens, blocks)], block_size).slots(0).tolist()
    return of_one


def test_k_slots_are_those_of_the_even_halves_in_the_order_of_the_blocks() -> None:
    assert slots((1, 0, 5), 12, 4) == [8, 9, 10, 11, 0, 1, 2, 3, 40, 41, 42, 43]
    assert slots((3, 2), 2, 1) == [6, 4]


def test_a_block_that_is_filled_from_the_right_has_its_first_token_at_the_right_end() -> None:
    assert slots((1, ~0), 6, 4) == [8, 9, 10, 11, 3, 2]


def test_blocks_are_those_of_now_whatever_was_there_before() -> None:
    same, changed = (4, 7), [4, 7]
    for _ in range(2):
        assert slots(same, 2, 1) == [8, 14]
    assert Spans([QuerySpan(1, 2, changed)], 1).blocks.tolist() == [4, 7]
    changed[1] = 9
    assert Spans([QuerySpan(1, 2, changed)], 1).blocks.tolist() == [4, 9]
    for first in range(1000):  # tuples come and go, and so do their ids
        assert Spans([QuerySpan(1, 1, (first, first + 1))], 1).blocks.tolist() == [first]
    assert len(spans._arrays) <= 100


def test_a_window_or_a_stretch_says_which_token_a_query_sees_first() -> None:
    places = range(9)
    assert [Scoring(1.0).first_seen(place) for place in places] == [0] * 9
    assert [Scoring(1.0, window=4).first_seen(place) for place in places] == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert [Scoring(1.0, stretch=4).first_seen(place) for place in places] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert [Scoring(1.0, 2, stretch=4).first_seen(place) for place in places] == [0, 0, 1, 2, 4, 4, 5, 6, 8]


def test_k_lies_in_the_even_half_of_a_block_and_v_in_the_odd() -> None:
    block_size, kv_dim = 4, 2
    cache = torch.zeros(6, block_size, kv_dim)
    k = torch.arange(1.0, 6.0)[:, None].expand(5, kv_dim)
    Reference().write(cache, Spans([QuerySpan(5, 5, (2, 0))], block_size), k, -k)
    assert cache[4, :, 0].tolist() == [1, 2, 3, 4]
    assert cache[0, :, 0].tolist() == [5, 0, 0, 0]
    assert torch.equal(cache[1::2], -cache[::2])
    assert not cache[2:4].any(), "nothing was written to the block between"
