"""Models of transformers with quantised weights that are expanded to fp32: what quantised layers are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization, group_of
from alignedserve.architectures.routing import MixtureConfig
from alignedserve.kernels.common.quantised import quantised
from tests.reference import load

ROUTERS = {"gate", "router", "wg", "shared_expert_gate"}  # layers of few numbers that choose experts: they stay plain


def expanded_reference(folder: Path, quantization: Quantization) -> Any:
    """Return the model in transformers, each weight of a linear layer as the engine keeps it.

    Experts of our own modules count as linear layers. What K and V are made of compressed vectors with stays as it is.
    """
    from transformers.models.falcon.modeling_falcon import FalconLinear  # takes a second to import
    from transformers.pytorch_utils import Conv1D

    network, config = load(folder), read_config(folder)
    head = network.get_output_embeddings()
    with torch.no_grad():
        for name, layer in network.named_modules():
            if ROUTERS & {*name.split(".")[-2:]} or name.endswith("kv_b_proj"):
                continue
            if type(layer) is nn.Linear or isinstance(layer, FalconLinear):
                layer.weight.copy_(_rounded(layer.weight, 8 if layer is head else quantization.bits))
            elif isinstance(layer, Conv1D):
                layer.weight.copy_(_rounded(layer.weight.t(), quantization.bits).t())
        routing = config.routing if isinstance(config, MixtureConfig) else None
        is_transposed = routing is not None and routing.stack is not None  # [inputs, outputs]
        for parameter in () if isinstance(config, GenericConfig) else network.parameters():
            if parameter.ndim == 3:
                for expert in parameter.mT if is_transposed else parameter:
                    expert.copy_(_rounded(expert, quantization.bits))
    return network


def _rounded(weight: torch.Tensor, bits: int | None) -> torch.Tensor:
    assert bits is not None
    return quantised(weight, bits, group_of(weight.shape[1])).expanded()
