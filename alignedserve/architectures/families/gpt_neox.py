"""GPT-NeoX (Pythia): part of each head turns; attention and MLP run side by side or one after the other."""

from __future__ import annotations

from alignedserve.architectures.config import activation, common, whole_head
from alignedserve.architectures.families.bloom import BloomConfig, BloomNames, LayerOrder
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, read_rope, rope_section

_NAMES = BloomNames(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    heads=("embed_out", "lm_head"),  # in transformers 4 and on the hub, and in transformers 5
)


def read_gpt_neox(given: Given) -> BloomConfig:
    known = common(given)
    head_dim = whole_head(given, known["hidden_size"], known["num_heads"])
    theta, share = given.number("rotary_emb_base", THETA), given.number("rotary_pct", 0.25)
    rope = read_rope(given, rope_section(given), theta, head_dim, share)
    if not 0 < rope.dim + rope.dim % 2 <= head_dim:  # numbers turn in pairs
        raise given.wrong("rotary_pct", f"a share of the head's {head_dim} numbers", share)
    return BloomConfig(
        **known,
        names=_NAMES,
        order=LayerOrder.TWO_NORMS if given.flag("use_parallel_residual", True) else LayerOrder.SERIAL,
        num_kv_heads=known["num_heads"],
        head_dim=head_dim,
        intermediate_size=given.whole("intermediate_size"),
        norm_eps=given.number("layer_norm_eps", 1e-5),
        rope=rope,
        bias=given.flag("attention_bias", True),
        mlp_bias=True,
        activation=activation(given, "hidden_act", "gelu"),
        tied_embeddings=given.flag("tie_word_embeddings"),
    )
