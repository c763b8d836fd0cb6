"""Tests that a model whose layers are quantised while it is loaded gives the logits of transformers with the same
quantised weights, expanded to fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from alignedserve.architectures.quantization import GROUP, Quantization
from alignedserve.kernels.common.quantised import quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from tests.engine.driver import prompt_of
from tests.engine.test_models import TOKENS, FolderOf, furthest, logits_of
from tests.models import MODELS
from tests.reference import CLOSE, load

QUANTIZED = [Quantization.INT8, Quantization.INT4]


def expanded_reference(folder: Path, quantization: Quantization) -> Any:
    """Return the model in transformers, each weight of a linear layer as the engine keeps it."""
    network = load(folder)
    head = network.get_output_embeddings()
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                bits = 8 if layer is head else quantization.bits
                assert bits is not None
                group = GROUP if bits == 4 else layer.in_features
                layer.weight.copy_(quantised(layer.weight, bits, group).expanded())
    return network


def kernels_here() -> list[Kernels]:
    return [Reference(), Native(Library())]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_logits_are_those_of_the_expanded_weights(name: str, quantization: Quantization, folder_of: FolderOf) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    with torch.inference_mode():
        expected = expanded_reference(folder, quantization)(torch.tensor([tokens])).logits[0]
    for kernels in kernels_here():
        assert furthest(logits_of(folder, tokens, kernels=kernels, quantization=quantization), expected) < CLOSE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_in_bf16_they_are_near(name: str, quantization: Quantization, folder_of: FolderOf) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    exact = logits_of(folder, tokens, quantization=quantization)
    near = logits_of(folder, tokens, torch.bfloat16, Native(Library()), quantization=quantization)
    assert float((near - exact).norm() / exact.norm()) < 0.25  # random networks enlarge errors
