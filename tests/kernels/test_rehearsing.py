"""Tests that rehearsals, measured once and kept, use enough tokens to be worth it, and change no result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from alignedserve.kernels.common.drawing import DrawWish, Likeliest
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.rehearsing import rehearse, rehearse_layers

triton_launch = pytest.importorskip("alignedserve.kernels.triton.launch", reason="Triton is not installed")


class Noting(Reference):
    def __init__(self) -> None:
        self.attended: list[tuple[int, int, int]] = []  # number of requests, queries of each, tokens of each
        self.drawn = self.told = 0

    def attend(self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
        (tokens,) = {*spans.tokens.tolist()}
        self.attended.append((len(spans), spans.num_rows // len(spans), tokens))
        return super().attend(query, cache, spans, scoring)

    def draw(self, logits: torch.Tensor, wishes: Sequence[DrawWish], numbers: Sequence[float]) -> torch.Tensor:
        self.drawn += logits.shape[1]
        return super().draw(logits, wishes, numbers)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest:
        self.told += logits.shape[1]
        return super().logprobs(logits, tokens, tops)


@pytest.mark.parametrize(
    ("pairs", "most_tokens", "attended"),
    [
        (2048, 4096, [(16, 1, 2048), (1, 1024, 1024)]),
        (2048, 300, [(16, 1, 300), (1, 300, 300)]),
        (20, 4096, [(16, 1, 16), (1, 320, 320)]),
        (1, 4096, [(1, 16, 16)]),
    ],
)
def test_attention_and_sampling_run_on_as_much_as_there_can_be(
    pairs: int, most_tokens: int, attended: list[tuple[int, int, int]]
) -> None:
    kernels, cache = Noting(), torch.zeros(2 * pairs, 16, 8)
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
        left = prune(list(sizes), {"query": torch.empty(0, dtype=dtype)})
        assert [config.kwargs["TOKENS"] for config in left] == fitting
