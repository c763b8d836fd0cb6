"""A model as the engine runs it, for all logits of a text in one pass, and how far logits are from those of others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.models.families.choice import load_model
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import attention_of
from alignedserve.engine.weights.forms import weights_of
from alignedserve.kernels.common.int8_kv import vector_of
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import AnyQuantised, QuantisedLinear
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels

_BLOCK_SIZE = 16


class OnePass:
    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        kernels: Kernels,
        quantization: Quantization = Quantization.NONE,
        kv_dtype: KvDtype = KvDtype.AUTO,
        squares: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._config, self._dtype, self._kernels, self._kv_dtype = read_config(folder), dtype, kernels, kv_dtype
        self.linears: list[Linear] = []  # those that are not quantised
        loader = Loader(
            weights_of(folder), dtype, kernels, self._make_linear, quantization=quantization, squares=squares
        )
        with torch.inference_mode():
            self._model = load_model(self._config, loader)

    def _make_linear(self, weight: Tensor | AnyQuantised, bias: Tensor | None) -> Linear:
        made = self._kernels.layer(weight, bias, self._dtype)
        if not isinstance(made, QuantisedLinear):
            self.linears.append(made)
        return made

    @torch.inference_mode()
    def __call__(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the logits of every token."""
        config = self._config
        blocks = range(-(-len(tokens) // _BLOCK_SIZE))
        dtype, vector = vector_of(self._kv_dtype, self._dtype, config.num_kv_heads, config.head_dim)
        cache = torch.empty(config.num_layers, 2 * len(blocks), _BLOCK_SIZE, vector, dtype=dtype)
        cache.view(torch.uint8).fill_(0xFF)  # NaN, which shows if it is read
        spans = Spans([QuerySpan(len(tokens), len(tokens), blocks)], _BLOCK_SIZE)
        attention = attention_of(spans, cache, self._kernels)
        return self._model.forward(torch.tensor(tokens), spans.positions, None, attention)


# --- How far logits are from others

_ROWS = 64  # whose distributions are compared at once, in fp64


class Divergence(NamedTuple):
    mean: float
    most: float
    same: float  # share of tokens with the same best next token


def divergence(expected: Tensor, logits: Tensor) -> Divergence:
    """Return how far each token's distribution is from the expected one (Kullback and Leibler).

    Both are [tokens, vocabulary], and may be log-probabilities as well.
    """
    if expected.shape != logits.shape:
        raise ValueError(f"logits of different shapes: {tuple(expected.shape)} and {tuple(logits.shape)}")
    each = torch.cat([_each(*rows) for rows in zip(expected.split(_ROWS), logits.split(_ROWS), strict=True)])
    same = (expected.argmax(-1) == logits.argmax(-1)).double()
    return Divergence(each.mean().item(), each.max().item(), same.mean().item())


def _each(expected: Tensor, logits: Tensor) -> Tensor:
    wanted, found = (rows.double().log_softmax(-1) for rows in (expected, logits))
    return (wanted.exp() * (wanted - found)).sum(-1)
