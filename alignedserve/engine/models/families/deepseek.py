"""DeepSeek and its kin: attention to one compressed vector of each token.

K and V of a head are products of that vector with the head's part of one weight (kv_b_proj). A query is multiplied with
the part for K before attention, and the result with the part for V after it: so attention compares queries with the
compressed vectors as they are kept, and no K or V of a head is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alignedserve.architectures.families.deepseek import DeepseekConfig
from alignedserve.engine.models.experts import Mlp, mlp_of
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.rope import Rotation, part_neighbours
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import Spans

_INNER_EPS = 1e-6  # of the norms of compressed vectors, whatever the file says


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    query: Callable[[Tensor], Tensor]
    compress: Linear  # to the compressed vector before its norm, and the turning part of K
    compressed_norm: Tensor
    to_k: Tensor  # [heads, plain_dim, kv_rank]
    to_v: Tensor  # [heads, kv_rank, value_dim]
    out: Linear
    mlp_norm: Tensor
    mlp: Mlp


class Deepseek(Model):
    def __init__(self, config: DeepseekConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._embedding = loader.embedding(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size, config.tied_embeddings
        )
        self._layers = [self._layer(number, loader) for number in range(config.num_layers)]
        self._norm = loader.vector("model.norm.weight", config.hidden_size)
        self._head = loader.head("lm_head.weight", self._embedding, config.tied_embeddings)
        self._rotation = Rotation(config.rope, loader.device)

    def _layer(self, number: int, loader: Loader) -> _Layer:
        config, prefix = self._config, f"model.layers.{number}"
        hidden, attention, rank = config.hidden_size, f"{prefix}.self_attn", config.kv_rank
        both = loader.expanded(
            f"{attention}.kv_b_proj", config.num_heads * (config.plain_dim + config.value_dim), rank
        ).unflatten(0, (config.num_heads, -1))
        return _Layer(
            norm=loader.vector(f"{prefix}.input_layernorm.weight", hidden),
            query=self._query(attention, loader),
            compress=loader.linear(f"{attention}.kv_a_proj_with_mqa", rank + config.rope.dim, hidden, config.bias),
            compressed_norm=loader.vector(f"{attention}.kv_a_layernorm.weight", rank),
            to_k=both[:, : config.plain_dim],
            to_v=both[:, config.plain_dim :].transpose(1, 2),
            out=loader.by_columns(f"{attention}.o_proj", hidden, config.num_heads * config.value_dim, config.bias),
            mlp_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=mlp_of(config, number, prefix, loader),
        )

    def _query(self, attention: str, loader: Loader) -> Callable[[Tensor], Tensor]:
        """Return what makes the queries of all heads, in one product or in two."""
        config, kernels = self._config, self._kernels
        outputs = config.num_heads * (config.plain_dim + config.rope.dim)
        if config.query_rank is None:
            return loader.by_rows([f"{attention}.q_proj"], [outputs], config.hidden_size, False)
        down = loader.linear(f"{attention}.q_a_proj", config.query_rank, config.hidden_size, config.bias)
        norm = loader.vector(f"{attention}.q_a_layernorm.weight", config.query_rank)
        up = loader.by_rows([f"{attention}.q_b_proj"], [outputs], config.query_rank, False)

        def query(x: Tensor) -> Tensor:
            return up(kernels.rms_norm(down(x), norm, _INNER_EPS))

        return query

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        paged, kernels, eps = attention.paged, self._kernels, self._config.norm_eps
        assert paged is not None, "this model does not project"
        x = self._embedding(tokens)
        angles = self._rotation.at(positions)
        for number, (layer, cache) in enumerate(zip(self._layers, paged.cache.unbind(0), strict=True)):
            normed = kernels.rms_norm(x, layer.norm, eps)
            self._keep(layer, normed, angles, cache, paged.spans)
            query = self._compared(layer, normed, angles)
            scale = self._config.scale(number)
            attended = kernels.attend_latent(query, cache, paged.spans, scale, self._config.kv_rank)
            values = torch.bmm(attended.transpose(0, 1), layer.to_v).transpose(0, 1)
            layer.out.add_to(values.flatten(1), x)
            layer.mlp.add_to(kernels.rms_norm(x, layer.mlp_norm, eps), x)
        last = x if rows is None else x.index_select(0, rows)
        return kernels.rms_norm(last, self._norm, eps)

    def _keep(self, layer: _Layer, normed: Tensor, angles: tuple[Tensor, Tensor], cache: Tensor, spans: Spans) -> None:
        """Write the compressed vectors of the step's tokens, one half of each into the place of K, one into V's."""
        config, rank = self._config, self._config.kv_rank
        compressed = layer.compress(normed)
        vectors = torch.empty_like(compressed)
        vectors[:, :rank] = self._kernels.rms_norm(compressed[:, :rank], layer.compressed_norm, _INNER_EPS)
        self._turn(compressed[:, None, rank:], angles, vectors[:, None, rank:])
        self._kernels.write(cache, spans, *vectors.split(config.kv_dim, dim=1))

    def _compared(self, layer: _Layer, normed: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return the queries as they are compared with compressed vectors, [rows, heads, compared_dim]."""
        config = self._config
        by_head = layer.query(normed).unflatten(1, (config.num_heads, -1))
        plain, turned = by_head.split((config.plain_dim, config.rope.dim), dim=2)
        query: Tensor = by_head.new_empty((*by_head.shape[:2], config.compared_dim))
        query[..., : config.kv_rank] = torch.bmm(plain.transpose(0, 1), layer.to_k).transpose(0, 1)
        self._turn(turned, angles, query[..., config.kv_rank :])
        return query

    def _turn(self, heads: Tensor, angles: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Write turned heads to `out`, where the numbers that rotate together lie half a vector apart."""
        if self._config.is_interleaved:
            part_neighbours(heads, out)
        else:
            out.copy_(heads)
        self._kernels.rotate(out, *angles)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("this model does not project")
