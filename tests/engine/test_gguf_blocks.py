"""Tests that the blocks of GGUF files have the numbers that the gguf package expands them to."""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from alignedserve.architectures.gguf.places import Kind
from alignedserve.engine.weights import gguf_weights
from alignedserve.engine.weights.gguf_weights import from_blocks
from alignedserve.kernels.library import Library
from tests.gguf_files import QUANTISED, random_blocks
from tests.kernels.every import native_sets


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "_kernel", lambda _: None)


def blocks_of(kind: Kind, flat: bool) -> NDArray[np.uint8]:
    """With `flat`, some scales are zero: then all numbers of a group are its least."""
    blocks = random_blocks(kind, (64, 512), seed=1)
    if flat:
        blocks.reshape(-1, kind.num_bytes(kind.block))[::3, : 2 if kind is not Kind.Q6_K else -2] = 0
    return blocks


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("flat", [False, True])
def test_blocks_have_the_numbers_of_the_gguf_package(kind: Kind, flat: bool) -> None:
    blocks = blocks_of(kind, flat)
    expected = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType[kind.name]).copy())
    weight = from_blocks(kind, torch.from_numpy(blocks))
    assert weight.shape == (64, 512)
    scale, zero = (of.float().abs().repeat_interleave(weight.group, 1) for of in (weight.scale, weight.zeros))
    assert ((weight.expanded() - expected).abs() <= 2.0**-23 * scale * (weight.q + zero)).all()
    if weight.zero is None:
        assert torch.equal(weight.expanded(), expected)
    assert int(weight.q.max()) < 2**weight.bits


@pytest.mark.parametrize("isa", native_sets())
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
@pytest.mark.parametrize("flat", [False, True])
def test_the_kernels_unpack_the_same(isa: str, kind: Kind, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: what a model answers does not depend on which of them read it."""
    blocks = torch.from_numpy(blocks_of(kind, flat))
    monkeypatch.setattr(gguf_weights, "Library", partial(Library, isa))
    own = gguf_weights._kernel.__wrapped__(kind)
    assert own is not None
    monkeypatch.setattr(gguf_weights, "_kernel", lambda _: own)
    found = from_blocks(kind, blocks)
    monkeypatch.setattr(gguf_weights, "_kernel", lambda _: None)
    expected = from_blocks(kind, blocks)
    assert (found.bits, found.group) == (expected.bits, expected.group)
    assert torch.equal(found.q, expected.q)
    assert torch.equal(found.scale, expected.scale.float())
    assert (found.zero is None) == (expected.zero is None)
    assert torch.equal(found.zeros, expected.zeros)


def test_our_sizes_are_those_of_the_format() -> None:
    sizes = {kind.name: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] for kind in Kind}
    assert {kind.name: (kind.block, kind.num_bytes(kind.block)) for kind in Kind} == sizes
    assert {kind.name: kind.value[0] for kind in Kind} == {kind.name: GGMLQuantizationType[kind.name] for kind in Kind}
    assert np.dtype(np.float16).itemsize == Kind.F16.num_bytes(1)
