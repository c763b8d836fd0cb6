"""The Llama family: one pass over the concatenated tokens of many requests."""

from __future__ import annotations

import torch
from torch import Tensor

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.engine.models.experts import DenseMlp, Mlp, mlp_of
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.decoder import AttentionLayer, DecoderLayer, Norm
from alignedserve.kernels.common.scoring import Scoring


class Llama:
    def __init__(self, config: LlamaConfig, loader: Loader) -> None:
        self._config, self._kernels, self._ranks = config, loader.kernels, loader.ranks
        hidden, head_dim = config.hidden_size, config.head_dim
        fused = []

        def norm(name: str) -> Norm:
            return Norm(loader.vector(name, hidden), None, config.norm_eps, centred=False)

        def head_norm(name: str, wide: int) -> Tensor | None:
            if not config.qk_norm:
                return None
            return loader.share(name, wide) if config.qk_norm_is_wide else loader.vector(name, head_dim)

        def sinks(name: str) -> Tensor | None:
            return loader.share(name, config.num_heads).float() if config.has_sinks else None

        def layer(number: int) -> AttentionLayer:
            prefix = f"model.layers.{number}"
            attention = f"{prefix}.self_attn"
            qkv = [f"{attention}.{name}_proj" for name in "qkv"]
            rows, copies = (config.query_dim, config.kv_dim, config.kv_dim), (1, config.kv_copies, config.kv_copies)
            fused.append(loader.by_rows(qkv, rows, hidden, config.qkv_bias, copies))
            made = AttentionLayer(
                attention_norm=norm(f"{prefix}.input_layernorm.weight"),
                qkv=fused[-1],
                query_norm=head_norm(f"{attention}.q_norm.weight", config.query_dim),
                k_norm=head_norm(f"{attention}.k_norm.weight", config.kv_dim),
                out=loader.by_columns(f"{attention}.o_proj", hidden, config.query_dim, config.out_bias),
                mlp_norm=norm(f"{prefix}.post_attention_layernorm.weight"),
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=head_dim,
                turned=config.rope.dim,
                scoring=Scoring(config.scale(number), config.window(number), sinks=sinks(f"{attention}.sinks")),
            )
            mlp = mlp_of(config, number, prefix, loader, config.mlp_bias)
            self._mlps.append(mlp)
            if isinstance(mlp, DenseMlp) and not config.qk_norm_is_wide:  # no kernel has the wide norm
                return mlp.completed(made)
            return made

        self._embedding = loader.embedding(
            "model.embed_tokens.weight", config.vocab_size, hidden, config.tied_embeddings
        )
        self._mlps: list[Mlp] = []
        self._layers = [layer(number) for number in range(config.num_layers)]
        dense = [layer for layer in self._layers if isinstance(layer, DecoderLayer)]
        self._decoder = loader.decoder(dense) if len(dense) == len(self._layers) else None
        self._norm = loader.vector("model.norm.weight", hidden)
        self._head = loader.head("lm_head.weight", self._embedding, config.tied_embeddings)
        self._rotation = Rotation(config.rope, loader.device)
        self._kv = KVProjections(fused, config.query_dim, config.kv_dim)

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        return self.logits(self.states(tokens, positions, rows, attention))

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x = self._embedding(tokens)
        angles = self._rotation.at(positions)
        paged = attention.paged
        if paged is not None and self._decoder is not None and self._decoder.takes(len(tokens)):
            self._decoder.run(x, angles, paged)
        else:
            self._layer_by_layer(x, angles, attention)
        last = x if rows is None else x.index_select(0, rows)
        return self._kernels.rms_norm(last, self._norm, self._config.norm_eps)

    def _layer_by_layer(self, x: Tensor, angles: tuple[Tensor, Tensor], attention: Attention) -> None:
        """Run all layers on `x`, in place."""
        config, kernels = self._config, self._kernels
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_dim, kv_dim, num_tokens = config.query_dim, config.kv_dim, x.shape[0]
        for number, (layer, mlp) in enumerate(zip(self._layers, self._mlps, strict=True)):
            normed = self._normed(x, layer.attention_norm)
            qkv = layer.qkv(normed)
            by_head = qkv.view(num_tokens, -1, head_dim)
            if layer.query_norm is None or layer.k_norm is None:
                kernels.rotate(by_head.narrow(1, 0, heads + kv_heads), *angles)
                query, k = by_head.narrow(1, 0, heads), qkv.narrow(1, query_dim, kv_dim)
            else:
                query = self._normed_heads(by_head.narrow(1, 0, heads), layer.query_norm)
                turned = self._normed_heads(by_head.narrow(1, heads, kv_heads), layer.k_norm)
                kernels.rotate(query, *angles)
                kernels.rotate(turned, *angles)
                k = turned.view(num_tokens, kv_dim)
            v = qkv.narrow(1, query_dim + kv_dim, kv_dim)
            attended = attention.attend(number, query, k, v, layer.scoring, normed)
            layer.out.add_to(attended.view(num_tokens, query_dim), x)
            mlp.add_to(self._normed(x, layer.mlp_norm), x)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        assert norm.weight is not None
        return self._kernels.rms_norm(x, norm.weight, norm.eps)

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

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._kv(layer, hidden)
        by_head = k.unflatten(1, (-1, self._config.head_dim))
        norm = self._layers[layer].k_norm
        if norm is not None:
            by_head = self._normed_heads(by_head, norm)
        self._kernels.rotate(by_head, *self._rotation.at(positions))
        return by_head.flatten(1), v
