"""Tests of the Triton kernels in Triton's interpreter, without a GPU, against the reference on random shapes.

The interpreter widens bf16 before it computes, since numpy has none, and cuts off where a GPU rounds. On a
GPU, tests/gpu holds the same kernels to narrower bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.engine.forms.int8_pages import Int8Pages
from alignedserve.kernels.common.decoder import Heads, Norm
from alignedserve.kernels.common.int8_kv import dequantise_vectors
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.dispatch.probing import broken, replace
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from alignedserve.kernels.triton.schedule import LEAST_SPLIT, Tile, schedule
from tests.conftest import SOAK
from tests.gpu.cases import compressed
from tests.kernels.samples import packed, rounding, strided, threads
from tests.kernels.test_attention import BOUNDS as OF_NATIVE
from tests.kernels.test_attention import Case, Shape
from tests.kernels.test_attention import check as check_attention
from tests.kernels.test_copies import anything, bits, block_slots
from tests.kernels.test_int8_kv import EXTREMES
from tests.kernels.test_int8_kv import check as check_int8
from tests.kernels.test_latent_attention import Latent
from tests.kernels.test_latent_attention import check as check_latent
from tests.rare import rare, rarely, thinned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each case in one of the types, in turn; the long form has each in all.
DRAWN = [*product(range(300), DTYPES)] if SOAK else thinned(zip(range(6), 2 * DTYPES, strict=True), usual=3)
# The bounds of tests/kernels/test_attention.py, but fp16 rounds the weights too before it sums V by them.
BOUNDS = {**OF_NATIVE, torch.float16: 2 * 2**-11 + 1e-5}
KERNELS, REFERENCE = TritonKernels(), Reference()
EPS = 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of numbers that are masked or spoilt on purpose
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    shape = Shape(
        kv_heads=chance.choice((1, 2)),
        group=chance.choice((1, 1, 2, 3, 4)),
        head_dim=chance.choice((2, 14, 16, 64, 80)),
        block_size=chance.choice((1, 3, 8, 16, 33)),
        window=chance.choice((None, None, chance.randint(1, 60))),
        softcap=chance.choice((None, None, 2.0)),
        sinks=chance.random() < 0.3,
        stretch=chance.choice((None, None, chance.randint(1, 80))),
    )
    spans = []
    for _ in range(chance.randint(1, 4)):
        queries = chance.choice((1, 1, 2, 17, 70))
        spans.append((queries, queries + chance.randint(0, 90)))
    return Case(shape, tuple(spans), seed)


@pytest.mark.parametrize(("seed", "dtype"), DRAWN)
def test_any_step_attends_as_the_reference_does(seed: int, dtype: torch.dtype) -> None:
    """Places without a token are NaN: a kernel that reads one would show it."""
    check_attention(KERNELS, random_case(seed), dtype, BOUNDS)


@pytest.mark.parametrize(("seed", "dtype"), thinned(zip(range(3), DTYPES, strict=True), usual=1))
def test_k_and_v_in_int8(seed: int, dtype: torch.dtype) -> None:
    check_int8(KERNELS, random_case(seed), dtype)


def test_extremes_in_int8() -> None:
    spans = Spans([QuerySpan(len(EXTREMES), len(EXTREMES), (0,))], 16)
    cache = torch.zeros(2, 16, 8, dtype=torch.int8)
    expected = cache.clone()
    for kernels, its in ((KERNELS, cache), (REFERENCE, expected)):
        kernels.write(its, spans, EXTREMES, EXTREMES.flip(0))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    "case",
    [
        rarely(Case(Shape(1, 1, 16, 16, None), ((1, 1500), (1, 30), (1, 7)), 1)),
        Case(Shape(2, 4, 16, 16, 500), ((1, 1100), (9, 700)), 2),
        rarely(Case(Shape(1, 3, 14, 5, None), ((30, 600), (1, 300)), 3)),
        Case(Shape(1, 2, 16, 16, None, 2.0, True, True), ((30, 600), (1, 1100), (1, 40)), 4),
        rarely(Case(Shape(1, 2, 16, 16, None, stretch=590), ((30, 600), (1, 1100), (90, 1200), (1, 591)), 5)),
    ],
    ids=lambda case: str(case.spans),
)
def test_a_long_request_is_cut_and_put_together(case: Case) -> None:
    check_attention(KERNELS, case, torch.float32)


@pytest.mark.parametrize(("seed", "dtype"), DRAWN)
def test_any_step_attends_to_compressed_vectors_as_to_k_and_v(seed: int, dtype: torch.dtype) -> None:
    """The vector is cut before, after and at its half."""
    chance, case = random.Random(seed), random_case(seed)
    half = chance.choice((2, 14, 16, 40))
    rank = chance.choice((1, half - 1, half, half + 1, 2 * half))
    latent = Latent(half, rank, chance.choice((1, 3, 8, 20)), case.shape.block_size)
    check_latent(KERNELS, latent, latent.case(case.spans[:2], seed), dtype, BOUNDS)


def test_long_requests_with_compressed_vectors_are_cut() -> None:
    latent = Latent(24, 32, 6, 16)
    check_latent(KERNELS, latent, latent.case(((1, 700), (1, 40), (2, 600)), 3), torch.float32, BOUNDS)


@pytest.mark.parametrize("requests", range(1, 6))
def test_the_tables_of_all_steps_have_addresses_of_one_kind(requests: int) -> None:
    """Triton compiles another kernel for an address that is no multiple of 16 bytes: no step may wait for that."""
    spans = Spans([QuerySpan(1, 100 * count + 1, range(300)) for count in range(requests)], 4)
    placed = KERNELS._placed(spans, torch.device("cpu"), 1, Scoring(1.0), decodes=True, kv_heads=1)
    assert placed is not None
    for table in (placed.pieces, placed.counters, placed.blocks):
        assert table.data_ptr() % 16 == 0
    assert len(placed.counters) >= placed.num_partials
    assert not placed.counters.any()
    assert torch.equal(placed.blocks, spans.blocks)


def test_a_step_of_no_requests_attends_to_nothing() -> None:
    spans, cache = Spans([], 16), torch.zeros(2, 16, 64)
    KERNELS.write(cache, spans, torch.empty(0, 64), torch.empty(0, 64))
    assert KERNELS.attend(torch.empty(0, 1, 64), cache, spans, Scoring(1.0)).shape == (0, 1, 64)
    assert not cache.any()


def test_queries_of_any_strides() -> None:
    cache, spans = torch.randn(8, 16, 32), Spans([QuerySpan(20, 50, (3, 0, 1, 2))], 16)
    for query in (torch.randn(2, 20, 16).transpose(0, 1), torch.randn(20, 16, 2).transpose(1, 2)):
        got = KERNELS.attend(query, cache, spans, Scoring(0.25))
        torch.testing.assert_close(got, REFERENCE.attend(query, cache, spans, Scoring(0.25)), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    cache, spans = torch.zeros(2, 16, 64), Spans([QuerySpan(1, 1, (0,))], 16)
    with pytest.raises(TypeError, match="must be the same"):
        KERNELS.attend(torch.zeros(1, 1, 64, dtype=torch.bfloat16), cache, spans, Scoring(1.0))
    with pytest.raises(TypeError, match="must be the same"):
        KERNELS.write(cache, spans, torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="do not divide"):
        KERNELS.attend(torch.zeros(1, 3, 32), cache, spans, Scoring(1.0))


def test_pieces_are_about_equal_and_cover_every_token_once() -> None:
    """The batch is like the paper's, many short prompts and a few long ones: no piece is much longer than another."""
    for seed in range(200):
        chance = random.Random(seed)
        tiles, room = [], chance.choice((1, 7, 132, 528))
        for row in range(chance.randint(0, 40)):
            begin = chance.choice((0, 0, 50))
            tiles.append(Tile(row, 1, 0, 0, begin, begin + chance.choice((1, 32, 700, 4096, 16384))))
        made = schedule(tiles, room)
        total = sum(tile.end - tile.begin for tile in tiles)
        longest = max(LEAST_SPLIT, -(-total // room))
        covered: dict[int, list[tuple[int, int]]] = {tile.row: [] for tile in tiles}
        for piece in made.pieces:
            assert 0 < piece.end - piece.begin <= longest
            covered[piece.row].append((piece.begin, piece.end))
        for tile in tiles:
            ranges = sorted(covered[tile.row])
            assert (ranges[0][0], ranges[-1][1]) == (tile.begin, tile.end)
            assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
        partials = sorted(piece.partial for piece in made.pieces if piece.partial >= 0)
        tiles_cut = {(piece.row, piece.first, piece.splits) for piece in made.pieces if piece.partial >= 0}
        together = sorted(number for _, first, splits in tiles_cut for number in range(first, first + splits))
        assert partials == list(range(made.num_partials)) == together


def test_few_requests_are_cut_for_all_processors_and_many_as_before() -> None:
    for requests, splits in ((1, 16), (4, 16), (32, 3), (128, 1)):
        made = schedule([Tile(row, 1, 999, 0, 0, 1000) for row in range(requests)], 66)
        assert {piece.splits for piece in made.pieces} == {splits}


# --- Kernels that treat each token alone


def _rounding(dtype: torch.dtype) -> float:
    return rounding(dtype) * (2 if dtype is torch.bfloat16 else 1)


def _close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, roundings: int) -> None:
    assert got.dtype is dtype
    bound = _rounding(dtype)
    torch.testing.assert_close(got.float(), exact.float(), rtol=2 * roundings * bound + 1e-5, atol=4 * bound + 2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"), thinned(product([(5, 66), (3, 4, 14), (1, 1), (0, 8), (2, 3, 150)], DTYPES), usual=7), ids=str
)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x = strided(generator, dtype, *shape)
    weight, bias = packed(generator, dtype, shape[-1]), packed(generator, dtype, shape[-1])
    wide, heavy, shift = x.float(), weight.float(), bias.float()
    _close(KERNELS.rms_norm(x, weight, EPS), REFERENCE.rms_norm(wide, heavy, EPS), dtype, 2)
    _close(KERNELS.rms_norm(x, heavy * 1.001, EPS), REFERENCE.rms_norm(wide, heavy * 1.001, EPS), dtype, 1)
    _close(KERNELS.layer_norm(x, weight, bias, EPS), REFERENCE.layer_norm(wide, heavy, shift, EPS), dtype, 1)
    _close(KERNELS.layer_norm(x, None, None, EPS), REFERENCE.layer_norm(wide, None, None, EPS), dtype, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("centred", "norms"), [(False, None), (False, torch.float32), (True, None)], ids=str)
@pytest.mark.parametrize("has_after", [False, True], ids=["", "a norm before the sum"])
@pytest.mark.parametrize("shape", [(3, 66), (0, 8)], ids=str)
def test_a_sum_and_its_norm_are_those_of_two_steps_bit_by_bit(
    shape: tuple[int, int], has_after: bool, centred: bool, norms: torch.dtype | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))

    def vector() -> torch.Tensor:
        return packed(generator, norms or dtype, shape[1])

    norm, unlike = Norm(vector(), vector() if centred else None, EPS, centred), Norm(None, None, EPS, centred=True)
    for after in (Norm(vector(), vector() if centred else None, 0.1, centred), unlike) if has_after else (None,):
        x, part = strided(generator, dtype, *shape), strided(generator, dtype, *shape)
        expected, kept = x.clone(), part.clone()
        expected += part if after is None else KERNELS.normed(part, after)
        got = KERNELS.add_and_norm(x, part, norm, after)
        off = 2 * rounding(dtype) if dtype is torch.bfloat16 else 0.0  # which the interpreter rounds towards zero
        torch.testing.assert_close(x, expected, rtol=off, atol=0)
        assert torch.equal(got, KERNELS.normed(x, norm))
        assert torch.equal(part, kept)


def test_what_cannot_be_added_is_refused() -> None:
    x, norm = torch.ones(2, 8), Norm(torch.ones(8), None, EPS, centred=False)
    for part in (torch.ones(3, 8), torch.ones(2, 8).half()):
        with pytest.raises(ValueError, match="cannot be added"):
            KERNELS.add_and_norm(x, part, norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "half", "rest"), [(1, 1, 0), (3, 20, 1), (2, 8, 24)])
def test_rotate(heads: int, half: int, rest: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(half)
    fused = packed(generator, dtype, 5, heads + 2, 2 * half + rest)
    expected = fused.clone()
    angles = torch.randn(5, half, generator=generator)
    KERNELS.rotate(fused[:, 1 : 1 + heads], angles.cos(), angles.sin())
    REFERENCE.rotate(expected[:, 1 : 1 + heads], angles.cos(), angles.sin())
    torch.testing.assert_close(fused, expected, rtol=2 * _rounding(dtype), atol=4 * _rounding(dtype))
    assert torch.equal(fused[..., 2 * half :], expected[..., 2 * half :]), "partial rotary leaves the rest"
    for heads_beside in (slice(0, 1), slice(1 + heads, None)):
        assert torch.equal(fused[:, heads_beside], expected[:, heads_beside])


@pytest.mark.parametrize(
    ("queries", "kv", "head_dim", "half", "norms", "dtype"),
    [
        (4, 2, 16, 8, None, torch.float32),
        (6, 2, 14, 5, torch.bfloat16, torch.bfloat16),
        (3, 3, 24, 12, torch.float32, torch.bfloat16),
        (5, 1, 80, 40, torch.float16, torch.float16),
        (2, 1, 8, 0, torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("in_int8", [False, True])
def test_queries_and_k_are_rotated_and_kept_in_one_kernel(
    queries: int, kv: int, head_dim: int, half: int, norms: torch.dtype | None, dtype: torch.dtype, in_int8: bool
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    spans = Spans([QuerySpan(1, 30, (2, ~0, 4, 6)), QuerySpan(5, 21, (1, 3, 5))], 8)
    cache = torch.zeros(14, 8, kv * head_dim, dtype=dtype)
    if in_int8:
        cache = torch.zeros(14, 8, kv * (head_dim + 2), dtype=torch.int8)
    qkv = packed(generator, dtype, 6, (queries + 2 * kv) * head_dim + 3)[:, :-3]
    of_queries, of_k = (None if norms is None else packed(generator, norms, head_dim) for _ in range(2))
    heads, angle = Heads(queries, kv, head_dim, of_queries, of_k, EPS), torch.randn(6, half, generator=generator)
    angles, expected, kept = (angle.cos(), angle.sin()) if half else None, cache.clone(), qkv.clone()
    query = KERNELS.rotate_and_write(cache, spans, qkv, heads, angles)
    assert torch.equal(qkv, kept)
    exact = REFERENCE.rotate_and_write(expected, spans, kept, heads, angles)
    bound = 4 * _rounding(dtype)
    torch.testing.assert_close(query, exact, rtol=bound, atol=bound)
    if in_int8:
        cache, expected = (dequantise_vectors(each.flatten(0, 1), head_dim) for each in (cache, expected))
        bound += 0.03
    torch.testing.assert_close(cache, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 66, 1500])
def test_gates(width: int, dtype: torch.dtype) -> None:
    gate_up = strided(torch.Generator().manual_seed(width), dtype, 3, 2 * width)
    _close(KERNELS.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.float()), dtype, 2)
    _close(KERNELS.gelu_mul(gate_up), REFERENCE.gelu_mul(gate_up.float()), dtype, 2)


def _each() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight = torch.ones(66, dtype=torch.bfloat16)
    return {
        "rms_norm": lambda x: KERNELS.rms_norm(x, weight, EPS),
        "layer_norm": lambda x: KERNELS.layer_norm(x, weight, weight, EPS),
        "silu_mul": KERNELS.silu_mul,
        "gelu_mul": KERNELS.gelu_mul,
    }


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    clean = packed(torch.Generator().manual_seed(3), torch.bfloat16, 5, 66)
    spoilt = clean.clone()
    spoilt[2] = float("nan")
    clean_rows = [0, 1, 3, 4]
    for name, run in _each().items():
        got = run(spoilt)
        assert got[2].isnan().all(), name
        assert torch.equal(got[clean_rows], run(clean)[clean_rows]), name


# --- Between the device and pages, and int8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_vectors_go_to_a_page_and_back_bit_by_bit(seed: int, dtype: torch.dtype) -> None:
    chance = random.Random(seed)
    layers, blocks, block_size, kv_dim = 2, 4, chance.choice((1, 3, 8)), chance.choice((1, 5, 24))
    places = block_slots(chance.sample(range(blocks), 3), [chance.random() < 0.5 for _ in range(3)], block_size)
    slots = torch.tensor(places[: len(places) - chance.randint(0, 2)])
    cache, page = (
        anything((layers, 2 * blocks, block_size, kv_dim), dtype, seed),
        torch.zeros(2, 2, 40, kv_dim).to(dtype),
    )
    expected_page, expected_cache = page.clone(), anything(tuple(cache.shape), dtype, seed + 1)
    back = expected_cache.clone()
    KERNELS.gather(cache, slots, page[:, :, 2 : 2 + len(slots)])
    REFERENCE.gather(cache, slots, expected_page[:, :, 2 : 2 + len(slots)])
    assert torch.equal(bits(page), bits(expected_page))
    KERNELS.scatter(back, slots, page[:, :, 2 : 2 + len(slots)])
    REFERENCE.scatter(expected_cache, slots, page[:, :, 2 : 2 + len(slots)])
    assert torch.equal(bits(back), bits(expected_cache))


def _levels(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, _, channels = rows.shape
    return torch.empty(rows.shape, dtype=torch.uint8), torch.empty(groups, channels), torch.empty(groups, channels)


@pytest.mark.parametrize(
    ("shape", "size", "dtype"), thinned(product([(2, 5, 7), (1, 70, 130)], [1.0, 1e-30, 1e30], DTYPES), usual=5)
)
def test_int8_is_what_the_reference_makes_of_it(shape: tuple[int, int, int], dtype: torch.dtype, size: float) -> None:
    rows = strided(torch.Generator().manual_seed(sum(shape)), dtype, *shape)
    rows.mul_(min(size, torch.finfo(dtype).max / 8))
    rows[0, :, 0] = rows[0, 0, 0]  # a constant channel
    got, expected = _levels(rows), _levels(rows)
    KERNELS.quantise(rows, *got)
    REFERENCE.quantise(rows, *expected)
    for drawn, wanted in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(drawn, wanted, rtol=1e-6, atol=0)
    assert (got[0].int() - expected[0].int()).abs().max() <= 1, "a level in the middle may round either way"


@pytest.mark.parametrize(("seed", "dtype"), thinned(product(range(2), DTYPES), usual=2))
def test_a_page_of_int8_is_expanded_into_the_blocks(seed: int, dtype: torch.dtype) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers, blocks, block_size, kv_dim = 2, 4, chance.choice((3, 8)), chance.choice((5, 24))
    slots = torch.tensor(block_slots(chance.sample(range(blocks), 3), [True, False, True], block_size))
    levels = torch.randint(0, 256, (layers, 2, len(slots), kv_dim), generator=generator).to(torch.uint8)
    least, step = torch.randn(2, layers, 2, kv_dim, generator=generator)
    cache = anything((layers, 2 * blocks, block_size, kv_dim), dtype, seed)
    expected = cache.clone()
    KERNELS.expand(cache, slots, levels, least, step.abs() / 100)
    REFERENCE.expand(expected, slots, levels, least, step.abs() / 100)
    rest = torch.ones(cache.shape[:3], dtype=torch.bool)
    rest.view(layers, -1)[:, torch.cat((slots, slots + block_size))] = False
    assert torch.equal(bits(cache[rest]), bits(expected[rest])), "nobody else's slots are touched"
    torch.testing.assert_close(cache[~rest], expected[~rest])


def test_a_whole_page_is_compressed_and_expanded_as_on_a_cpu() -> None:
    """Some channels are wide, and fp16 cannot hold them."""
    rows = torch.randn(4, 64, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[1, :, 3] *= 1e9
    told = []
    for kernels in (KERNELS, choose(torch.device("cpu"), torch.bfloat16).kernels):
        pages, cache = Int8Pages(4, 64, 40, torch.bfloat16, kernels), torch.zeros(2, 2, 64, 40).bfloat16()
        payload = memoryview(bytearray(pages.layout.size))
        assert compressed(pages, rows, payload)
        for piece, expand in pages.pieces(payload, cache, torch.arange(64), 1 << 12):
            expand(piece)
        told.append(cache.flatten(0, 1))
    torch.testing.assert_close(told[0], told[1], rtol=2**-7, atol=0.02)
    rest = torch.ones(rows.shape, dtype=torch.bool)
    rest[1, :, 3] = False
    torch.testing.assert_close(told[0][rest], rows[rest], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(odd: float) -> None:
    rows = torch.randn(2, 70, 9)
    rows[1, 66, 3] = odd
    levels = _levels(rows)
    KERNELS.quantise(rows, *levels)
    assert (~levels[2].isfinite()).nonzero().tolist() == [[1, 3]]


# --- Kernels that fail are replaced


class _Broken(TritonKernels):
    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("ptxas says no")

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gate_up) + 1


@rare  # the test below finds the others in float32
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_kernels_that_work_are_kept(dtype: torch.dtype) -> None:
    assert broken(TritonKernels(), torch.device("cpu"), dtype) == {}


def test_a_kernel_that_does_not_compile_or_is_wrong_is_replaced_by_torch() -> None:
    kernels = _Broken()
    faults = broken(kernels, torch.device("cpu"), torch.float32)
    assert faults == {"attend": "RuntimeError: ptxas says no", "silu_mul": "it is off by 1"}
    replace(kernels, faults)
    gate_up = torch.tensor([[1.0, 2.0]])
    assert torch.equal(kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))
    spans, cache, query = Spans([QuerySpan(1, 1, (0,))], 1), torch.ones(2, 1, 2), torch.ones(1, 1, 2)
    assert torch.equal(kernels.attend(query, cache, spans, Scoring(1.0)), cache[1:])


def test_attention_that_leaves_its_counters_is_replaced() -> None:
    """What is tried is long enough to be cut, so that the merge is tried, too."""

    class Leaving(TritonKernels):
        def _run(self, *args: Any, **named: Any) -> None:
            super()._run(*args, **named)
            args[0].counters.add_(1)

    assert broken(Leaving(), torch.device("cpu"), torch.float32).keys() == {"attend", "attend_new"}


def test_without_a_gpu_triton_is_not_asked() -> None:
    assert "Triton" not in choose(torch.device("cpu"), torch.float32).kernels.name
