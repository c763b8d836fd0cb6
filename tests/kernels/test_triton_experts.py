"""Tests of experts that run all at once, in Triton's interpreter, against one expert after another in fp64, on random
shapes that divide no tile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from alignedserve.architectures.routing import Routing, Scores
from alignedserve.kernels.common.experts import ExpertPacking, ExpertWeights
from alignedserve.kernels.common.quantised import FP8, QuantisedWeight
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.rehearsing import rehearse_experts
from alignedserve.kernels.triton import experts as triton_experts
from alignedserve.kernels.triton.experts import TILE_ROWS, _numbers, tile_rows
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.conftest import SOAK
from tests.gpu.mixtures import FORMS, MixtureCase, random_mixture
from tests.kernels.samples import threads
from tests.rare import rarely, thinned

KERNELS, REFERENCE = TritonKernels(), Reference()
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of numbers that are spoilt on purpose
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [*product(range(200), DTYPES)]
    if SOAK
    else [(1, DTYPES[1]), (4, DTYPES[0]), *map(rarely, zip((0, 2, 3, 5), (*DTYPES, DTYPES[1]), strict=True))],
)
def test_each_row_gets_what_its_experts_make(seed: int, dtype: torch.dtype) -> None:
    case = random_mixture(seed, dtype)
    case.check(case.sums(KERNELS, CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_says_what_a_kernel_is_to_say(seed: int, dtype: torch.dtype) -> None:
    """It takes the place of a kernel that does not work."""
    case = random_mixture(seed, dtype)
    case.check(case.sums(REFERENCE, CPU))


@pytest.mark.parametrize(
    ("form", "seed"), [*product(FORMS, range(60))] if SOAK else thinned(product(FORMS, (1, 4, 7)), usual=5)
)
def test_quantised_experts_are_what_they_are_expanded(form: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "reads_fp8", lambda _: seed % 2 == 1)
    case = replace(random_mixture(seed, DTYPES[seed % 3]), form=form)
    case.check(case.sums(KERNELS, CPU))


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_runs_quantised_experts_too(form: str) -> None:
    case = replace(random_mixture(4, torch.float32), form=form)
    case.check(case.sums(REFERENCE, CPU))


@triton.jit
def _each(q: Any, like: Any, out: Any, FLOATS: tl.constexpr, ON_CHIP: tl.constexpr) -> None:
    at = tl.arange(0, 256)
    tl.store(out + at, _numbers(tl.load(q + at), 128, tl.load(like), FLOATS, ON_CHIP, False))


@pytest.mark.parametrize("on_chip", [False, True])
def test_each_byte_is_the_float_that_torch_says(on_chip: bool) -> None:
    """Floats of 8 bits are widened by an instruction of the device, and by their bits where it has none."""
    q, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    expected = q.view(FP8).float()
    _each[(1,)](q, out, out, FLOATS=True, ON_CHIP=on_chip)
    if on_chip:  # the interpreter says 480 to NaN
        out[expected.isnan()] = torch.nan
    assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal(out.bfloat16().half().float().nan_to_num(1e9), expected.nan_to_num(1e9)), "all dtypes hold it"
    _each[(1,)](q, out, out, FLOATS=False, ON_CHIP=on_chip)
    assert torch.equal(out, q.float() - 128)


def test_small_groups_and_orders_of_inputs_are_not_packed() -> None:
    weight = FORMS["int4"](torch.randn(6, 64))
    assert isinstance(weight, QuantisedWeight)
    assert ExpertPacking.from_weight(replace(weight, order=torch.arange(64))) is None
    assert ExpertPacking.from_weight(weight.finer(4, 16)) is None
    packing = ExpertPacking.from_weight(weight)
    assert packing is not None
    assert torch.equal(packing.expanded(), weight.expanded())
    assert packing.num_bytes == 6 * 32 + 2 * 6 * 2 * 2


@pytest.mark.parametrize("rows", [1, rarely(2), 37])
def test_experts_that_all_rows_share_take_several_blocks(rows: int) -> None:
    """Every row has the same two of many experts: these fill block after block, and all others have none."""
    case = MixtureCase.made(3, torch.float32, rows=rows, experts=20, taken=2, hidden=40, inner=24)
    case.chosen[:] = torch.tensor([17, 4])
    case.check(case.sums(KERNELS, CPU))


@pytest.mark.parametrize("experts", [5, 80])
@pytest.mark.parametrize("rows", [1, 16, 17, rarely(40)])
def test_few_rows_need_no_tables(rows: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of up to 16 rows launches the two products and the sum alone; one of more makes its tables at once,
    and only one of many pairs counts them before."""
    launched = list[str]()

    class Noting:
        def __init__(self, name: str) -> None:
            self._name, self._kernel = name, getattr(triton_experts, name)

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self._name)
            return self._kernel[grid]

    for name in ("_count", "_place", "_by_expert", "_sum"):
        monkeypatch.setattr(triton_experts, name, Noting(name))
    monkeypatch.setattr(triton_experts, "_COUNTED_BY_ALL", 64)
    case = MixtureCase.made(rows, torch.float32, rows=rows, experts=experts, taken=3, hidden=40, inner=24)
    case.check(case.sums(KERNELS, CPU))
    tables = [[], ["_place"], ["_count", "_place"]][(rows > 16) + (rows * 3 > 64)]
    assert launched == [*tables, "_by_expert", "_by_expert", "_sum"]


def test_a_row_gets_the_same_beside_few_rows_and_many() -> None:
    case = MixtureCase.made(9, torch.float32, rows=40, experts=6, taken=3, hidden=40, inner=24)
    many = case.sums(KERNELS, CPU)
    few = replace(case, x=case.x[:9], chosen=case.chosen[:9], shares=case.shares[:9], beside=case.beside[:9])
    assert torch.equal(few.sums(KERNELS, CPU), many[:9])


def test_long_inputs_are_cut_into_splits() -> None:
    case = MixtureCase.made(4, torch.float32, rows=1, experts=3, taken=1, hidden=24, inner=1100, has_biases=True)
    case.check(case.sums(KERNELS, CPU))


@pytest.mark.parametrize(("rows", "clamps"), thinned(product([1, 40], [True, False]), usual=2))
def test_both_halves_of_an_expert_have_their_biases(rows: int, clamps: bool) -> None:
    case = MixtureCase.made(
        8, torch.float32, rows=rows, experts=3, taken=2, hidden=40, inner=24, has_biases=True, clamps=clamps
    )
    case.check(case.sums(KERNELS, CPU))


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    for clamps in (False, True):
        case = MixtureCase.made(5, torch.bfloat16, rows=7, experts=3, taken=2, hidden=40, inner=24, clamps=clamps)
        clean = case.sums(KERNELS, CPU)
        for spoiled in (float("nan"), float("inf")):
            case.x[2, 3] = spoiled
            spoilt = case.sums(KERNELS, CPU)
            assert not spoilt[2].isfinite().all()
            others = [row for row in range(7) if row != 2]
            assert torch.equal(spoilt[others], clean[others])


def test_a_step_of_no_rows_adds_nothing() -> None:
    case = MixtureCase.made(6, torch.float32, rows=0, experts=3, taken=2, hidden=40, inner=24)
    assert case.sums(KERNELS, CPU).shape == (0, 40)


def test_rows_that_do_not_fit_are_refused() -> None:
    case = MixtureCase.made(7, torch.float32, rows=2, experts=3, taken=2, hidden=40, inner=24)
    weights = case.weights(KERNELS, CPU)
    with pytest.raises(ValueError, match="do not fit experts of"):
        KERNELS.add_experts(case.x.bfloat16(), weights, case.chosen, case.shares, case.beside.bfloat16())
    with pytest.raises(ValueError, match="do not fit 40 numbers"):
        KERNELS.add_experts(case.x[:, :30], weights, case.chosen, case.shares, case.beside[:, :30])


def random_routing(seed: int) -> tuple[Routing, torch.Tensor, torch.Tensor | None]:
    """Return how experts are chosen, the logits of rows, and the experts' biases."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups, of_group = chance.choice(((1, 3), (1, 8), (1, 20), (4, 3), (8, 4), (3, 2)))
    experts, chosen_groups = groups * of_group, chance.randint(1, groups)
    routing = Routing(
        experts=experts,
        chosen=chance.randint(1, chosen_groups * of_group),
        scores=chance.choice((*Scores,)),
        groups=groups,
        chosen_groups=chosen_groups,
        is_normalised=chance.random() < 0.5,
        factor=chance.choice((1.0, 2.5)),
    )
    bias = torch.randn(experts, generator=generator) / 4 if chance.random() < 0.5 else None
    return routing, torch.randn(chance.choice((0, 1, 7)), experts, generator=generator), bias


@pytest.mark.parametrize("seed", range(300) if SOAK else thinned(range(30), usual=12))
def test_rows_choose_the_experts_that_torch_chooses(seed: int) -> None:
    routing, logits, bias = random_routing(seed)
    (chosen, shares), (expected, of_expected) = (
        kernels.route(logits, routing, bias) for kernels in (KERNELS, REFERENCE)
    )
    order, of_order = chosen.argsort(1), expected.argsort(1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, of_order))
    assert torch.allclose(shares.gather(1, order), of_expected.gather(1, of_order), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_that_is_no_number_has_experts_that_differ(seed: int) -> None:
    """They are read as numbers of weights, and must be there."""
    routing, _, bias = random_routing(seed)
    logits = torch.full((2, routing.experts), torch.nan)
    logits[1] = 0
    chosen, shares = KERNELS.route(logits, routing, bias)
    assert all(len({*row}) == routing.chosen and {*row} <= {*range(routing.experts)} for row in chosen.tolist())
    assert shares[0].isnan().all()
    assert shares[1].isfinite().all()


def test_blocks_have_as_many_rows_as_experts_have_pairs() -> None:
    """A block may be half empty, but no expert has many small blocks where all have as many pairs."""
    for experts in (1, 8, 128):
        sizes = [tile_rows(experts * each, experts, torch.bfloat16) for each in TILE_ROWS]
        assert sizes == [*TILE_ROWS]
    assert tile_rows(1, 128, torch.bfloat16) == TILE_ROWS[0]
    assert tile_rows(1 << 20, 8, torch.bfloat16) == TILE_ROWS[-1]
    assert tile_rows(1 << 20, 8, torch.float32) < TILE_ROWS[-1], "products of fp32 take more registers"


class Noting(Reference):
    def __init__(self) -> None:
        self.rows = list[int]()

    def add_experts(
        self,
        x: torch.Tensor,
        experts: ExpertWeights,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert all(len({*row}) == experts.taken for row in chosen.tolist()), "a row's experts differ"
        self.rows.append(len(x))
        return x if out is None else out


@pytest.mark.parametrize(("experts", "taken"), [(8, 2), (20, 3)])
def test_a_rehearsal_has_blocks_of_every_size(experts: int, taken: int) -> None:
    """A kernel that a captured step meets must have been measured before."""
    case = MixtureCase.made(1, torch.bfloat16, rows=1, experts=experts, taken=taken, hidden=16, inner=8)
    kernels = Noting()
    rehearse_experts(kernels, [case.weights(kernels, CPU)])
    sizes = [tile_rows(rows * taken, experts, torch.bfloat16) for rows in kernels.rows]
    assert [*dict.fromkeys(sizes)] == [*TILE_ROWS]
    assert kernels.rows[0] == 1, "one row alone has no blocks to fill"


def test_experts_that_differ_cannot_run_at_once() -> None:
    case = MixtureCase.made(1, torch.float32, rows=1, experts=3, taken=1, hidden=16, inner=8)
    weights = case.weights(REFERENCE, CPU)
    ups = [*weights.ups[:2], REFERENCE.linear(torch.zeros(20, 16))]
    unlike = ExpertWeights(ups, weights.downs, None, 1, False)
    with pytest.raises(ValueError, match="weights alike"):
        _ = unlike.addresses


def test_tables_of_steps_of_any_size_are_made_by_one_kernel_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that no rehearsal had must not have a kernel of its own, which its step would wait for."""
    constants = set[tuple[object, ...]]()

    class Noting:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.launch

        def launch(self, *_: object, **named: object) -> None:
            constants.add((named["COUNTED"], named["WIDTH"], named["PART"]))

    monkeypatch.setattr(triton_experts, "_place", Noting())
    experts = random_mixture(3, torch.float32).weights(KERNELS, CPU)
    for rows in (17, 20, 40, 70, 140, 300):
        chosen = torch.zeros(rows, 2, dtype=torch.long)
        triton_experts._ExpertBlocks(chosen, chosen.float(), experts)
    assert constants == {(False, 512, 128), (True, 1024, 128)}
