"""Tests of programmatic dependent launches, in Triton's interpreter: no program touches memory before it waits.

tests/kernels/test_triton_compiles.py looks for the same in machine code, `pdl` of tools/quarter.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.runtime import interpreter

from alignedserve.kernels.common.decoder import Inner, Norm
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import QuerySpan
from alignedserve.kernels.common.summing import SumThenNorm
from alignedserve.kernels.triton import launch
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.kernels.samples import packed
from tests.kernels.test_decoder import layers_of
from tests.kernels.test_triton_decoder import paged_of

KERNELS = TritonKernels()
ENTERS, SIGNALS, WAITS, ACCESS = "enters", "signals", "waits", "access"
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tools/quarter.py tries it on the GPU"),
]


class Watch:
    """What the programs of all kernels do, in order."""

    def __init__(self) -> None:
        self.kernels, self.prefetched = list[str](), list[int]()
        self.programs = list[list[str]]()

    def note(self, what: str) -> None:
        self.programs[-1].append(what)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch, run, enter = Watch(), interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.set_grid_idx

    def launched(executor: Any, *args: Any, **named: Any) -> Any:
        watch.kernels.append(executor.fn.__name__)
        assert named["launch_pdl"], executor.fn.__name__
        return run(executor, *args, **named)

    def entered(builder: Any, *place: Any) -> None:
        watch.programs.append([])
        enter(builder, *place)

    def prefetch(_asm: str, _constraints: str, args: list[Any], *_: Any, **__: Any) -> None:
        watch.prefetched.extend(args[0].handle.data.ravel().tolist())

    class Memory:
        def __getattr__(self, name: str) -> Any:
            access = getattr(memory, name)

            def noted(*args: Any) -> Any:
                watch.note(ACCESS)
                return access(*args)

            return noted

    memory = interpreter._interpreter
    monkeypatch.setattr(interpreter, "_interpreter", Memory())
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", entered)
    monkeypatch.setattr(launch, "has_pdl", lambda _: True)
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: watch.note(SIGNALS))
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: watch.note(WAITS))
    monkeypatch.setattr(tl, "inline_asm_elementwise", prefetch)
    yield watch
    for program in watch.programs:
        assert program[:2] == [SIGNALS, WAITS], "it touches memory before it waits"
        assert set(program[2:]) == {ACCESS}


@pytest.mark.parametrize(
    "lies", [[QuerySpan(1, 1, (0,))], [QuerySpan(1, 1, (0,)), QuerySpan(1, 1, (1,))], [QuerySpan(2, 2, (0,))]], ids=str
)
def test_each_kernel_of_a_layer_waits_for_those_before_it(watch: Watch, lies: list[QuerySpan]) -> None:
    rows = sum(lie.queries for lie in lies)
    of_attention = {"_attend"} if rows == len(lies) else {"_rotate_and_write", "_attend"}
    generator, dtype = torch.Generator().manual_seed(7), torch.float16
    layers = layers_of(Reference(), generator, dtype, True, True, 8)
    x = packed(generator, dtype, rows, layers[0].qkv.shape.inputs)
    angles = [(drawn.cos(), drawn.sin()) for drawn in torch.randn(2, rows, 4, generator=generator)]
    paged = paged_of(lies, layers, dtype)
    decoder = KERNELS.decoder(layers)
    decoder.run(x, angles, paged)
    assert set(watch.kernels) == {"_norm", "_gated"} | of_attention
    took = count(100, -1)
    for measure in decoder.rehearsals(paged.cache[0], *2 * (lambda _: next(took),)):
        measure()
    watch.kernels.clear()
    decoder.run(x, angles, paged)
    assert set(watch.kernels) == {"_few_rows"} | of_attention | ({"_norm"} if rows > 1 else set())


def test_the_kernel_behind_a_sum_of_ranks_waits_for_those_before_it(watch: Watch) -> None:
    """The norms behind attention and MLP are in that kernel, too."""
    generator, dtype = torch.Generator().manual_seed(7), torch.float16
    layers = layers_of(Reference(), generator, dtype, True, False, 8, gemma=True)
    x, summed = packed(generator, dtype, 2, layers[0].qkv.shape.inputs), list[torch.Tensor]()
    angles = [(drawn.cos(), drawn.sin()) for drawn in torch.randn(2, 2, 4, generator=generator)]
    paged = paged_of([QuerySpan(1, 1, (0,)), QuerySpan(1, 1, (1,))], layers, dtype)
    KERNELS.decoder(layers, SumThenNorm(KERNELS, summed.append)).run(x, angles, paged)
    assert len(summed) == 2 * len(layers)
    assert watch.kernels.count("_add_and_norm") == 2 * len(layers) - 1, "no norm of a layer is behind the last sum"
    assert watch.kernels.count("_norm") == 2, "before the first layer, and of the last sum"


@pytest.mark.parametrize(("rows", "inputs", "outs"), [(1, 1100, 37), (1, 3000, 8), (5, 70, 33)])
@pytest.mark.parametrize("inner", [None, Inner.SILU])
def test_weights_are_fetched_before_the_wait(
    watch: Watch, rows: int, inputs: int, outs: int, inner: Inner | None
) -> None:
    generator, dtype = torch.Generator().manual_seed(7), torch.float16
    weight = packed(generator, dtype, 2 * outs if inner else outs, inputs)
    norm = Norm(packed(generator, dtype, inputs), None, 1e-5, centred=False)
    KERNELS.few_rows(packed(generator, dtype, rows, inputs), weight, None, norm, inner)
    first = weight.data_ptr()
    assert set(watch.prefetched) <= set(range(first, first + weight.nbytes, 2)), "other memory is fetched"
    for row in weight:
        assert row.data_ptr() in watch.prefetched
