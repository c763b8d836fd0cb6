"""Tests of spans in memory that stays: kernels find the step that lies there, and nothing of the step before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import BlockRoom, Lie, Spans, StaticSpans
from alignedserve.kernels.triton.schedule import most_pieces, schedule, tiles_of
from tests.conftest import examples
from tests.rare import rarely

SIZE, BLOCK, BLOCKS = 4, 4, 700
CPU = torch.device("cpu")


def lies_of(seed: int) -> list[Lie]:
    chance = random.Random(seed)
    blocks = chance.sample(range(BLOCKS), BLOCKS)
    lies = []
    for _ in range(SIZE):
        tokens = chance.choice((1, 3, 20, 300, 600))
        own = tuple(blocks.pop() for _ in range(-(-tokens // BLOCK)))
        lies.append(Lie(1, tokens, tuple(~block if chance.random() < 0.3 else block for block in own)))
    return lies


def static(seeds: tuple[int, ...]) -> tuple[StaticSpans, Spans]:
    """Return spans in which all these steps were placed in turn, and fresh spans of the last step."""
    spans = StaticSpans(SIZE, BLOCK, BlockRoom(BLOCKS, CPU))
    for seed in seeds:
        spans.place(lies_of(seed))
    return spans, Spans(lies_of(seeds[-1]), BLOCK)


def test_places_are_those_of_the_last_step() -> None:
    spans, own = static((1, 2, 3))
    assert torch.equal(spans.positions, own.positions)
    assert torch.equal(spans.new_slots, own.new_slots)
    for span in range(SIZE):
        assert torch.equal(spans.slots(span), own.slots(span))


@pytest.mark.parametrize("lies", [lies_of(1)[1:], [Lie(2, 2, (1,)), *lies_of(1)[1:]]], ids=["fewer", "two tokens"])
def test_another_number_of_requests_or_tokens_is_refused(lies: list[Lie]) -> None:
    with pytest.raises(ValueError, match="do not fit 4 places"):
        StaticSpans(SIZE, BLOCK, BlockRoom(BLOCKS, CPU)).place(lies)


def test_more_blocks_than_there_are_places_for_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks do not fit 5 places"):
        StaticSpans(SIZE, BLOCK, BlockRoom(5, CPU)).place([Lie(1, 8, (0, 1))] * SIZE)


@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=40),
    room=st.integers(0, 600),
    window=st.sampled_from((None, 100)),
)
@settings(deadline=None, max_examples=examples(60))
def test_there_are_never_more_pieces_than_were_provided_for(lengths: list[int], room: int, window: int | None) -> None:
    spans = Spans([Lie(1, length, range(-(-length // 512))) for length in lengths], 512)
    planned = schedule(tiles_of(spans, 1, Scoring(1.0, window), decodes=True), room)
    assert len(planned.pieces) <= most_pieces(len(lengths), room)
    assert planned.num_partials <= most_pieces(len(lengths), room)
    assert len(planned.merges) <= len(lengths)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "scoring", [*map(rarely, (Scoring(0.25), Scoring(0.25, 100))), Scoring(0.25, 100, 2.0, torch.arange(4.0))]
)
def test_the_triton_kernels_attend_to_the_last_step(scoring: Scoring) -> None:
    """The launch has as many pieces as possible, most of which do nothing; attention is split and not."""
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    if not pytest.importorskip("alignedserve.kernels.triton.launch").interpreting():
        pytest.skip("Triton compiles here: tests/gpu has real graphs")
    triton, reference = kernels.TritonKernels(), Reference()
    generator = torch.Generator().manual_seed(3)
    spans = StaticSpans(SIZE, BLOCK, BlockRoom(BLOCKS, CPU))
    for seed in (5, 6):
        spans.place(lies_of(seed))
        own = Spans(lies_of(seed), BLOCK)
        cache = torch.full((2 * BLOCKS, BLOCK, 32), torch.nan)
        for span in range(SIZE):
            for each in (own.slots(span), own.slots(span) + BLOCK):
                cache.view(-1, 32)[each] = torch.randn(len(each), 32, generator=generator)
        k, v = torch.randn(2, SIZE, 32, generator=generator)
        query = torch.randn(SIZE, 4, 16, generator=generator)
        expected = cache.clone()
        triton.write(cache, spans, k, v)
        reference.write(expected, own, k, v)
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num())
        found = triton.attend(query, cache, spans, scoring)
        torch.testing.assert_close(found, reference.attend(query, expected, own, scoring), rtol=0, atol=1e-5)
