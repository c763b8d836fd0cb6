"""Bloom, Falcon, MPT, OPT and GPT-NeoX, and Phi beside this file: LayerNorms, and an MLP without a gate.

Positions turn K and queries (Falcon), or lower a score by the distance of its token, for each head by its own slope
(ALiBi: Bloom, MPT, the first Falcons), or are vectors that are added to those of tokens (OPT).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, frexp, ldexp, log2
from typing import Any

from alignedserve.architectures.config import Activation, OurConfig, activation, common, whole_head
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, Rope, read_rope, rope_section

_BF16_BITS = 8  # bits of a number; the first is not stored


class LayerOrder(Enum):
    """What the two halves of a layer, attention and the MLP, read."""

    SERIAL = "the MLP reads what attention was added to"
    NORMS_STAY = "the same, and each half is added to its norm, not to what the norm was made of"
    NORMS_LAST = "the same, and what each half was added to goes through its norm"
    BESIDE = "both read one norm"
    TWO_NORMS = "both read the same, each through a norm of its own"

    @property
    def is_parallel(self) -> bool:
        return self in (LayerOrder.BESIDE, LayerOrder.TWO_NORMS)


@dataclass(frozen=True)
class BloomNames:
    """The names of tensors; those of a layer follow its number."""

    embedding: str
    layers: str
    final_norm: str
    attention_norm: str
    mlp_norm: str  # where there is one
    qkv: tuple[str, ...]  # of one weight for query, key and value, or of each
    out: str
    up: str
    down: str
    heads: tuple[str, ...] = ("lm_head",)  # the first that the files have
    positions: str | None = None  # the table of positions
    project_in: str = ""  # from vectors of tokens, where they are narrower than layers, and back for the logits
    project_out: str = ""


@dataclass(frozen=True, kw_only=True)
class BloomConfig(OurConfig):
    names: BloomNames
    order: LayerOrder
    norm_eps: float
    bias: bool  # of linear layers
    mlp_bias: bool | None = None  # of those of the MLP, where they differ
    norm_bias: bool = True
    norm_affine: bool = True  # whether norms have weights, and biases
    final_norm: bool = True
    embedding_dim: int | None = None  # numbers of a token's vector; None: as many as layers have
    activation: Activation
    rope: Rope | None = None
    slopes: tuple[float, ...] = ()  # of the heads of all ranks; (): scores do not depend on the distance
    embedding_norm: bool = False
    is_by_head: bool = True  # query, key and value lie head by head in their weight; else one after another
    head_bias: bool = False
    clip: float | None = None  # queries, keys and values are no farther from zero

    @property
    def inner_size(self) -> int:
        return 2 * self.intermediate_size


_BLOOM = BloomNames(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
_FALCON_40B = replace(_BLOOM, attention_norm="ln_attn", mlp_norm="ln_mlp")
_MPT = BloomNames(
    embedding="transformer.wte",
    layers="transformer.blocks",
    final_norm="transformer.norm_f",
    attention_norm="norm_1",
    mlp_norm="norm_2",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


_MPT_KEYS = {"hidden_size": "d_model", "num_layers": "n_layers", "num_heads": "n_heads", "max_positions": "max_seq_len"}
_POSITIONS = dict.fromkeys(("seq_length", "max_position_embeddings", "max_seq_len"), 2048)


def read_bloom(given: Given) -> BloomConfig:
    known = _common(
        given,
        hidden_size="n_embed" if given.get("n_embed") else "hidden_size",
        num_layers="n_layer" if given.has("n_layer") else "num_hidden_layers",
        num_heads="n_head" if given.has("n_head") else "num_attention_heads",
        max_positions="seq_length",  # of its training: nothing else depends on it
    )
    heads = known["num_heads"]
    return BloomConfig(
        **known,
        names=_BLOOM,
        order=LayerOrder.NORMS_STAY if given.flag("apply_residual_connection_post_layernorm") else LayerOrder.SERIAL,
        num_kv_heads=heads,
        intermediate_size=4 * known["hidden_size"],
        bias=True,
        activation=Activation.GELU_TANH,
        slopes=_slopes(heads),
        embedding_norm=True,
    )


def read_falcon(given: Given) -> BloomConfig:
    known = _common(given)
    heads = kv_heads = known["num_heads"]
    order = _falcon_order(given)
    if given.flag("new_decoder_architecture"):
        kv_heads = given.whole("num_kv_heads", heads)
    elif given.flag("multi_query", True):
        kv_heads = 1
    if heads % kv_heads:
        raise given.wrong("num_kv_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    slopes, rope = (), None
    if given.flag("alibi"):
        slopes = tuple(_in_bf16(slope) * known["head_dim"] ** -0.5 for slope in _slopes(heads))
    else:
        rope = read_rope(given, rope_section(given), given.number("rope_theta", THETA), known["head_dim"])
    return BloomConfig(
        **known,
        names=_FALCON_40B if order is LayerOrder.TWO_NORMS else _BLOOM,
        order=order,
        num_kv_heads=kv_heads,
        intermediate_size=given.whole("ffn_hidden_size", 4 * known["hidden_size"]),
        bias=given.flag("bias"),
        activation=activation(given, "activation", "gelu"),
        rope=rope,
        slopes=slopes,
    )


def _falcon_order(given: Given) -> LayerOrder:
    is_new, is_parallel = given.flag("new_decoder_architecture"), given.flag("parallel_attn", True)
    norms = given.whole("num_ln_in_parallel_attn", 2 if is_new else 1)
    if not is_parallel and not is_new:
        return LayerOrder.SERIAL
    if not is_parallel or norms > 2 or (norms == 2 and not is_new):
        raise given.unsupported(
            f"parallel_attn {is_parallel}, num_ln_in_parallel_attn {norms}, new_decoder_architecture {is_new}"
        )
    return LayerOrder.TWO_NORMS if norms == 2 else LayerOrder.BESIDE


def read_mpt(given: Given) -> BloomConfig:
    attention, known = given.section("attn_config"), _common(given, **_MPT_KEYS)
    _check_mpt(given, attention)
    scale = attention.get("softmax_scale")
    return BloomConfig(
        **known,
        names=_MPT,
        order=LayerOrder.SERIAL,
        num_kv_heads=known["num_heads"],
        intermediate_size=4 * known["hidden_size"],
        scales=() if scale is None else (attention.number("softmax_scale"),) * known["num_layers"],
        bias=False,
        norm_bias=False,
        activation=Activation.GELU,
        slopes=_mpt_slopes(known["num_heads"], attention.number("alibi_bias_max", 8)),
        is_by_head=False,
        clip=None if attention.get("clip_qkv") is None else attention.number("clip_qkv"),
    )


def _check_mpt(given: Given, attention: Given) -> None:
    for section, key, usual in (
        (attention, "alibi", True),
        (attention, "attn_type", "multihead_attention"),
        (attention, "prefix_lm", False),
        (attention, "qk_ln", False),
        (given, "no_bias", True),
        (given, "expansion_ratio", 4),
        (given, "logit_scale", None),
    ):
        if section.get(key, usual) not in (usual, None):
            raise given.unsupported(f"{key} {section.get(key)} of MPT")


def _common(given: Given, **keys: str) -> dict[str, Any]:
    known = common(given, usual=_POSITIONS, keys=keys)
    return known | {
        "head_dim": whole_head(
            given, known["hidden_size"], known["num_heads"], keys.get("num_heads", "num_attention_heads")
        ),
        "norm_eps": given.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": given.flag("tie_word_embeddings", True),
    }


# --- Slopes


def _slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi: powers of two, and between them where the heads are no power of two."""
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
    return tuple(first + between)


def _mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """Return the slopes as MPT has them: those of the next power of two, every second one first."""
    whole = 1 << ceil(log2(heads))
    slopes = [2.0 ** (-most * (head + 1) / whole) for head in range(whole)]
    return tuple(slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads])


def _in_bf16(number: float) -> float:
    """Return the nearest number of bf16, as Falcon rounds its slopes."""
    mantissa, exponent = frexp(number)
    return ldexp(round(mantissa * 2**_BF16_BITS), exponent - _BF16_BITS)


_OPT_NAMES = BloomNames(
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
    """Read OPT: learned positions; LayerNorm before each block, or after it as in the 350m."""
    known = common(given)
    head_dim = whole_head(given, known["hidden_size"], known["num_heads"])
    norm_first = given.flag("do_layer_norm_before", True)
    return BloomConfig(
        **known,
        names=_OPT_NAMES,
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


_NEOX_NAMES = replace(
    _BLOOM,
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    heads=("embed_out", "lm_head"),  # in transformers 4 and on the hub, and in transformers 5
)


def read_gpt_neox(given: Given) -> BloomConfig:
    """Read GPT-NeoX: part of each head turns; attention and MLP run side by side or one after the other."""
    known = common(given)
    head_dim = whole_head(given, known["hidden_size"], known["num_heads"])
    theta, share = given.number("rotary_emb_base", THETA), given.number("rotary_pct", 0.25)
    rope = read_rope(given, rope_section(given), theta, head_dim, share)
    if not 0 < rope.dim + rope.dim % 2 <= head_dim:  # numbers turn in pairs
        raise given.wrong("rotary_pct", f"a share of the head's {head_dim} numbers", share)
    return BloomConfig(
        **known,
        names=_NEOX_NAMES,
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
