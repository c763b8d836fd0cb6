"""OPT: learned positions are added to the embeddings; LayerNorm comes before each block, in the 350m model after it."""

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

_EPS = 1e-5
_OFFSET = 2  # the first positions of the table are for padding


class Opt(Model):
    def __init__(self, config: OptConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        hidden, inner, bias, affine = config.hidden_size, config.intermediate_size, config.bias, config.affine_norm
        fused, decoder, query_dim = [], "model.decoder", config.query_dim

        def norm(name: str) -> Norm:
            return loader.layer_norm(name, hidden, _EPS, affine)

        def layer(number: int) -> DecoderLayer:
            prefix = f"{decoder}.layers.{number}"
            attention = f"{prefix}.self_attn"
            qkv = [f"{attention}.{name}_proj" for name in "qkv"]
            fused.append(loader.by_rows(qkv, [query_dim] * 3, hidden, bias))
            return DecoderLayer(
                attention_norm=norm(f"{prefix}.self_attn_layer_norm"),
                qkv=fused[-1],
                query_norm=None,
                k_norm=None,
                out=loader.by_columns(f"{attention}.out_proj", hidden, query_dim, bias),
                mlp_norm=norm(f"{prefix}.final_layer_norm"),
                up=loader.by_rows([f"{prefix}.fc1"], [inner], hidden, bias),
                down=loader.by_columns(f"{prefix}.fc2", hidden, inner, bias),
                inner=Inner.RELU,
                heads=config.num_heads,
                kv_heads=config.num_heads,
                head_dim=config.head_dim,
                turned=0,
                scoring=Scoring(config.scale(number), config.window(number)),
            )

        words = config.embedding_dim
        self._embedding = loader.embedding(
            f"{decoder}.embed_tokens.weight", config.vocab_size, words, config.tied_embeddings
        )
        places = loader.vector(f"{decoder}.embed_positions.weight", config.max_positions + _OFFSET, hidden)
        self._places = places[_OFFSET:]
        self._project_in = self._project_out = None
        if words != hidden:
            self._project_in = loader.linear(f"{decoder}.project_in", hidden, words)
            self._project_out = loader.linear(f"{decoder}.project_out", words, hidden)
        self._layers = [layer(number) for number in range(config.num_layers)]
        usual = config.norm_first and config.activation is Activation.RELU
        self._decoder = loader.decoder(self._layers) if usual else None
        self._norm = norm(f"{decoder}.final_layer_norm") if config.final_norm else None
        self._head = loader.head("lm_head.weight", self._embedding, config.tied_embeddings)
        self._kv = KVProjections(fused, query_dim, query_dim)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        x = self._embedding(tokens)
        if self._project_in is not None:
            x = self._project_in(x)
        x += F.embedding(positions, self._places)
        paged = attention.paged
        if paged is not None and self._decoder is not None and self._decoder.takes(len(tokens)):
            self._decoder.run(x, (), paged)
        else:
            run = self._norm_first if self._config.norm_first else self._norm_last
            for number, layer in enumerate(self._layers):
                x = run(number, layer, x, attention)
        last = x if rows is None else x.index_select(0, rows)
        if self._norm is not None:
            last = self._normed(last, self._norm)
        if self._project_out is not None:
            last = self._project_out(last)
        return last

    def _norm_first(self, number: int, layer: DecoderLayer, x: Tensor, attention: Attention) -> Tensor:
        layer.out.add_to(self._attended(number, layer, self._normed(x, layer.attention_norm), attention), x)
        layer.down.add_to(self._activation(layer.up(self._normed(x, layer.mlp_norm))), x)
        return x

    def _norm_last(self, number: int, layer: DecoderLayer, x: Tensor, attention: Attention) -> Tensor:
        layer.out.add_to(self._attended(number, layer, x, attention), x)
        x = self._normed(x, layer.attention_norm)
        layer.down.add_to(self._activation(layer.up(x)), x)
        return self._normed(x, layer.mlp_norm)

    def _attended(self, number: int, layer: DecoderLayer, x: Tensor, attention: Attention) -> Tensor:
        query, k, v = layer.qkv(x).split(self._config.query_dim, dim=1)
        by_head = query.unflatten(1, (-1, self._config.head_dim))
        return attention.attend(number, by_head, k, v, layer.scoring, x).view(query.shape)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._kv(layer, inputs)
