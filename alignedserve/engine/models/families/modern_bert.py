"""ModernBERT: an encoder with rotary positions, a gated MLP, and layers that read near tokens alone.

word ─▶ norm ─▶ x
x ─▶ norm ─▶ query, K and V ─▶ turn ─▶ attention ─▶ out ─▶ + x ─▶ norm ─▶ up, gate ─▶ down ─▶ + ─▶ the next layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.families.encoders import ModernBertConfig
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.encoder import ROWS_AT_ONCE, TextHead, TextInputs, head_layer
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.decoder import Angles, Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import TextRows

_PREFIX = "model"


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm | None  # the first layer has none: the embeddings have one
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up_gate: Linear
    down: Linear
    side: int | None


class ModernBert:
    def __init__(self, config: ModernBertConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        self._rotation = Rotation(config.rope, loader.device)
        self._local_rotation = Rotation(config.local_rope, loader.device)
        embeddings = f"{_PREFIX}.embeddings"
        self.words = loader.vector(f"{embeddings}.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        self._norm = _norm(f"{embeddings}.norm", config, loader)
        self._layers = [_layer(number, config, loader) for number in range(config.depth)]
        self._final_norm = _norm(f"{_PREFIX}.final_norm", config, loader)
        self.head: TextHead | None = _head(config, loader) if config.labels else None

    def run(self, inputs: TextInputs) -> Tensor:
        x = self._normed(F.embedding(inputs.tokens, self.words), self._norm)
        angles, local_angles = self._rotation.at(inputs.positions), self._local_rotation.at(inputs.positions)
        for layer in self._layers:
            self._run(layer, x, angles if layer.side is None else local_angles, inputs.rows)
        return self._normed(x, self._final_norm)

    def _run(self, layer: _Layer, x: Tensor, angles: Angles, texts: TextRows) -> None:
        """Run a layer on all rows, in place."""
        head_dim = self._config.head_dim
        normed = x if layer.attention_norm is None else self._normed(x, layer.attention_norm)
        by_head = layer.qkv(normed).unflatten(1, (-1, head_dim))
        query, k, v = by_head.chunk(3, dim=1)
        self._kernels.rotate(by_head.narrow(1, 0, 2 * self._config.num_heads), *angles)
        attended = self._kernels.attend_texts(query, k, v, texts, head_dim**-0.5, layer.side).flatten(1)
        for part, of_part in zip(x.split(ROWS_AT_ONCE), attended.split(ROWS_AT_ONCE), strict=True):
            layer.out.add_to(of_part, part)
            up, gate = layer.up_gate(self._normed(part, layer.mlp_norm)).chunk(2, dim=1)
            layer.down.add_to(self._activation(up) * gate, part)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)


def _layer(number: int, config: ModernBertConfig, loader: Loader) -> _Layer:
    name, hidden, inner = f"{_PREFIX}.layers.{number}", config.hidden_size, config.intermediate_size
    return _Layer(
        attention_norm=_norm(f"{name}.attn_norm", config, loader) if number else None,
        qkv=loader.linear(f"{name}.attn.Wqkv", 3 * hidden, hidden, config.attention_bias),
        out=loader.linear(f"{name}.attn.Wo", hidden, hidden, config.attention_bias),
        mlp_norm=_norm(f"{name}.mlp_norm", config, loader),
        up_gate=loader.linear(f"{name}.mlp.Wi", 2 * inner, hidden, config.mlp_bias),
        down=loader.linear(f"{name}.mlp.Wo", hidden, inner, config.mlp_bias),
        side=config.sides[number],
    )


def _norm(name: str, config: ModernBertConfig, loader: Loader) -> Norm:
    return loader.layer_norm(name, config.hidden_size, config.norm_eps, bias=config.norm_bias)


def _head(config: ModernBertConfig, loader: Loader) -> Callable[[Tensor], Tensor]:
    hidden, activation = config.hidden_size, ACTIVATIONS[config.head_activation]
    dense = head_layer("head.dense", hidden, hidden, loader, config.head_bias)
    weight = loader.vector("head.norm.weight", hidden, dtype=torch.float32)
    bias = loader.vector("head.norm.bias", hidden, dtype=torch.float32) if config.norm_bias else None
    out = head_layer("classifier", config.labels, hidden, loader)
    return lambda states: out(F.layer_norm(activation(dense(states)), (hidden,), weight, bias, config.norm_eps))
