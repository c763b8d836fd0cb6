"""Tests of spans in memory that stays: kernels find the step that lies there, and nothing of the step before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.placing import StepInputs, StepMemory
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.triton.schedule import (
    most_partials,
    most_pieces,
    most_tiles,
    schedule,
    tiles_of,
)
from tests.conftest import examples
from tests.rare import rarely

BLOCK, BLOCKS = 4, 700
CPU = torch.device("cpu")
DECODES, WITH_PROMPTS = StepSize(4, 4), StepSize(40, 4, 3)


def lies_of(size: StepSize, seed: int) -> list[QuerySpan]:
    """Return a step that fills a size, some of whose requests have blocks that are filled from the right."""
    chance = random.Random(seed)
    blocks = chance.sample(range(BLOCKS), BLOCKS)
    queries = [1] * size.rows if not size.chunks else [1] * chance.randint(0, size.decodes)
    while size.chunks and (left := size.rows - sum(queries)):
        is_last = len(queries) == queries.count(1) + size.chunks - 1
        queries.append(left if is_last or left < 4 else chance.randint(2, left - 2))
    lies = []
    for count in chance.sample(queries, len(queries)):
        tokens = count - 1 + chance.choice((1, 3, 20, 300, 600))
        own = tuple(blocks.pop() for _ in range(-(-tokens // BLOCK)))
        lies.append(QuerySpan(count, tokens, tuple(~block if chance.random() < 0.3 else block for block in own)))
    return lies


def static(size: StepSize, seeds: tuple[int, ...]) -> tuple[StaticSpans, Spans]:
    """Return spans in which all these steps were placed in turn, and fresh spans of the last step."""
    spans = StaticSpans(size, lies_of(size, seeds[0]), BLOCK, StepMemory(BLOCKS, 40, CPU))
    for seed in seeds[1:]:
        assert len(spans.rows) > 1, "looked at, so kept"
        spans.place(lies_of(size, seed))
    return spans, Spans(lies_of(size, seeds[-1]), BLOCK)


@pytest.mark.parametrize("size", [DECODES, WITH_PROMPTS])
def test_places_are_those_of_the_last_step(size: StepSize) -> None:
    spans, own = static(size, (1, 2, 3))
    assert len(spans) == len(own)
    for name in ("positions", "new_slots", "rows", "tokens", "starts", "blocks"):
        assert torch.equal(getattr(spans, name), getattr(own, name)), name
    for span in range(len(own)):
        assert torch.equal(spans.slots(span), own.slots(span))


@pytest.mark.parametrize(
    ("size", "lies"),
    [
        (DECODES, lies_of(DECODES, 1)[1:]),
        (DECODES, [QuerySpan(2, 2, (1,)), *lies_of(DECODES, 1)[2:]]),
        (WITH_PROMPTS, [QuerySpan(8, 8, (0, 1))] * 5),
        (WITH_PROMPTS, [QuerySpan(1, 1, (0,))] * 40),
        (WITH_PROMPTS, [QuerySpan(39, 39, range(10))]),
    ],
    ids=["fewer", "two tokens", "chunks", "decodes", "fewer tokens"],
)
def test_what_is_larger_or_smaller_is_refused(size: StepSize, lies: list[QuerySpan]) -> None:
    spans, _ = static(size, (1,))
    with pytest.raises(ValueError, match="do not fit StepSize"):
        spans.place(lies)


def test_more_blocks_than_there_are_places_for_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks do not fit 5 places"):
        StaticSpans(DECODES, [QuerySpan(1, 8, (0, 1))] * 4, BLOCK, StepMemory(5, 40, CPU))


def test_sizes_share_memory_and_a_step_brings_all_of_its_own() -> None:
    memory = StepMemory(5, 1, CPU, table=3)
    few, many = StepInputs(memory), StepInputs(memory)
    tokens, pieces = few.section(3, torch.long), few.section(5, torch.int32)
    others = many.section(40, torch.long)
    for number in (1, 2):
        others.fill([number] * 30, others=9)
        many.send(0)
        assert others.device.tolist() == [number] * 30 + [9] * 10
        tokens.fill([number, 7])
        pieces.host.fill_(number)
        memory.blocks.host[:2] = number
        assert tokens.device.tolist() != [number, 7, 0], "not sent yet"
        few.send(2)
        assert tokens.device.tolist() == [number, 7, 0]
        assert pieces.device.tolist() == [number] * 5
        assert memory.blocks.device.tolist() == [number, number, 0, 0, 0]
    assert all(section.device.data_ptr() % 16 == 0 for section in (tokens, pieces, others))


def test_more_sections_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(RuntimeError, match="take more than"):
        StepInputs(StepMemory(5, 1, CPU)).section(1 << 20, torch.long)


@given(
    queries=st.lists(st.just(1) | st.integers(1, 300), min_size=1, max_size=40),
    before=st.lists(st.integers(0, 40_000), min_size=40, max_size=40),
    room=st.integers(0, 600),
    scoring=st.sampled_from((Scoring(1.0), Scoring(1.0, 100), Scoring(1.0, 64, stretch=64))),
    of_tile=st.sampled_from((1, 2, 4, 16, 64)),
)
@settings(deadline=None, max_examples=examples(100))
def test_there_is_never_more_to_do_than_was_provided_for(
    queries: list[int], before: list[int], room: int, scoring: Scoring, of_tile: int
) -> None:
    lies = [QuerySpan(n, n + more, range(-(-(n + more) // 512))) for n, more in zip(queries, before, strict=False)]
    decodes = queries.count(1)
    size = StepSize(sum(queries), decodes, len(queries) - decodes)
    for is_decodes, most in ((True, 1), (False, of_tile)):
        tiles = [*tiles_of(Spans(lies, 512), most, scoring, decodes=is_decodes)]
        provided = most_tiles(size, most, scoring.stretch, decodes=is_decodes)
        assert len(tiles) <= provided
        planned = schedule(tiles, room)
        assert len(planned.pieces) <= most_pieces(provided, room)
        assert planned.num_partials <= most_partials(provided, room)


SCORINGS = (Scoring(0.25), Scoring(0.25, 100), Scoring(0.25, 100, 2.0, torch.arange(4.0)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("size", "scoring"),
    [
        *(rarely((DECODES, scoring)) for scoring in SCORINGS[:2]),
        (DECODES, SCORINGS[2]),
        (WITH_PROMPTS, SCORINGS[0]),
        *(rarely((WITH_PROMPTS, scoring)) for scoring in (*SCORINGS[1:], Scoring(0.25, 16, stretch=16))),
    ],
)
def test_the_triton_kernels_attend_to_the_last_step(size: StepSize, scoring: Scoring) -> None:
    """The launch has as many pieces as possible, most of which do nothing; attention is split and not."""
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    if not pytest.importorskip("alignedserve.kernels.triton.launch").interpreting():
        pytest.skip("Triton compiles here: tests/gpu has real graphs")
    triton, reference = kernels.TritonKernels(), Reference()
    generator = torch.Generator().manual_seed(3)
    spans, _ = static(size, (4,))
    for seed in (5, 6):
        lies = lies_of(size, seed)
        spans.place(lies)
        own = Spans(lies, BLOCK)
        cache = torch.full((2 * BLOCKS, BLOCK, 32), torch.nan)
        for span in range(len(own)):
            for each in (own.slots(span), own.slots(span) + BLOCK):
                cache.view(-1, 32)[each] = torch.randn(len(each), 32, generator=generator)
        k, v = torch.randn(2, size.rows, 32, generator=generator)
        query = torch.randn(size.rows, 4, 16, generator=generator)
        expected = cache.clone()
        triton.write(cache, spans, k, v)
        reference.write(expected, own, k, v)
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num())
        found = triton.attend(query, cache, spans, scoring)
        torch.testing.assert_close(found, reference.attend(query, expected, own, scoring), rtol=0, atol=1e-5)
