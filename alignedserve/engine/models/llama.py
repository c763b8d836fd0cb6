"""The Llama family: one pass over the concatenated tokens of many requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from alignedserve.engine.tensors import Tensors
from alignedserve.model_config import ModelConfig

# Writes the step's K and V, [tokens, kv_dim], of layer i and attends: (i, query, k, v) -> [tokens, heads, head_dim].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor


class Llama:
    def __init__(self, config: ModelConfig, tensors: Tensors, dtype: torch.dtype) -> None:
        def read(name: str, *shape: int) -> torch.Tensor:
            return tensors.read(name, *shape).to(dtype)

        def layer(prefix: str) -> _Layer:
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            return _Layer(
                attention_norm=read(f"{prefix}.input_layernorm.weight", hidden),
                qkv=torch.cat(
                    [
                        read(f"{attention}.q_proj.weight", q_dim, hidden),
                        read(f"{attention}.k_proj.weight", config.kv_dim, hidden),
                        read(f"{attention}.v_proj.weight", config.kv_dim, hidden),
                    ]
                ),
                out=read(f"{attention}.o_proj.weight", hidden, q_dim),
                mlp_norm=read(f"{prefix}.post_attention_layernorm.weight", hidden),
                gate_up=torch.cat([read(f"{mlp}.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]),
                down=read(f"{mlp}.down_proj.weight", hidden, inner),
            )

        hidden, inner, q_dim = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self._config = config
        self._embedding = read("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers = [layer(f"model.layers.{number}") for number in range(config.num_layers)]
        self._norm = read("model.norm.weight", hidden)
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self._head = self._embedding if config.tied_embeddings else read(head, config.vocab_size, hidden)
        # In fp32 whatever the weights' type, and rounded where the reference rounds: angles of late positions need it.
        self._frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits, in fp32, of the tokens at `rows`."""
        config = self._config
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._rotation(positions, x.dtype)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(self._normed(x, layer.attention_norm), layer.qkv)
            qkv = qkv.view(len(tokens), -1, config.head_dim)
            query, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            query, k = _rotated(query, cos, sin), _rotated(k, cos, sin)
            attended = attend(number, query, k.flatten(1), v.flatten(1))
            x = x + F.linear(attended.flatten(1), layer.out)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._normed(x[rows], self._norm), self._head).float()

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[:, None].float() * self._frequencies).repeat(1, 2)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * (wide.square().mean(-1, keepdim=True) + self._config.norm_eps).rsqrt()).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions; the halves of a head's vector are the two axes of each rotation."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
