"""OPT: LayerNorms, an MLP without a gate, and a table of positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import Activation
from alignedserve.architectures.families.opt import OptConfig
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.kernels.common.decoder import DecoderLayer, Inner, Norm
from alignedserve.kernels.common.scoring import Scoring

_PREFIX = "model.decoder"
_FIRST_PLACE = 2  # of the table of positions: those before it are for padding
_EPS = 1e-5


class Opt(Model):
    def __init__(self, config: OptConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        words, hidden = config.embedding_dim, config.hidden_size
        self._embedding = loader.embedding(
            f"{_PREFIX}.embed_tokens.weight", config.vocab_size, words, config.tied_embeddings
        )
        places = loader.vector(f"{_PREFIX}.embed_positions.weight", config.max_positions + _FIRST_PLACE, hidden)
        self._places = places[_FIRST_PLACE:]
        self._project_in = self._project_out = None
        if words != hidden:
            self._project_in = loader.linear(f"{_PREFIX}.project_in", hidden, words)
            self._project_out = loader.linear(f"{_PREFIX}.project_out", words, hidden)
        self._layers = [self._layer(f"{_PREFIX}.layers.{n}", n, loader) for n in range(config.num_layers)]
        has_kernel = config.norm_first and config.activation is Activation.RELU
        self._decoder = loader.decoder(self._layers) if has_kernel else None
        self._final_norm = self._norm(loader, f"{_PREFIX}.final_layer_norm") if config.final_norm else None
        self._head = loader.head("lm_head.weight", self._embedding, config.tied_embeddings)
        self._kv = KVProjections([layer.qkv for layer in self._layers], config.query_dim, config.kv_dim)

    def _layer(self, prefix: str, number: int, loader: Loader) -> DecoderLayer:
        config, hidden, inner = self._config, self._config.hidden_size, self._config.intermediate_size
        qkv, outputs = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], (config.query_dim, *[config.kv_dim] * 2)
        return DecoderLayer(
            attention_norm=self._norm(loader, f"{prefix}.self_attn_layer_norm"),
            qkv=loader.by_rows(qkv, outputs, hidden, config.bias),
            query_norm=None,
            k_norm=None,
            out=loader.by_columns(f"{prefix}.self_attn.out_proj", hidden, config.query_dim, config.bias),
            mlp_norm=self._norm(loader, f"{prefix}.final_layer_norm"),
            up=loader.by_rows([f"{prefix}.fc1"], [inner], hidden, config.bias),
            down=loader.by_columns(f"{prefix}.fc2", hidden, inner, config.bias),
            inner=Inner.RELU,  # where a kernel runs the layer
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            turned=0,
            scoring=Scoring(config.scale(number)),
        )

    def _norm(self, loader: Loader, name: str) -> Norm:
        return loader.layer_norm(name, self._config.hidden_size, _EPS, self._config.norm_affine)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x, paged = self._embedding(tokens), attention.paged
        if self._project_in is not None:
            x = self._project_in(x)
        x += F.embedding(positions, self._places)
        if paged is not None and self._decoder is not None and self._decoder.takes(len(tokens)):
            self._decoder.run(x, (), paged, rows)
        else:
            run = self._run if self._config.norm_first else self._run_norms_last
            for number, layer in enumerate(self._layers):
                x = run(number, layer, x, attention)
        last = x if rows is None else x.index_select(0, rows)
        last = last if self._final_norm is None else self._normed(last, self._final_norm)
        return last if self._project_out is None else self._project_out(last)

    def _run(self, number: int, layer: DecoderLayer, x: Tensor, attention: Attention) -> Tensor:
        """Return the output of a layer, which lies where `x` was."""
        layer.out.add_to(self._attended(number, layer, self._normed(x, layer.attention_norm), attention), x)
        layer.down.add_to(self._activation(layer.up(self._normed(x, layer.mlp_norm))), x)
        return x

    def _run_norms_last(self, number: int, layer: DecoderLayer, x: Tensor, attention: Attention) -> Tensor:
        layer.out.add_to(self._attended(number, layer, x, attention), x)
        x = self._normed(x, layer.attention_norm)
        layer.down.add_to(self._activation(layer.up(x)), x)
        return self._normed(x, layer.mlp_norm)

    def _attended(self, number: int, layer: DecoderLayer, normed: Tensor, attention: Attention) -> Tensor:
        config, qkv = self._config, layer.qkv(normed)
        query, k, v = qkv.split((config.query_dim, config.kv_dim, config.kv_dim), dim=1)
        by_head = query.view(len(qkv), -1, config.head_dim)
        attended = attention.attend(number, by_head, k, v, layer.scoring, normed)
        return attended.view(len(qkv), config.query_dim)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._kv(layer, inputs)
