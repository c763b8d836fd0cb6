"""Bloom, Falcon, MPT, Phi, GPT-NeoX: LayerNorms, an MLP without a gate, and attention before it or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from alignedserve.architectures.families.bloom import BloomConfig, LayerOrder
from alignedserve.engine.adapters.layers import in_turn
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import Scoring

Angles = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm  # that of attention, where the MLP reads what attention reads
    up: Linear
    down: Linear
    scoring: Scoring


class Bloom(Model):
    def __init__(self, config: BloomConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        names, hidden = config.names, config.hidden_size
        self._slopes = _own_slopes(config, loader)
        self._embedding = loader.embedding(
            f"{names.embedding}.weight", config.vocab_size, hidden, config.tied_embeddings
        )
        self._embedding_norm = self._norm(loader, f"{names.embedding}_layernorm") if config.embedding_norm else None
        self._layers = [self._layer(number, loader) for number in range(config.num_layers)]
        self._final_norm = self._norm(loader, names.final_norm)
        head = next((head for head in names.heads if f"{head}.weight" in loader.tensors), names.heads[-1])
        self._head = loader.head(f"{head}.weight", self._embedding, config.tied_embeddings, config.head_bias)
        self._rotation = Rotation(config.rope, loader.device) if config.rope else None
        self._kv = KVProjections([layer.qkv for layer in self._layers], config.query_dim, config.kv_dim)

    def _layer(self, number: int, loader: Loader) -> _Layer:
        config, names, prefix = self._config, self._config.names, f"{self._config.names.layers}.{number}"
        hidden, inner = config.hidden_size, config.intermediate_size
        mlp_bias = config.bias if config.mlp_bias is None else config.mlp_bias
        norm = self._norm(loader, f"{prefix}.{names.attention_norm}")
        has_one = config.order is LayerOrder.BESIDE
        return _Layer(
            attention_norm=norm,
            qkv=self._qkv(loader, [f"{prefix}.{name}" for name in names.qkv]),
            out=loader.by_columns(f"{prefix}.{names.out}", hidden, config.query_dim, config.bias),
            mlp_norm=norm if has_one else self._norm(loader, f"{prefix}.{names.mlp_norm}"),
            up=loader.by_rows([f"{prefix}.{names.up}"], [inner], hidden, mlp_bias),
            down=loader.by_columns(f"{prefix}.{names.down}", hidden, inner, mlp_bias),
            scoring=Scoring(config.scale(number), config.window(number), slopes=self._slopes),
        )

    def _qkv(self, loader: Loader, names: Sequence[str]) -> Linear:
        config, hidden, bias = self._config, self._config.hidden_size, self._config.bias
        outputs = (config.query_dim, config.kv_dim, config.kv_dim)
        if len(names) > 1:
            return loader.by_rows(names, outputs, hidden, bias)
        if not config.is_by_head:
            return loader.fused(names[0], outputs, hidden, bias)
        order = partial(in_turn, heads=config.num_kv_heads, group=config.num_heads // config.num_kv_heads)
        return loader.by_rows(names, [sum(outputs)], hidden, bias, orders=[order])

    def _norm(self, loader: Loader, name: str) -> Norm:
        config = self._config
        return loader.layer_norm(name, config.hidden_size, config.norm_eps, bias=config.norm_bias)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x = self._embedding(tokens)
        if self._embedding_norm is not None:
            x = self._normed(x, self._embedding_norm)
        angles = self._angles(positions)
        for number, layer in enumerate(self._layers):
            x = self._run(number, layer, x, angles, attention)
        last = x if rows is None else x.index_select(0, rows)
        return self._normed(last, self._final_norm)

    def _run(self, number: int, layer: _Layer, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
        """Return the output of a layer, which may lie where `x` was."""
        order, normed = self._config.order, self._normed(x, layer.attention_norm)
        read = self._normed(x, layer.mlp_norm) if order is LayerOrder.TWO_NORMS else normed
        x = normed if order is LayerOrder.NORMS_STAY else x
        layer.out.add_to(self._attended(number, layer, normed, angles, attention), x)
        read = read if order.is_parallel else self._normed(x, layer.mlp_norm)
        x = read if order is LayerOrder.NORMS_STAY else x
        layer.down.add_to(self._activation(layer.up(read)), x)
        return x

    def _attended(self, number: int, layer: _Layer, normed: Tensor, angles: Angles, attention: Attention) -> Tensor:
        config, heads, kv_heads = self._config, self._config.num_heads, self._config.num_kv_heads
        qkv = self._clipped(layer.qkv(normed))
        by_head = qkv.view(len(qkv), -1, config.head_dim)
        if angles is not None:
            self._kernels.rotate(by_head.narrow(1, 0, heads + kv_heads), *angles)
        _, k, v = qkv.split((config.query_dim, config.kv_dim, config.kv_dim), dim=1)
        attended = attention.attend(number, by_head.narrow(1, 0, heads), k, v, layer.scoring, normed)
        return attended.view(len(qkv), config.query_dim)

    def _clipped(self, numbers: Tensor) -> Tensor:
        clip = self._config.clip
        return numbers if clip is None else numbers.clamp_(-clip, clip)

    def _angles(self, positions: Tensor) -> Angles:
        return None if self._rotation is None else self._rotation.at(positions)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self._clipped(numbers) for numbers in self._kv(layer, inputs))
        angles = self._angles(positions)
        if angles is not None:
            self._kernels.rotate(k.unflatten(1, (-1, self._config.head_dim)), *angles)
        return k, v


def _own_slopes(config: BloomConfig, loader: Loader) -> Tensor | None:
    """Return the slopes of this rank's heads."""
    if not config.slopes:
        return None
    first = loader.ranks.rank * config.num_heads
    return torch.tensor(config.slopes[first : first + config.num_heads], dtype=torch.float32, device=loader.device)
