"""The Llama family: one pass over the concatenated tokens of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from alignedserve.architectures.families.llama import LlamaConfig, Temperature
from alignedserve.architectures.routing import ExpertNames
from alignedserve.engine.models.experts import DenseMlp, Mlp, add_normed, mlp_of
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.rope import Rotation
from alignedserve.engine.weights.adapters import in_halves
from alignedserve.kernels.common.decoder import Angles, AttentionLayer, Layer, Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.scoring import Scoring


class Llama(Model):
    def __init__(self, config: LlamaConfig, loader: Loader) -> None:
        self._config, self._kernels, self._ranks = config, loader.kernels, loader.ranks
        self._embedding = loader.embedding(
            f"{config.prefix}.embed_tokens.weight", config.vocab_size, config.hidden_size, config.tied_embeddings
        )
        # transformers rounds the factor before it multiplies
        self._embedding_factor = float(torch.tensor(config.embedding_factor, dtype=loader.dtype))
        self._mlps: list[Mlp] = []
        self._layers = [self._layer(number, loader) for number in range(config.num_layers)]
        self._decoder = loader.decoder(self._layers) if config.has_kernel else None
        self._norm = _norm(config, f"{config.prefix}.norm", loader)
        self._head = loader.head(f"{config.head}.weight", self._embedding, config.tied_embeddings)
        self._rotations = [Rotation(rope, loader.device) for rope in config.ropes]
        self._ones = torch.ones(config.head_dim, dtype=loader.dtype, device=loader.device)
        self._kv = KVProjections([layer.qkv for layer in self._layers], config.query_dim, config.kv_dim)

    def _layer(self, number: int, loader: Loader) -> Layer:
        config, prefix, names = self._config, f"{self._config.prefix}.layers.{number}", self._config.names
        attention = f"{prefix}.self_attn"
        sinks = loader.share(f"{attention}.sinks", config.num_heads).float() if config.has_sinks else None
        layer = AttentionLayer(
            attention_norm=_norm(config, f"{prefix}.input_layernorm", loader),
            qkv=_qkv(config, number, attention, loader),
            query_norm=_head_norm(config, f"{attention}.q_norm.weight", config.query_dim, loader),
            k_norm=_head_norm(config, f"{attention}.k_norm.weight", config.kv_dim, loader),
            out=loader.by_columns(f"{attention}.o_proj", config.hidden_size, config.query_dim, config.out_bias),
            after_attention=_norm_after(config, prefix, names.after_attention, loader),
            mlp_norm=_norm(config, f"{prefix}.{names.mlp_norm}", loader),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            turned=config.rope.dim,
            angles=config.rope_of(number),
            scoring=Scoring(
                config.scale(number), config.window(number), config.score_cap, sinks, stretch=config.stretch(number)
            ),
        )
        dense = ExpertNames(gate_up=names.gate_up)
        mlp = mlp_of(config, number, prefix, loader, config.mlp_bias, names.mlp, dense)
        if isinstance(mlp, DenseMlp):
            after = _norm_after(config, prefix, names.after_mlp, loader)
            mlp = replace(mlp, activation=config.activation, after=after)
        self._mlps.append(mlp)
        return mlp.completed(layer)

    def logits(self, states: Tensor) -> Tensor:
        logits, cap = self._head(states), self._config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x = self._embedding(tokens)
        if self._embedding_factor != 1:
            x = x * self._embedding_factor
        angles = [rotation.at(positions) for rotation in self._rotations]
        paged = attention.paged
        if paged is not None and self._decoder is not None and self._decoder.takes(len(tokens)):
            self._decoder.run(x, angles, paged, rows)
        else:
            self._layer_by_layer(x, positions, angles, attention)
        last = x if rows is None else x.index_select(0, rows)
        return self._normed(last, self._norm)

    def _layer_by_layer(self, x: Tensor, positions: Tensor, angles: Sequence[Angles], attention: Attention) -> None:
        """Run all layers on `x`, in place."""
        config, kernels = self._config, self._kernels
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_dim, kv_dim, num_tokens = config.query_dim, config.kv_dim, x.shape[0]
        factors = None if config.temperature is None else _factors(config.temperature, positions, x.device)
        for number, (layer, mlp) in enumerate(zip(self._layers, self._mlps, strict=True)):
            normed = self._normed(x, layer.attention_norm)
            qkv = layer.qkv(normed)
            by_head = qkv.view(num_tokens, -1, head_dim)
            if layer.query_norm is None or layer.k_norm is None:
                query, k = by_head.narrow(1, 0, heads), qkv.narrow(1, query_dim, kv_dim)
                if number not in config.still:
                    kernels.rotate(by_head.narrow(1, 0, heads + kv_heads), *angles[layer.angles])
                    if config.are_turned_of_one:
                        query, k = self._of_one(query), self._of_one(by_head.narrow(1, heads, kv_heads)).flatten(1)
                elif factors is not None:
                    query = (query * factors).to(x.dtype)
            else:
                query = self._normed_heads(by_head.narrow(1, 0, heads), layer.query_norm)
                turned = self._normed_heads(by_head.narrow(1, heads, kv_heads), layer.k_norm)
                kernels.rotate(query, *angles[layer.angles])
                kernels.rotate(turned, *angles[layer.angles])
                k = turned.view(num_tokens, kv_dim)
            v = qkv.narrow(1, query_dim + kv_dim, kv_dim)
            attended = attention.attend(number, query, k, v, layer.scoring, normed)
            add_normed(layer.out, layer.after_attention, attended.view(num_tokens, query_dim), x, kernels)
            mlp.add_to(self._normed(x, layer.mlp_norm), x)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        assert norm.weight is not None
        return self._kernels.rms_norm(x, norm.weight, norm.eps)

    def _of_one(self, heads: Tensor) -> Tensor:
        return self._kernels.rms_norm(heads, self._ones, self._config.norm_eps)

    def _normed_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Return [rows, heads, head_dim] after the norm of each head, or of all heads of all ranks together."""
        eps = self._config.norm_eps
        if not self._config.qk_norm_is_wide:
            return self._kernels.rms_norm(heads, weight, eps)
        rows = heads.flatten(1)
        if self._ranks.size == 1:
            return self._kernels.rms_norm(rows, weight, eps).view(heads.shape)
        wide = rows.float()
        squares = wide.square().sum(-1, keepdim=True)
        self._ranks.total(squares)
        wide *= torch.rsqrt(squares / (self._ranks.size * rows.shape[1]) + eps)
        return (weight * wide.to(rows.dtype)).view(heads.shape)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._kv(layer, inputs)
        by_head = k.unflatten(1, (-1, self._config.head_dim))
        norm = self._layers[layer].k_norm
        if norm is not None:
            by_head = self._normed_heads(by_head, norm)
        if layer in self._config.still:
            return k, v
        self._kernels.rotate(by_head, *self._rotations[self._layers[layer].angles].at(positions))
        return (self._of_one(by_head) if self._config.are_turned_of_one else by_head).flatten(1), v


def _factors(temperature: Temperature, positions: Tensor, device: torch.device) -> Tensor:
    """Return the factors of queries, [tokens, 1, 1]."""
    passed = torch.floor((positions.float() + 1) / temperature.tokens)
    return on_device(torch.log1p(passed) * temperature.weight + 1, device)[:, None, None]


def _qkv(config: LlamaConfig, number: int, attention: str, loader: Loader) -> Linear:
    """Read query, key and value as one layer."""
    outputs, hidden, bias = (config.query_dim, config.kv_dim, config.kv_dim), config.hidden_size, config.qkv_bias
    copies = (1, config.kv_copies, config.kv_copies)
    if config.names.qkv is not None:
        return loader.fused(f"{attention}.{config.names.qkv}", outputs, hidden, bias, copies)
    turning = partial(in_halves, head_dim=config.head_dim, turned=config.rope.dim)
    orders = (turning, turning, None) if config.turns_neighbours and number not in config.still else None
    return loader.by_rows([f"{attention}.{name}_proj" for name in "qkv"], outputs, hidden, bias, copies, orders)


def _norm(config: LlamaConfig, name: str, loader: Loader) -> Norm:
    return Norm(_weight(config, f"{name}.weight", config.hidden_size, loader), None, config.norm_eps, centred=False)


def _norm_after(config: LlamaConfig, layer: str, name: str | None, loader: Loader) -> Norm | None:
    return None if name is None else _norm(config, f"{layer}.{name}", loader)


def _head_norm(config: LlamaConfig, name: str, wide: int, loader: Loader) -> Tensor | None:
    if not config.qk_norm:
        return None
    return loader.share(name, wide) if config.qk_norm_is_wide else _weight(config, name, config.head_dim, loader)


def _weight(config: LlamaConfig, name: str, size: int, loader: Loader) -> Tensor:
    """Return the weight of a norm; one that the files have less one in fp32, as transformers computes with it."""
    if not config.norms_lack_one:
        return loader.vector(name, size)
    return loader.vector(name, size, dtype=torch.float32).add_(1)
