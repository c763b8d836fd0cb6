"""GLM-4 of one MLP: biases, neighbours among half of a head's numbers turn together, gate and up in one weight."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.architectures.families.llama import LayerNames, LlamaConfig, read_family
from alignedserve.architectures.given import Given

_ENDS = frozenset({151_329, 151_336, 151_338})
_NAMES = LayerNames(gate_up="gate_up_proj")


def read_glm(given: Given) -> LlamaConfig:
    share = given.number("partial_rotary_factor", 0.5)
    bias = given.flag("attention_bias", True)
    config = read_family(given, kv_heads=2, head_dim=128, qkv_bias=bias, turned_share=share)
    return replace(config, names=_NAMES, turns_neighbours=True, eos_tokens=config.eos_tokens or _ENDS)


def read_glm4(given: Given) -> LlamaConfig:
    """Read a GLM-4-0414, where what attention and MLP add goes through a norm."""
    names = replace(_NAMES, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return replace(read_glm(given), names=names)
