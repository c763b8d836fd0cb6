"""Gemma 1 to 3, text: scaled embeddings, gelu, norms whose files have the weights less one.

From Gemma 2 on some layers have a window, and what attention and MLP add goes through a norm. Gemma 2 caps scores and
logits; in Gemma 3 heads have norms, and layers with a window turn by angles of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignedserve.architectures.config import activation, common, heads_of_k
from alignedserve.architectures.families.llama import LAYER_TYPES, LayerNames, LlamaConfig, by_type
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, Rope, read_rope, rope_section

_GLOBAL_THETA = 1_000_000.0
_FULL, _SLIDING = LAYER_TYPES
# transformers takes these values for missing keys: files of Gemma 3 with images have few keys.
_GEMMA = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_GEMMA3 = _GEMMA2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_NAMES = LayerNames(
    mlp_norm="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read_gemma(given: Given) -> LlamaConfig:
    return _read(
        given, given, _GEMMA, "hidden_act", rope=_rope(given, rope_section(given), given.number("rope_theta", THETA))
    )


def read_gemma2(given: Given) -> LlamaConfig:
    return _read(
        given,
        given,
        _GEMMA2,
        "hidden_activation",
        rope=_rope(given, rope_section(given), given.number("rope_theta", THETA)),
        names=_NAMES,
        windows=_windows(given, 2),
        scales=_scales(given),
        score_cap=_cap(given, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(given, "final_logit_softcapping", 30.0),
    )


def read_gemma3(given: Given, reads_images: bool = False) -> LlamaConfig:
    """Read the model; of one that reads images too only the text part."""
    text, prefix = (given.text, "language_model.model") if reads_images else (given, "model")
    by_type = text.section("rope_parameters")
    whole = text.section("rope_scaling") if text.get("rope_scaling") else by_type.section(_FULL)
    return _read(
        given,
        text,
        _GEMMA3,
        "hidden_activation",
        prefix=prefix,
        rope=_rope(text, whole, text.number("rope_theta", _GLOBAL_THETA)),
        local_rope=_rope(text, by_type.section(_SLIDING), text.number("rope_local_base_freq", THETA)),
        names=_NAMES,
        qk_norm=True,
        windows=_windows(text, text.whole("sliding_window_pattern", 6)),
        scales=_scales(text),
        logit_cap=_cap(text, "final_logit_softcapping", None),
    )


def _read(given: Given, text: Given, usual: Mapping[str, int], activation_key: str, **special: Any) -> LlamaConfig:
    if text.get("use_bidirectional_attention"):
        raise given.unsupported("use_bidirectional_attention")
    known, bias = common(given, text, usual), text.flag("attention_bias")
    known["eos_tokens"] = known["eos_tokens"] or frozenset({1})
    return LlamaConfig(
        **known,
        intermediate_size=text.whole("intermediate_size", usual["intermediate_size"]),
        num_kv_heads=heads_of_k(text, known["num_heads"], usual["num_key_value_heads"]),
        head_dim=_head_dim(text),
        tied_embeddings=text.flag("tie_word_embeddings", True),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        norms_lack_one=True,
        activation=activation(text, activation_key, "gelu_pytorch_tanh"),
        embedding_factor=known["hidden_size"] ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
        **special,
    )


def _head_dim(text: Given) -> int:
    return text.whole("head_dim", 256)


def _rope(text: Given, section: Given, theta: float) -> Rope:
    return read_rope(text, section, theta, _head_dim(text))


def _windows(text: Given, every: int) -> tuple[int | None, ...]:
    """Return the window of each layer; where the file names no types, every `every`-th has none."""
    layers = text.whole("num_hidden_layers", _GEMMA2["num_hidden_layers"])
    types = text.get("layer_types") or [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    return by_type(text, layers, types, text.whole("sliding_window", 4096))


def _scales(text: Given) -> tuple[float, ...]:
    layers = text.whole("num_hidden_layers", _GEMMA2["num_hidden_layers"])
    return (text.number("query_pre_attn_scalar", 256) ** -0.5,) * layers


def _cap(text: Given, key: str, usual: float | None) -> float | None:
    given = text.get(key, usual)
    return None if given is None else text.number(key, given)
