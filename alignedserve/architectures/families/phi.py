"""Phi: Phi-3 and 4 compute as Llama, with fused weights; in Phi 1 and 2 attention and MLP read one norm."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.architectures.config import ModelConfig, activation, common, heads_of_k, whole_head
from alignedserve.architectures.families.bloom import BloomConfig, BloomNames, LayerOrder
from alignedserve.architectures.families.generic import read_generic
from alignedserve.architectures.families.llama import LayerNames, LlamaConfig, read_family
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, read_rope, rope_section

_NAMES = BloomNames(
    embedding="model.embed_tokens",
    layers="model.layers",
    final_norm="model.final_layernorm",
    attention_norm="input_layernorm",
    mlp_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
)


def read_phi3(given: Given) -> LlamaConfig:
    layers, has_window = given.whole("num_hidden_layers"), given.get("sliding_window") is not None
    windows = (given.whole("sliding_window"),) * layers if has_window else ()
    config = read_family(given, windows=windows, turned_share=given.number("partial_rotary_factor", 1.0))
    return replace(config, names=LayerNames(qkv="qkv_proj", gate_up="gate_up_proj"))


def read_phi(given: Given) -> ModelConfig:
    if given.flag("qk_layernorm") or given.flag("tie_word_embeddings"):  # of no model that was published
        return read_generic(given, "PhiForCausalLM")
    known = common(given)
    head_dim = whole_head(given, known["hidden_size"], known["num_heads"])
    share, theta = given.number("partial_rotary_factor", 0.5), given.number("rope_theta", THETA)
    rope = read_rope(given, rope_section(given), theta, head_dim, share)
    if rope.dim % 2:
        raise given.unsupported(f"rotation of {rope.dim} of a head's {head_dim} numbers")
    return BloomConfig(
        **known,
        names=_NAMES,
        order=LayerOrder.BESIDE,
        num_kv_heads=heads_of_k(given, known["num_heads"], known["num_heads"]),
        head_dim=head_dim,
        intermediate_size=given.whole("intermediate_size"),
        norm_eps=given.number("layer_norm_eps", 1e-5),
        bias=True,
        head_bias=True,
        activation=activation(given, "hidden_act", "gelu_new"),
        rope=rope,
    )
