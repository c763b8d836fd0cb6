"""Llama 4's text part: stretches of attention in the layers that turn, mixtures of experts in some layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from alignedserve.architectures.families.llama4 import Llama4Config
from alignedserve.engine.adapters.layers import AdaptedLayers
from alignedserve.engine.models.experts import (
    DenseMlp,
    ExpertsMlp,
    Mlp,
    Router,
    SharedMlp,
    apart_experts,
    dense_mlp,
    experts_of,
)
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.rope import Rotation, part_neighbours
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.scoring import Scoring


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Linear
    out: Linear
    turns: bool
    mlp_norm: Tensor
    mlp: Mlp
    scoring: Scoring


@dataclass(frozen=True)
class _Places:
    """What the positions of a step's tokens make of their heads."""

    angles: tuple[Tensor, Tensor]
    factors: Tensor | None  # [tokens, 1, 1]: of the queries of layers that do not turn


class Llama4(Model):
    def __init__(self, config: Llama4Config, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        hidden, model = config.hidden_size, f"{config.prefix}model"
        self._embedding = loader.embedding(
            f"{model}.embed_tokens.weight", config.vocab_size, hidden, config.tied_embeddings
        )
        self._layers = [self._layer(number, loader) for number in range(config.num_layers)]
        self._norm = loader.vector(f"{model}.norm.weight", hidden)
        self._head = loader.head(f"{config.prefix}lm_head.weight", self._embedding, config.tied_embeddings)
        self._ones = torch.ones(config.head_dim, dtype=loader.dtype, device=loader.device)
        self._rotation = Rotation(config.rope, loader.device)
        self._kv = KVProjections([layer.qkv for layer in self._layers], config.query_dim, config.kv_dim)

    def _layer(self, number: int, loader: Loader) -> _Layer:
        config, prefix = self._config, f"{self._config.prefix}model.layers.{number}"
        hidden, attention = config.hidden_size, f"{prefix}.self_attn"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        rows, copies = (config.query_dim, config.kv_dim, config.kv_dim), (1, config.kv_copies, config.kv_copies)
        return _Layer(
            norm=loader.vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=loader.by_rows(qkv, rows, hidden, config.bias, copies),
            out=loader.by_columns(f"{attention}.o_proj", hidden, config.query_dim, config.bias),
            turns=config.turns[number],
            mlp_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self._mlp(number, f"{prefix}.feed_forward", loader),
            scoring=Scoring(config.scale(number), stretch=config.stretch(number)),
        )

    def _mlp(self, number: int, name: str, loader: Loader) -> Mlp:
        config, routing = self._config, self._config.routing_of(number)
        if routing is None:
            return dense_mlp(loader, name, config.hidden_size, config.intermediate_size)
        apart = replace(apart_experts(loader, routing), adapted=AdaptedLayers())

        def mlp(of: str, loader: Loader) -> DenseMlp:
            return dense_mlp(loader, f"{name}.{of}", config.hidden_size, config.expert_size, is_summed=False)

        weight = loader.vector(f"{name}.router.weight", routing.experts, config.hidden_size, dtype=torch.float32)
        return ExpertsMlp(
            Router(routing, self._kernels, weight),
            experts_of([mlp(f"experts.{expert}", apart) for expert in range(routing.experts)], routing, loader),
            SharedMlp(mlp("shared_expert", loader), None),
            loader.ranks.total if loader.ranks.size > 1 else None,
        )

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        kernels, eps, x = self._kernels, self._config.norm_eps, self._embedding(tokens)
        places = _Places(self._rotation.at(positions), self._factors(positions, x))
        for number, layer in enumerate(self._layers):
            normed = kernels.rms_norm(x, layer.norm, eps)
            layer.out.add_to(self._attended(number, layer, normed, places, attention), x)
            layer.mlp.add_to(kernels.rms_norm(x, layer.mlp_norm, eps), x)
        last = x if rows is None else x.index_select(0, rows)
        return kernels.rms_norm(last, self._norm, eps)

    def _factors(self, positions: Tensor, x: Tensor) -> Tensor | None:
        temperature = self._config.temperature
        if temperature is None:
            return None
        passed = torch.floor((positions.float() + 1) / temperature.tokens)
        return on_device(torch.log1p(passed) * temperature.weight + 1, x.device)[:, None, None]

    def _attended(self, number: int, layer: _Layer, normed: Tensor, places: _Places, attention: Attention) -> Tensor:
        config = self._config
        query, k, v = layer.qkv(normed).split((config.query_dim, config.kv_dim, config.kv_dim), dim=1)
        by_head = query.unflatten(1, (-1, config.head_dim))
        if layer.turns:
            by_head, k = self._turned(by_head, places.angles), self._turned_k(k, places.angles)
        elif places.factors is not None:
            by_head = (by_head * places.factors).to(normed.dtype)
        return attention.attend(number, by_head, k, v, layer.scoring, normed).flatten(1)

    def _turned_k(self, k: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return self._turned(k.unflatten(1, (-1, self._config.head_dim)), angles).flatten(1)

    def _turned(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return turned heads, of the length one where they have it; numbers that turn together lie apart there."""
        turned = part_neighbours(heads, torch.empty_like(heads, memory_format=torch.contiguous_format))
        self._kernels.rotate(turned, *angles)
        return self._kernels.rms_norm(turned, self._ones, self._config.norm_eps) if self._config.qk_norm else turned

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._kv(layer, inputs)
        if self._layers[layer].turns:
            k = self._turned_k(k, self._rotation.at(positions))
        return k, v
