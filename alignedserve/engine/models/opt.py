"""OPT: positions are learned and added to the words; LayerNorm comes before each block, in the 350m after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from alignedserve.architectures.opt import OptConfig
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import KVProjections, Loader, Norm
from alignedserve.engine.models.model import Attention, Linear

_EPS = 1e-5
_OFFSET = 2  # the first positions of the table are for padding


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Opt:
    def __init__(self, config: OptConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        hidden, inner, bias, affine = config.hidden_size, config.intermediate_size, config.bias, config.affine_norm
        fused, decoder = [], "model.decoder"

        def layer(prefix: str) -> _Layer:
            attention = f"{prefix}.self_attn"
            fused.append(loader.fused([f"{attention}.{name}_proj" for name in "qkv"], [hidden] * 3, hidden, bias))
            return _Layer(
                attention_norm=loader.norm(f"{prefix}.self_attn_layer_norm", hidden, affine),
                qkv=fused[-1].linear,
                out=loader.linear([f"{attention}.out_proj"], [hidden], hidden, bias),
                mlp_norm=loader.norm(f"{prefix}.final_layer_norm", hidden, affine),
                up=loader.linear([f"{prefix}.fc1"], [inner], hidden, bias),
                down=loader.linear([f"{prefix}.fc2"], [hidden], inner, bias),
            )

        words = config.embedding_dim
        self._embedding = loader.vector(f"{decoder}.embed_tokens.weight", config.vocab_size, words)
        places = loader.vector(f"{decoder}.embed_positions.weight", config.max_positions + _OFFSET, hidden)
        self._places = places[_OFFSET:]
        self._project_in = self._project_out = None
        if words != hidden:
            self._project_in = loader.linear([f"{decoder}.project_in"], [hidden], words, bias=False)
            self._project_out = loader.linear([f"{decoder}.project_out"], [words], hidden, bias=False)
        self._layers = [layer(f"{decoder}.layers.{number}") for number in range(config.num_layers)]
        self._norm = loader.norm(f"{decoder}.final_layer_norm", hidden, affine) if config.final_norm else None
        self._head = loader.head("lm_head.weight", self._embedding, config.tied_embeddings)
        self._kv = KVProjections(fused, hidden, hidden, loader.make_linear)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, attention: Attention
    ) -> torch.Tensor:
        x = F.embedding(tokens, self._embedding)
        if self._project_in is not None:
            x = self._project_in(x)
        x += F.embedding(positions, self._places)
        run = self._norm_first if self._config.norm_first else self._norm_last
        for number, layer in enumerate(self._layers):
            x = run(number, layer, x, attention)
        last = x if rows is None else x.index_select(0, rows)
        if self._norm is not None:
            last = self._normed(last, self._norm)
        if self._project_out is not None:
            last = self._project_out(last)
        return self._head(last).float()

    def _norm_first(self, number: int, layer: _Layer, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        layer.out.add_to(self._attended(number, layer, self._normed(x, layer.attention_norm), attention), x)
        layer.down.add_to(self._activation(layer.up(self._normed(x, layer.mlp_norm))), x)
        return x

    def _norm_last(self, number: int, layer: _Layer, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        layer.out.add_to(self._attended(number, layer, x, attention), x)
        x = self._normed(x, layer.attention_norm)
        layer.down.add_to(self._activation(layer.up(x)), x)
        return self._normed(x, layer.mlp_norm)

    def _attended(self, number: int, layer: _Layer, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        query, k, v = layer.qkv(x).split(self._config.hidden_size, dim=1)
        by_head = query.unflatten(1, (-1, self._config.head_dim))
        return attention.attend(number, by_head, k, v, x).view(x.shape)

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, _EPS)

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv(layer, hidden)
