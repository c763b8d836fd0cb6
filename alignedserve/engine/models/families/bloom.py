"""Bloom, Falcon, MPT, OPT, Phi, GPT-NeoX: LayerNorms, an MLP without a gate, and attention before it or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import Activation
from alignedserve.architectures.families.bloom import BloomConfig, LayerOrder
from alignedserve.engine.adapters.layers import in_turn
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.decoder import Angles, DecoderLayer, Inner, Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import Scoring

_FIRST_PLACE = 2  # of the table of positions: those before it are for padding


class Bloom(Model):
    def __init__(self, config: BloomConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        names, hidden = config.names, config.hidden_size
        self._slopes, words = _own_slopes(config, loader), config.embedding_dim or hidden
        self._embedding = loader.embedding(
            f"{names.embedding}.weight", config.vocab_size, words, config.tied_embeddings
        )
        self._places = self._project_in = self._project_out = None
        if names.positions is not None:
            table = loader.vector(f"{names.positions}.weight", config.max_positions + _FIRST_PLACE, hidden)
            self._places = table[_FIRST_PLACE:]
        if words != hidden:
            self._project_in = loader.linear(names.project_in, hidden, words)
            self._project_out = loader.linear(names.project_out, words, hidden)
        self._embedding_norm = self._norm(loader, f"{names.embedding}_layernorm") if config.embedding_norm else None
        self._layers = [self._layer(number, loader) for number in range(config.num_layers)]
        is_of_opt = names.positions is not None and config.order is LayerOrder.SERIAL
        has_kernel = is_of_opt and config.activation is Activation.RELU
        self._decoder = loader.decoder(self._layers) if has_kernel else None
        self._final_norm = self._norm(loader, names.final_norm) if config.final_norm else None
        head = next((head for head in names.heads if f"{head}.weight" in loader.tensors), names.heads[-1])
        self._head = loader.head(f"{head}.weight", self._embedding, config.tied_embeddings, config.head_bias)
        self._rotation = Rotation(config.rope, loader.device) if config.rope else None
        self._kv = KVProjections([layer.qkv for layer in self._layers], config.query_dim, config.kv_dim)

    def _layer(self, number: int, loader: Loader) -> DecoderLayer:
        config, names, prefix = self._config, self._config.names, f"{self._config.names.layers}.{number}"
        hidden, inner = config.hidden_size, config.intermediate_size
        mlp_bias = config.bias if config.mlp_bias is None else config.mlp_bias
        norm = self._norm(loader, f"{prefix}.{names.attention_norm}")
        has_one = config.order is LayerOrder.BESIDE
        return DecoderLayer(
            attention_norm=norm,
            qkv=self._qkv(loader, [f"{prefix}.{name}" for name in names.qkv]),
            query_norm=None,
            k_norm=None,
            out=loader.by_columns(f"{prefix}.{names.out}", hidden, config.query_dim, config.bias),
            mlp_norm=norm if has_one else self._norm(loader, f"{prefix}.{names.mlp_norm}"),
            up=loader.by_rows([f"{prefix}.{names.up}"], [inner], hidden, mlp_bias),
            down=loader.by_columns(f"{prefix}.{names.down}", hidden, inner, mlp_bias),
            inner=Inner.RELU,  # where a kernel runs the layer
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            turned=0,
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
        return loader.layer_norm(name, config.hidden_size, config.norm_eps, config.norm_affine, config.norm_bias)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x, paged = self._embedding(tokens), attention.paged
        if self._project_in is not None:
            x = self._project_in(x)
        if self._places is not None:
            x += F.embedding(positions, self._places)
        if self._embedding_norm is not None:
            x = self._normed(x, self._embedding_norm)
        if paged is not None and self._decoder is not None and self._decoder.takes(len(tokens)):
            self._decoder.run(x, (), paged, rows)
        else:
            angles = self._angles(positions)
            for number, layer in enumerate(self._layers):
                x = self._run(number, layer, x, angles, attention)
        last = x if rows is None else x.index_select(0, rows)
        last = last if self._final_norm is None else self._normed(last, self._final_norm)
        return last if self._project_out is None else self._project_out(last)

    def _run(self, number: int, layer: DecoderLayer, x: Tensor, angles: Angles | None, attention: Attention) -> Tensor:
        """Return the output of a layer, which may lie where `x` was."""
        order = self._config.order
        if order is LayerOrder.NORMS_LAST:
            layer.out.add_to(self._attended(number, layer, x, angles, attention), x)
            x = self._normed(x, layer.attention_norm)
            layer.down.add_to(self._activation(layer.up(x)), x)
            return self._normed(x, layer.mlp_norm)
        normed = self._normed(x, layer.attention_norm)
        read = self._normed(x, layer.mlp_norm) if order is LayerOrder.TWO_NORMS else normed
        x = normed if order is LayerOrder.NORMS_STAY else x
        layer.out.add_to(self._attended(number, layer, normed, angles, attention), x)
        read = read if order.is_parallel else self._normed(x, layer.mlp_norm)
        x = read if order is LayerOrder.NORMS_STAY else x
        layer.down.add_to(self._activation(layer.up(read)), x)
        return x

    def _attended(
        self, number: int, layer: DecoderLayer, normed: Tensor, angles: Angles | None, attention: Attention
    ) -> Tensor:
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

    def _angles(self, positions: Tensor) -> Angles | None:
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
