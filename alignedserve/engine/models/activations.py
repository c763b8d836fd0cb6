"""Activation functions: of an MLP without a gate, in place where torch can, and of layers that make vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import Activation
from alignedserve.architectures.vectors import DenseActivation


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: torch.relu_,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.QUICK_GELU: _quick_gelu,
    Activation.SILU: partial(F.silu, inplace=True),
}

OF_VECTORS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    DenseActivation.NONE: lambda x: x,
    DenseActivation.TANH: torch.tanh,
    DenseActivation.RELU: torch.relu,
    DenseActivation.GELU: F.gelu,
    DenseActivation.SIGMOID: torch.sigmoid,
}
