"""BERT, RoBERTa, XLM-R, CamemBERT and ELECTRA: encoders of one architecture.

The rows of all texts of a step run at once, each row by itself but in attention:

    word + position + type ─▶ norm ─▶ x
    x ─▶ query, K and V ─▶ attention ─▶ out ─▶ + x ─▶ norm ─▶ up ─▶ gelu ─▶ down ─▶ + ─▶ norm ─▶ the next layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.families.encoders import BertConfig
from alignedserve.engine.models.activations import OF_VECTORS
from alignedserve.engine.models.encoder import ROWS_AT_ONCE, TextHead, TextInputs, gelu_of, head_layer
from alignedserve.engine.models.loading import Loader
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import TextRows


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    norm: Norm


class Bert:
    def __init__(self, config: BertConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = gelu_of(config.activation, loader.kernels)
        prefix, size, hidden = config.family.prefix, config.embedding_size, config.hidden_size
        at = f"{prefix}.embeddings"
        self.words = loader.vector(f"{at}.word_embeddings.weight", config.vocab_size, size)
        num_positions = config.first_position + config.max_positions
        self._places = loader.vector(f"{at}.position_embeddings.weight", num_positions, size)[config.first_position :]
        self._types = loader.vector(f"{at}.token_type_embeddings.weight", config.types, size)
        self._norm = _norm(f"{at}.LayerNorm", size, config, loader)
        self._project = loader.linear(f"{prefix}.embeddings_project", hidden, size, True) if size != hidden else None
        self._layers = [_layer(f"{prefix}.encoder.layer.{number}", config, loader) for number in range(config.depth)]
        self.head: TextHead | None = _head(config, loader) if config.labels else None

    def run(self, inputs: TextInputs) -> Tensor:
        x = self._embedded(inputs)
        for layer in self._layers:
            self._run(layer, x, inputs.rows)
        return x

    def _embedded(self, inputs: TextInputs) -> Tensor:
        x = F.embedding(inputs.tokens, self.words)
        x += F.embedding(inputs.segments, self._types) if self._config.marks_second else self._types[0]
        x += F.embedding(inputs.positions, self._places)
        x = self._normed(x, self._norm)
        return x if self._project is None else self._project(x)

    def _run(self, layer: _Layer, x: Tensor, texts: TextRows) -> None:
        """Run a layer on all rows, in place."""
        head_dim = self._config.head_dim
        query, k, v = layer.qkv(x).unflatten(1, (3, -1, head_dim)).unbind(1)
        attended = self._kernels.attend_texts(query, k, v, texts, head_dim**-0.5).flatten(1)
        for part, of_part in zip(x.split(ROWS_AT_ONCE), attended.split(ROWS_AT_ONCE), strict=True):
            layer.out.add_to(of_part, part)
            inner = self._normed(part, layer.attention_norm)
            layer.down.add_to(self._activation(layer.up(inner)), inner)
            part.copy_(self._normed(inner, layer.norm))

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)


def _layer(name: str, config: BertConfig, loader: Loader) -> _Layer:
    hidden, inner, attention = config.hidden_size, config.intermediate_size, f"{name}.attention"
    parts = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
    return _Layer(
        qkv=loader.by_rows(parts, [hidden] * 3, hidden, True),
        out=loader.linear(f"{attention}.output.dense", hidden, hidden, True),
        attention_norm=_norm(f"{attention}.output.LayerNorm", hidden, config, loader),
        up=loader.linear(f"{name}.intermediate.dense", inner, hidden, True),
        down=loader.linear(f"{name}.output.dense", hidden, inner, True),
        norm=_norm(f"{name}.output.LayerNorm", hidden, config, loader),
    )


def _norm(name: str, size: int, config: BertConfig, loader: Loader) -> Norm:
    if f"{name}.gamma" in loader.tensors:  # as BERT's first files call them
        weight, bias = (loader.vector(f"{name}.{part}", size) for part in ("gamma", "beta"))
        return Norm(weight, bias, config.norm_eps, centred=True)
    return loader.layer_norm(name, size, config.norm_eps)


def _head(config: BertConfig, loader: Loader) -> Callable[[Tensor], Tensor]:
    family, hidden = config.family, config.hidden_size
    dense, out = head_layer(family.dense, hidden, hidden, loader), head_layer(family.out, config.labels, hidden, loader)
    activation = OF_VECTORS[family.activation]
    return lambda states: out(activation(dense(states)))
