"""The architectures that are read from GGUF files: their config.json, and the names and orders of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.architectures.gguf.file import Facts
from alignedserve.architectures.gguf.places import Rows

_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_FACTORS, _LONG, _SHORT)  # config.json has their numbers


@dataclass(frozen=True)
class Family:
    architecture: str
    model_type: str
    config: Callable[[Facts], dict[str, Any]]  # what only some families have in config.json
    names: Mapping[str, str]  # of tensors outside layers, without their last part, and what transformers calls them
    layer: str  # what transformers calls a layer
    in_layer: Mapping[str, str]
    rows: Callable[[Facts, str, int], Rows | None] | None = None  # (facts, name, rows) -> order of the rows
    norms_more: float = 0.0  # how much more than in transformers the weights of norms are


def _llama(facts: Facts) -> dict[str, Any]:
    if facts.get("expert_count"):
        raise facts.unsupported("a mixture of experts")
    return {"head_dim": _head_dim(facts)} | _usual(facts)


def _qwen2(facts: Facts) -> dict[str, Any]:
    return {"use_sliding_window": False} | _usual(facts)


def _qwen3(facts: Facts) -> dict[str, Any]:
    return {"head_dim": _head_dim(facts), "use_sliding_window": False} | _usual(facts)


def _usual(facts: Facts) -> dict[str, Any]:
    heads, head_dim = facts.whole("attention.head_count"), _head_dim(facts)
    if (turned := facts.whole("rope.dimension_count", head_dim)) != head_dim:
        raise facts.unsupported(f"rope.dimension_count {turned} with heads of {head_dim}")
    return {
        "num_key_value_heads": facts.whole("attention.head_count_kv", heads),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in facts.tensors,
        "rope_parameters": {"rope_theta": facts.number("rope.freq_base", 10_000.0), **_scaling(facts)},
    }


def _head_dim(facts: Facts) -> int:
    share = facts.whole("embedding_length") // facts.whole("attention.head_count")
    of_k = facts.whole("attention.key_length", share)
    if (of_v := facts.whole("attention.value_length", share)) != of_k:
        raise facts.unsupported(f"heads with {of_k} numbers of K and {of_v} of V")
    return of_k


def _scaling(facts: Facts) -> dict[str, Any]:
    kind = facts.get("rope.scaling.type") or ("linear" if facts.get("rope.scale_linear") else "none")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    if (more := facts.number("rope.scaling.attn_factor", 1.0)) != 1:
        raise facts.unsupported(f"rope.scaling.attn_factor {more:g}")
    if kind != "none" and _FACTORS in facts.tensors:
        raise facts.unsupported(f"rope.scaling.type {kind} beside {_FACTORS}")
    if _FACTORS in facts.tensors:
        return {"rope_type": "factors", "factors": facts.file.numbers(_FACTORS)}
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": facts.whole("rope.scaling.original_context_length"),
            "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise facts.unsupported(f"rope.scaling.type {kind}")


# --- Gemma and Phi-3


def _gemma(facts: Facts) -> dict[str, Any]:
    return _usual(facts) | {"head_dim": _head_dim(facts), "hidden_act": "gelu_pytorch_tanh"}


def _gemma3(facts: Facts) -> dict[str, Any]:
    head_dim, layers, window = _head_dim(facts), facts.whole("block_count"), facts.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    whole = {"rope_theta": facts.number("rope.freq_base", 1_000_000.0), **_scaling(facts)}
    of_27b = facts.whole("embedding_length") // facts.whole("attention.head_count")  # as llama.cpp tells it: by layers
    return {
        **_usual(facts),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": of_27b if layers == 62 else head_dim,
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if window and (layer + 1) % 6 else "full_attention" for layer in range(layers)
        ],
        "rope_parameters": {"sliding_attention": local, "full_attention": whole},
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _phi3(facts: Facts) -> dict[str, Any]:
    heads, head_dim = facts.whole("attention.head_count"), _head_dim(facts)
    original = facts.whole("rope.scaling.original_context_length", facts.whole("context_length"))
    rope = {
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": facts.whole("rope.dimension_count", head_dim) / head_dim,
        "rope_type": "default",
    }
    if _LONG in facts.tensors:
        long, short = facts.file.numbers(_LONG), facts.file.numbers(_SHORT)
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["original_max_position_embeddings"] = original
    return {
        "num_key_value_heads": facts.whole("attention.head_count_kv", heads),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
        "sliding_window": facts.get("attention.sliding_window") or None,
        "pad_token_id": None,
    }


# --- Orders of rows


def _halves(facts: Facts, name: str, rows: int) -> Rows | None:
    """Return the order of Llama's queries and keys: the file has each number beside the one that it turns with."""
    part = name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return None
    return Rows((rows // _head_dim(facts), _head_dim(facts) // 2, 2), (1, 2))


# --- Names of tensors, and all families

_LLAMA_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_LAYER = {**_LLAMA_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_LAYER = {
    **_QWEN3_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _llama, _LLAMA_NAMES, "model.layers", _LLAMA_LAYER, _halves),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _qwen2, _LLAMA_NAMES, "model.layers", _LLAMA_LAYER),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _qwen3, _LLAMA_NAMES, "model.layers", _QWEN3_LAYER),
    "gemma": Family("GemmaForCausalLM", "gemma", _gemma, _LLAMA_NAMES, "model.layers", _LLAMA_LAYER, norms_more=1.0),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text", _gemma3, _LLAMA_NAMES, "model.layers", _GEMMA3_LAYER, norms_more=1.0
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", _phi3, _LLAMA_NAMES, "model.layers", _PHI3_LAYER),
}
