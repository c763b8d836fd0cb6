"""Tests of all layers by the Triton kernels, in Triton's interpreter, against torch call by call."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common.decoder import DecoderLayer, Paged
from alignedserve.kernels.common.linear import Way
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.kernels.samples import packed
from tests.kernels.test_decoder import BLOCK_SIZE, call_by_call, layers_of

KERNELS = TritonKernels()
OFF = {torch.float32: 1e-5, torch.float16: 0.01}
KINDS = {"opt": (False, False, False), "llama": (True, False, False), "qwen": (True, True, False), "gemma": (True,) * 3}
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]


def paged_of(lies: list[Lie], layers: list[DecoderLayer], dtype: torch.dtype) -> Paged:
    kv_dim = layers[0].kv_heads * layers[0].head_dim
    return Paged(torch.zeros(len(layers), 2 * 8, BLOCK_SIZE, kv_dim, dtype=dtype), Spans(lies, BLOCK_SIZE))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("opt", torch.float16), ("llama", torch.float16), ("qwen", torch.float32), ("gemma", torch.float32)],
)
def test_layers_give_what_torch_gives_call_by_call(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    llama, head_norms, gemma = KINDS[kind]
    layers = layers_of(Reference(), generator, dtype, llama, head_norms, 6 if llama else 0, gemma=gemma)
    lies = [Lie(1, 1, (0,)), Lie(5, 5, (~1, 2)), Lie(1, 1, (3,))]
    x = packed(generator, dtype, 7, layers[0].qkv.shape.inputs)
    drawn = torch.randn(2, 7, 3, generator=generator)
    angles = [(angle.cos(), angle.sin()) for angle in drawn] if llama else []
    expected, into, paged = x.clone(), paged_of(lies, layers, dtype), paged_of(lies, layers, dtype)
    call_by_call(Reference(), layers, expected, angles, into, Way.TORCH)
    decoder = KERNELS.decoder(layers)
    assert decoder is not None
    assert decoder.takes(7)
    assert decoder.pauses is None
    decoder.run(x, angles, paged)
    torch.testing.assert_close(x, expected, rtol=OFF[dtype], atol=OFF[dtype])
    torch.testing.assert_close(paged.cache, into.cache, rtol=OFF[dtype], atol=OFF[dtype])
