"""GPT-NeoX (Pythia): positions rotate a part of each head; attention and MLP run in parallel or one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from alignedserve.architectures.families.gpt_neox import NeoxConfig
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import KVProjections, Loader
from alignedserve.engine.models.model import Attention
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import Scoring

# transformers 4 and the hub call the head by the first name, transformers 5 by the second.
_HEADS = ("embed_out.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    scoring: Scoring


class GptNeox:
    def __init__(self, config: NeoxConfig, loader: Loader) -> None:
        self._config, self._kernels = config, loader.kernels
        self._activation = ACTIVATIONS[config.activation]
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        query_dim = config.query_dim
        fused = []

        def layer(number: int) -> _Layer:
            prefix = f"gpt_neox.layers.{number}"
            attention, mlp = f"{prefix}.attention", f"{prefix}.mlp"
            interleaved = f"{attention}.query_key_value"
            fused.append(loader.interleaved(interleaved, config.num_heads, config.head_dim, hidden, bias))
            return _Layer(
                attention_norm=loader.layer_norm(f"{prefix}.input_layernorm", hidden, config.norm_eps),
                qkv=fused[-1],
                out=loader.by_columns(f"{attention}.dense", hidden, query_dim, bias),
                mlp_norm=loader.layer_norm(f"{prefix}.post_attention_layernorm", hidden, config.norm_eps),
                up=loader.by_rows([f"{mlp}.dense_h_to_4h"], [inner], hidden, bias=True),
                down=loader.by_columns(f"{mlp}.dense_4h_to_h", hidden, inner, bias=True),
                scoring=Scoring(config.scale(number), config.window(number)),
            )

        self._embedding = loader.embedding(
            "gpt_neox.embed_in.weight", config.vocab_size, hidden, config.tied_embeddings
        )
        self._layers = [layer(number) for number in range(config.num_layers)]
        self._norm = loader.layer_norm("gpt_neox.final_layer_norm", hidden, config.norm_eps)
        head = _HEADS[0] if _HEADS[0] in loader.tensors else _HEADS[1]
        self._head = loader.head(head, self._embedding, config.tied_embeddings)
        self._rotation = Rotation(config.rope, loader.device)
        self._kv = KVProjections(fused, query_dim, query_dim)

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        return self.logits(self.states(tokens, positions, rows, attention))

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        config, kernels, num_tokens = self._config, self._kernels, len(tokens)
        heads, query_dim = config.num_heads, config.query_dim
        x = self._embedding(tokens)
        cos, sin = self._rotation.at(positions)
        for number, layer in enumerate(self._layers):
            normed = self._normed(x, layer.attention_norm)
            beside = self._normed(x, layer.mlp_norm) if config.parallel else None
            qkv = layer.qkv(normed)
            by_head = qkv.view(num_tokens, -1, config.head_dim)
            kernels.rotate(by_head.narrow(1, 0, 2 * heads), cos, sin)
            _, k, v = qkv.split(query_dim, dim=1)
            attended = attention.attend(number, by_head.narrow(1, 0, heads), k, v, layer.scoring, normed)
            layer.out.add_to(attended.view(num_tokens, query_dim), x)
            after = self._normed(x, layer.mlp_norm) if beside is None else beside
            layer.down.add_to(self._activation(layer.up(after)), x)
        last = x if rows is None else x.index_select(0, rows)
        return self._normed(last, self._norm)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._kv(layer, inputs)
        self._kernels.rotate(k.unflatten(1, (-1, self._config.head_dim)), *self._rotation.at(positions))
        return k, v
