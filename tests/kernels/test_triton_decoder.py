"""Tests of all layers by the Triton kernels, in Triton's interpreter, against torch call by call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common.decoder import DecoderLayer, Inner, Norm, Paged
from alignedserve.kernels.common.linear import Way
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.kernels.samples import packed
from tests.kernels.test_decoder import BLOCK_SIZE, call_by_call, layers_of
from tests.rare import rarely

KERNELS = TritonKernels()
OFF = {torch.float32: 1e-5, torch.float16: 2.0**-8}  # of the largest number: four of its last digits
KINDS = {"opt": (False, False, False), "llama": (True, False, False), "qwen": (True, True, False), "gemma": (True,) * 3}
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]


def paged_of(lies: list[QuerySpan], layers: list[DecoderLayer], dtype: torch.dtype) -> Paged:
    kv_dim = layers[0].kv_heads * layers[0].head_dim
    return Paged(torch.zeros(len(layers), 2 * 8, BLOCK_SIZE, kv_dim, dtype=dtype), Spans(lies, BLOCK_SIZE))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    off = OFF[got.dtype]
    torch.testing.assert_close(got, expected, rtol=off, atol=off * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("opt", torch.float16), ("llama", torch.float16), ("qwen", torch.float32), ("gemma", torch.float32)],
)
def test_layers_give_what_torch_gives_call_by_call(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    llama, head_norms, gemma = KINDS[kind]
    layers = layers_of(Reference(), generator, dtype, llama, head_norms, 6 if llama else 0, gemma=gemma)
    lies = [QuerySpan(1, 1, (0,)), QuerySpan(5, 5, (~1, 2)), QuerySpan(1, 1, (3,))]
    x = packed(generator, dtype, 7, layers[0].qkv.shape.inputs)
    drawn = torch.randn(2, 7, 3, generator=generator)
    angles = [(angle.cos(), angle.sin()) for angle in drawn] if llama else []
    expected, into, paged = x.clone(), paged_of(lies, layers, dtype), paged_of(lies, layers, dtype)
    call_by_call(Reference(), layers, expected, angles, into, Way.TORCH)
    decoder = KERNELS.decoder(layers)
    assert decoder.takes(7)
    assert decoder.pauses is None
    decoder.run(x, angles, paged)
    close(x, expected)
    close(paged.cache, into.cache)


@pytest.mark.parametrize(
    ("rows", "inputs", "outs", "dtype", "norm", "inner", "has_bias", "adds"),
    [
        (1, 1100, 37, torch.bfloat16, torch.bfloat16, None, True, False),
        (1, 96, 40, torch.float16, torch.float32, Inner.SILU, False, False),
        (1, 520, 16, torch.float16, None, Inner.GELU, True, False),
        (1, 1030, 20, torch.bfloat16, None, None, True, True),
        (2, 70, 40, torch.float16, torch.float16, Inner.SILU, True, False),
        (5, 300, 33, torch.bfloat16, None, None, False, True),
        (8, 260, 1, torch.float16, None, None, True, False),
    ],
)
def test_products_of_few_rows(
    rows: int,
    inputs: int,
    outs: int,
    dtype: torch.dtype,
    norm: torch.dtype | None,
    inner: Inner | None,
    has_bias: bool,
    adds: bool,
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = packed(generator, dtype, outs if inner is None else 2 * outs, inputs) / 8
    bias = packed(generator, dtype, len(weight)) if has_bias else None
    of_norm = None if norm is None else Norm(packed(generator, norm, inputs), None, 1e-5, centred=False)
    x, out = packed(generator, dtype, rows, inputs), packed(generator, dtype, rows, outs) if adds else None
    wide = [None if each is None else each.float() for each in (bias, out)]
    normed = x
    if of_norm is not None and of_norm.weight is not None:
        normed = Reference().rms_norm(x, of_norm.weight, of_norm.eps)  # rounded as there
    exact = Reference().few_rows(normed.float(), weight.float(), wide[0], None, inner, wide[1])
    got = KERNELS.few_rows(x, weight, bias, of_norm, inner, out)
    assert adds == (got is out)
    off = 2.0**-6 if dtype is torch.bfloat16 else 2.0**-9
    torch.testing.assert_close(got.float(), exact, rtol=off, atol=off * float(exact.abs().max()))


def test_rows_that_do_not_fit_a_product_of_few_rows_are_refused() -> None:
    weight = torch.ones(4, 8)
    for x in (torch.ones(9, 8), torch.ones(8, 2).t(), torch.ones(2, 8, dtype=torch.float16), torch.ones(2, 6)):
        with pytest.raises(ValueError, match="are not"):
            KERNELS.few_rows(x, weight, None)


def test_attention_of_decodes_is_one_kernel_where_that_is_faster() -> None:
    generator, dtype = torch.Generator().manual_seed(7), torch.float16
    layers = layers_of(Reference(), generator, dtype, True, True, 8)
    ran = list[str]()

    class Noting(TritonKernels):
        def attend_new(self, *args: Any, **named: Any) -> torch.Tensor | None:
            ran.append("one")
            return super().attend_new(*args, **named)

        def attend(self, *args: Any, **named: Any) -> torch.Tensor:
            ran.append("two")
            return super().attend(*args, **named)

    def run(rows: int) -> torch.Tensor:
        paged = paged_of([QuerySpan(1, 1, (number % 8,)) for number in range(rows)], layers, dtype)
        x = torch.ones(rows, layers[0].qkv.shape.inputs, dtype=dtype)
        ran.clear()
        decoder.run(x, [(torch.ones(rows, 4), torch.ones(rows, 4))], paged)
        return x

    decoder, cache = Noting().decoder(layers), torch.zeros(2 * 20, BLOCK_SIZE, 16, dtype=dtype)
    expected = run(3)
    assert ran == ["one"] * 2, "nothing is measured"
    took = iter((1.0, 2.0, 2.0, 1.0))

    def time(call: Callable[[], object]) -> float:
        call()
        return next(took)

    for measure in decoder.rehearsals(cache, lambda _: 1.0, time):
        measure()
    assert ran == ["one"] * 2 + ["two", "one"] * 2, "of 16 decodes and of one"
    assert cache.any()
    assert torch.equal(run(3), expected)
    assert ran == ["one"] * 2
    run(17)
    assert ran == ["two"] * 2


@pytest.mark.parametrize("kind", ["opt", "llama", "gemma"])
@pytest.mark.parametrize("rows", [rarely(1), 3])
def test_products_of_few_rows_are_used_where_they_are_faster(kind: str, rows: int) -> None:
    generator, dtype = torch.Generator().manual_seed(7), torch.float16
    llama, _, gemma = KINDS[kind]
    layers = layers_of(Reference(), generator, dtype, llama, False, 8 if llama else 0, gemma=gemma)
    used = list[int]()

    class Noting(TritonKernels):
        def few_rows(self, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            used.append(len(x))
            return super().few_rows(x, *args, **named)

    decoder, lies = Noting().decoder(layers), [QuerySpan(1, 1, (number,)) for number in range(rows)]
    x = packed(generator, dtype, rows, layers[0].qkv.shape.inputs)
    angles = [(drawn.cos(), drawn.sin()) for drawn in torch.randn(2, rows, 4, generator=generator)] if llama else []
    expected, paged = x.clone(), paged_of(lies, layers, dtype)
    decoder.run(expected, angles, paged_of(lies, layers, dtype))
    assert not used, "nothing was measured"
    took = count(100, -1)
    measures = decoder.rehearsals(paged.cache[0].clone(), *2 * (lambda call: call() is None or next(took),))
    of_attention = 1  # the cache has eight blocks
    # Of OPT's first MLP layer there is no kernel; Gemma's first norm comes with no sum before it, the others do.
    assert len(measures) - of_attention == 4 * {"opt": 3, "llama": 4, "gemma": 5}[kind]
    for measure in measures:
        measure()
    used.clear()
    decoder.run(x, angles, paged)
    assert used == [rows] * 2 * (3 if kind == "opt" else 4)
    close(x, expected)
