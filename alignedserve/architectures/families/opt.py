"""OPT: learned positions; LayerNorm before each block, or after it as in the 350m."""

from __future__ import annotations

from alignedserve.architectures.config import activation, common, whole_head
from alignedserve.architectures.families.bloom import BloomConfig, BloomNames, LayerOrder
from alignedserve.architectures.given import Given

_NAMES = BloomNames(
    embedding="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
)


def read_opt(given: Given) -> BloomConfig:
    known = common(given)
    head_dim = whole_head(given, known["hidden_size"], known["num_heads"])
    norm_first = given.flag("do_layer_norm_before", True)
    return BloomConfig(
        **known,
        names=_NAMES,
        order=LayerOrder.SERIAL if norm_first else LayerOrder.NORMS_LAST,
        num_kv_heads=known["num_heads"],
        head_dim=head_dim,
        intermediate_size=given.whole("ffn_dim"),
        embedding_dim=given.whole("word_embed_proj_dim", known["hidden_size"]),
        final_norm=norm_first and not given.flag("_remove_final_layer_norm"),
        norm_eps=1e-5,
        norm_affine=given.flag("layer_norm_elementwise_affine", True),
        bias=given.flag("enable_bias", True),
        activation=activation(given, "activation_function", "relu"),
        tied_embeddings=given.flag("tie_word_embeddings", True),
    )
