"""Tests of what adapters add to a linear layer: by the reference, by C++ of every instruction set, and by Triton in its
interpreter, against the product in fp64, on random shapes that divide nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from alignedserve.kernels.common.adapters import (
    AdapterPart,
    AdapterWeights,
    LayerAdapter,
    StaticAdapters,
    StepAdapters,
)
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.native.kernels import Native
from tests.conftest import SOAK
from tests.kernels.every import kernels_of, native_sets
from tests.kernels.samples import threads
from tests.rare import rarely

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = range(300 if SOAK else 6)


def _triton() -> list[Kernels]:
    try:
        from alignedserve.kernels.triton.kernels import TritonKernels
        from alignedserve.kernels.triton.launch import interpreting
    except ImportError:
        return []
    return [TritonKernels()] if interpreting() else []  # elsewhere tests/gpu tries them


ON_CPUS = [kernels_of(name) for name in ("reference", *native_sets())]
ALL = [*ON_CPUS, *_triton()]


@pytest.fixture(autouse=True, params=[1, 3])
def some_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(request.param):
        yield


class Case:
    """A step of some rows, of which some have one of a few adapters, and a layer of some parts."""

    def __init__(self, seed: int, dtype: torch.dtype, outs: Sequence[int] = (), rows: int = 0, inputs: int = 0) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.inputs = dtype, inputs or self.random.choice([5, 24, 64, 70, 200])
        outs = outs or [self.random.choice([3, 16, 64, 70, 150]) for _ in range(self.random.randint(1, 3))]
        self.rows = rows or self.random.choice([1, 4, 7, 33, 300 if seed % 4 == 0 else 60])
        self.x = self._numbers(self.rows, self.inputs + 3)[:, : self.inputs]  # rows need not lie side by side
        self.before, self.expected = self._numbers(self.rows, sum(outs) + 2), torch.empty(0)
        self.expected = self.before.double()
        places = self.random.sample(range(self.rows), self.random.randint(0, self.rows))
        owners: dict[AdapterWeights, list[int]] = {}
        adapters = [self._adapter(outs) for _ in range(self.random.randint(1, 4))]
        for place in places:
            owners.setdefault(self.random.choice(adapters), []).append(place)
        self.step = StepAdapters.from_rows(owners) if owners else None
        for weights, own in owners.items():
            if (layer := weights.layers[1]) is None:
                continue
            for part in layer.parts:
                a = layer.a[part.first_rank : part.first_rank + part.ranks].double()
                added = self.x[own].double() @ a.t() @ part.matrix.double().t()
                self.expected[own, part.first_out : part.first_out + part.outs] += added

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _adapter(self, outs: Sequence[int]) -> AdapterWeights:
        """Return an adapter that changes the second of two layers, or only the first; it may leave parts out."""
        first_out, ranks, parts = 0, 0, []
        for out in outs:
            rank = self.random.choice([0, 1, 4, 16, 37, 256])
            if rank:
                parts.append(AdapterPart.from_matrix(self._numbers(out, rank) / 4, ranks, first_out))
            ranks, first_out = ranks + rank, first_out + out
        if not parts:
            other = LayerAdapter(self._numbers(2, 3), (AdapterPart.from_matrix(self._numbers(4, 2), 0, 0),))
            return AdapterWeights([other, None])
        return AdapterWeights([None, LayerAdapter(self._numbers(ranks, self.inputs) / 8, tuple(parts))])


@pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_what_their_own_adapter_adds(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed in SEEDS if SOAK or isinstance(kernels, Native) else SEEDS[1:3]:
        case = Case(seed, dtype)
        if case.step is not None:
            check(kernels, case, case.step)


def check(kernels: Kernels, case: Case, step: StepAdapters) -> None:
    out = case.before.clone()
    kernels.adapt(step, 1, case.x, out)
    off = float((out.double() - case.expected).abs().max()) / float(case.expected.abs().max())
    assert off <= {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype], off


@pytest.mark.parametrize("kernels", [*ON_CPUS, *map(rarely, _triton())], ids=lambda kernels: kernels.name)
def test_steps_of_fixed_memory_have_the_adapters_of_the_step_that_was_placed_last(kernels: Kernels) -> None:
    """The first run, which is captured, has none; then come steps of any adapters of any rank, and again of none."""
    static = StaticAdapters(40)
    for seed in range(20 if SOAK else 5):
        case = Case(seed, torch.float32, [70, 3, 150], 40, 70)
        if seed:
            static.place(case.step or StepAdapters(()))
        else:
            case.expected = case.before.double()
        tables = static.tables
        check(kernels, case, static)
        assert not seed or static.tables is tables, "a graph knows where they lie"


@pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
def test_an_adapter_of_no_numbers_spoils_its_own_rows_alone(kernels: Kernels) -> None:
    b = torch.full((70, 1), torch.nan)
    step = StepAdapters.from_rows(
        {AdapterWeights([LayerAdapter(torch.zeros(1, 24), (AdapterPart.from_matrix(b, 0, 0),))]): [2]}
    )
    out = torch.zeros(4, 70)
    kernels.adapt(step, 0, torch.ones(4, 24), out)
    assert out[2].isnan().all()
    assert (out[[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
def test_rows_that_are_not_there_and_other_types_are_refused(kernels: Kernels) -> None:
    weights = AdapterWeights([LayerAdapter(torch.ones(2, 8), (AdapterPart.from_matrix(torch.ones(8, 2), 0, 0),))])
    with pytest.raises((ValueError, IndexError)):
        kernels.adapt(StepAdapters.from_rows({weights: [4]}), 0, torch.ones(4, 8), torch.ones(4, 8))
    if isinstance(kernels, Native):
        half = torch.ones(4, 8, dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="must be the same"):
            kernels.adapt(StepAdapters.from_rows({weights: [1]}), 0, half, half.clone())
