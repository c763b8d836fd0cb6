"""Tests that rehearsals, measured once and kept, use enough tokens to be worth it, and change no result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch

from alignedserve.core import Sampling
from alignedserve.errors import DeviceLost
from alignedserve.kernels.common.drawing import Likeliest
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.rehearsing import rehearse, rehearse_layers
from tests.gpu.layers import random_layer

triton_launch = pytest.importorskip("alignedserve.kernels.triton.launch", reason="Triton is not installed")


class Noting(Reference):
    def __init__(self) -> None:
        self.attended: list[tuple[int, int, int]] = []  # number of requests, queries of each, tokens of each
        self.drawn = self.told = 0

    def attend(self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
        (tokens,) = {*spans.tokens.tolist()}
        self.attended.append((len(spans), spans.num_rows // len(spans), tokens))
        return super().attend(query, cache, spans, scoring)

    def draw(self, logits: torch.Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]) -> torch.Tensor:
        self.drawn += logits.shape[1]
        return super().draw(logits, wishes, numbers)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest:
        self.told += logits.shape[1]
        return super().logprobs(logits, tokens, tops)


@pytest.mark.parametrize(
    ("blocks", "most_tokens", "attended"),
    [
        (2048, 4096, [(16, 1, 2048), (1, 1024, 1024)]),
        (2048, 300, [(16, 1, 300), (1, 300, 300)]),
        (20, 4096, [(16, 1, 16), (1, 320, 320)]),
        (1, 4096, [(1, 16, 16)]),
    ],
)
def test_attention_and_sampling_run_on_as_much_as_there_can_be(
    blocks: int, most_tokens: int, attended: list[tuple[int, int, int]]
) -> None:
    kernels, cache = Noting(), torch.zeros(2 * blocks, 16, 8)
    rehearse(kernels, cache, torch.float32, 4, 4, 50, most_tokens)
    assert kernels.attended == attended
    assert (kernels.drawn, kernels.told) == (50, 50)
    assert not cache.any(), "nothing is written"


class NotingLayer(Linear):
    def __init__(self, outputs: int) -> None:
        super().__init__(torch.zeros(outputs, 8, dtype=torch.bfloat16))
        self.ran, self.ran_wide = list[int](), list[int]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(len(x))
        return super().__call__(x)

    def wide(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.ran_wide.append(len(x))
        return super().wide(x, out)


def test_layers_run_as_steps_run_them_at_every_size_of_a_tile() -> None:
    """A head goes to logits in fp32; a kernel that a captured step meets must have been measured before."""
    layer, head = NotingLayer(16), NotingLayer(50)
    rehearse_layers([layer, head], words=50)
    assert (layer.ran_wide, head.ran) == ([], [])
    products = pytest.importorskip("alignedserve.kernels.triton.products")
    for ran in (layer.ran, head.ran_wide):
        tiles = [next((tile for tile in products.TILE_ROWS if rows <= tile), products.TILE_ROWS[-1]) for rows in ran]
        assert [*dict.fromkeys(tiles)] == [*products.TILE_ROWS]


def test_one_choice_is_taken_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "interpreting", lambda: False)
    made = triton_launch.tuned([({"TILE": 1}, (4, 8)), ({"TILE": 2}, (8,))], key=["columns"], stages=(2,))
    kernel = made(triton_launch.triton.jit(_nothing))
    assert len(kernel.configs) == 3
    for number in range(6):
        with triton_launch.with_choice(number):
            (choice,) = kernel.configs
            assert (choice.kwargs["TILE"], choice.num_warps) == ((1, 4), (1, 8), (2, 8))[number % 3]
    assert len(kernel.configs) == 3
    triton_launch._tuned.remove(kernel)


def _nothing(columns: int, TILE: int) -> None: ...


def test_what_does_not_fit_is_not_measured() -> None:
    """In fp32, large tiles take a minute to compile, and do not fit."""
    attention = pytest.importorskip("alignedserve.kernels.triton.attention")
    sizes = triton_launch.triton.Config({"TOKENS": 32}), triton_launch.triton.Config({"TOKENS": 128})
    prune = attention._attend.early_config_prune
    for dtype, fitting in ((torch.float32, [32]), (torch.bfloat16, [32, 128])):
        left = prune(list(sizes), {"query": torch.empty(0, dtype=dtype)}, ROWS=16, IN_INT8=False)
        assert [config.kwargs["TOKENS"] for config in left] == fitting


def test_a_product_measures_its_choices_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some arguments are handed over by their place and others by their name: all of them say what fits."""
    products = pytest.importorskip("alignedserve.kernels.triton.products")
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels").TritonKernels()
    sizes, ran = ((64, 4), (64, 8), (128, 0)), list[tuple[int, int]]()  # outputs and warps: no warp has room for a sum

    class Compiled:
        def run(self, *_: object, OUTS: int, num_warps: int, **__: object) -> None:
            ran.append((OUTS, num_warps))

    choices = [triton_launch.triton.Config({"OUTS": outs}, num_warps=warps) for outs, warps in sizes]
    monkeypatch.setattr(triton_launch, "benchmark", lambda call, _: call() or [1.0] * 3)
    monkeypatch.setattr(products._multiply, "configs", choices)
    monkeypatch.setattr(products._multiply, "cache", {})
    monkeypatch.setattr(products._multiply, "fn", Compiled())
    random_layer(1, torch.float32).output(kernels, torch.device("cpu"))
    assert ran == [(64, 4), (64, 8), (64, 4)], "both are measured, and the first of the fastest runs"


class _Tiled:
    """Stands for a compiled kernel, which fails with some of its tiles."""

    arg_names = ("x", "columns")
    error: Exception = RuntimeError("LLVM ERROR: cannot select")

    def __init__(self, failing: Collection[int]) -> None:
        self.fn, self.failing, self.ran = _nothing, failing, list[int]()

    def run(self, *_: object, TILE: int, **__: object) -> int:
        self.ran.append(TILE)
        if TILE in self.failing:
            raise self.error
        return TILE


def _tuned(kernel: _Tiled, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the kernel tuned over tiles of 1, 2 and 3; the larger the tile, the faster."""
    monkeypatch.setattr(triton_launch, "interpreting", lambda: False)
    monkeypatch.setattr(triton_launch, "_tuned", [])

    def benchmark(call: Callable[[], object], _: object) -> list[float]:
        call()
        return [1 / kernel.ran[-1]] * 3

    monkeypatch.setattr(triton_launch, "benchmark", benchmark)
    return triton_launch.tuned([({"TILE": tile}, (4,)) for tile in (1, 2, 3)], key=["columns"], stages=(2,))(kernel)


def test_a_choice_that_fails_is_left_out_and_the_kernel_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = _Tiled(failing=[3])
    tuned = _tuned(kernel, monkeypatch)
    assert [tuned[(1,)](torch.zeros(1), columns) for columns in (8, 8, 16)] == [2, 2, 2]
    (said,) = (record.getMessage() for record in caplog.records)
    assert "_nothing with TILE: 3, num_warps: 4" in said
    assert said.endswith("has failed (RuntimeError: LLVM ERROR: cannot select): this choice is left out")


def test_a_choice_that_fails_after_it_was_measured_gives_way_to_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = _Tiled(failing=[])
    tuned = _tuned(kernel, monkeypatch)
    assert tuned[(1,)](torch.zeros(1), 8) == 3
    kernel.failing, kernel.ran = [3, 1], []
    assert [tuned[(1,)](torch.zeros(1), 8) for _ in range(3)] == [2, 2, 2]
    assert kernel.ran == [3, 1, 2, 2, 2]
    assert len(caplog.records) == 2


def test_a_kernel_all_of_whose_choices_fail_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="cannot select"):
        _tuned(_Tiled(failing=[1, 2, 3]), monkeypatch)[(1,)](torch.zeros(1), 8)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), DeviceLost("cuda:0 is gone")])
def test_what_is_no_fault_of_a_choice_leaves_none_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Tiled(failing=[3])
    kernel.error = error
    tuned = _tuned(kernel, monkeypatch)
    with pytest.raises(type(error)):
        tuned[(1,)](torch.zeros(1), 8)
    kernel.failing = []
    assert tuned[(1,)](torch.zeros(1), 8) == 3
