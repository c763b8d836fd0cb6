"""Tiny random folders of the families of transformers, and whether each is served or refused.

families.md is made of both tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import MAX_POSITIONS, VOCAB

WINDOW = 11  # shorter than the tests' prompts
SLIDING, FULL = "sliding_attention", "full_attention"
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
_LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), MAX_POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "initializer_range": 0.25,
}

# Maps each `model_type` to the settings that are special about it.
SERVED: dict[str, dict[str, Any]] = {
    "afmoe": _WINDOWED,
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "beam": {},
    "bert": {},
    "bert-generation": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": _WINDOWED,
    "cohere2_moe": _WINDOWED,
    "ctrl": {},
    "cwm": _WINDOWED,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16},
    },
    "electra": {},
    "ernie": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": _WINDOWED,
    "exaone_moe": _WINDOWED,
    "falcon": {"new_decoder_architecture": True},
    "flex_olmo": {},
    "flint": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granite_swa": _WINDOWED,
    "granitemoe": {},
    "granitemoe_swa": _WINDOWED,
    "granitemoehybrid": {"layer_types": ["attention"] * 2, **_MAMBA},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "ministral": _WINDOWED,
    "ministral3": {},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "persimmon": {},
    "phi": {},
    "phimoe": {},
    "roc_bert": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {"attn_logit_softcapping": 0.7, **_WINDOWED},
}

_COUNTS = "it counts positions by itself"
_NONE_CALLS = "0 of 2 layers call the AttentionInterface of transformers"
_NOT = "its layers do not call the AttentionInterface of transformers"
_OFF = "logits of a prompt are off"
_NO_HEADS = "its config.json has none of num_attention_heads"
_STATE = "it has layers that keep a state in place of K and V of each token"
_NO_LENGTH = "its config.json has none of max_position_embeddings"

# Maps each refused `model_type` to its settings, and to the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian"), ({}, _COUNTS)),
    **dict.fromkeys(("mbart", "mvp", "pegasus", "plbart", "roformer"), ({}, _COUNTS)),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), ({}, _OFF)),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), ({}, _OFF)),
    **dict.fromkeys(("big_bird", "gpt_neox_japanese", "megatron-bert", "openai-gpt", "rembert"), ({}, _NONE_CALLS)),
    **dict.fromkeys(("prophetnet", "xglm"), ({}, _NO_HEADS)),
    **dict.fromkeys(("falcon_mamba", "mamba", "nemotron_h", "recurrent_gemma", "rwkv", "xlstm"), ({}, _STATE)),
    **dict.fromkeys(("kimi_linear", "minimax", "qwen3_5_text", "qwen3_next"), ({}, _STATE)),
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, _STATE),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, _STATE),
    "jamba": ({"attn_layer_offset": 1, "attn_layer_period": 2}, _STATE),
    "mamba2": ({"num_heads": 8, "head_dim": 8}, _STATE),
    "cpmant": ({}, _NO_LENGTH),
    "diffllama": ({}, "layer 1 (model.layers.0.self_attn) attends twice in a pass"),
    "doge": ({}, "layer 0 (model.layers.0.self_attn) brings no mask that transformers made"),
    "gemma4_text": ({}, "has K of 2 x 512 for each of 9 tokens, config.json says 2 x 8 for each token"),
    "glm_moe_dsa": (
        {**_LATENT, "v_head_dim": 16, "index_head_dim": 8, "index_n_heads": 2},
        "asks attention for indices",
    ),
    "gpt_neo": ({"attention_types": [[["global"], 2]]}, _NOT),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"], **_MAMBA}, _STATE),
    "hrm_text": ({}, "attends twice in a pass"),
    "lfm2": ({"layer_types": ["conv", FULL]}, _STATE),
    "minicpm3": ({**_LATENT, "v_head_dim": 8}, "of each head, K has 16 numbers and V has 8"),
    "mimo_v2_flash": ({}, "and V of 2 x 128"),
    "minimax_m3_vl_text": (
        {"layer_types": [FULL, "minimax_m3_sparse"], "index_head_dim": 8, "index_n_heads": 2},
        "layer 1 (model.layers.1.self_attn) asks attention for block_indices",
    ),
    "olmo_hybrid": ({"layer_types": ["linear_attention", FULL]}, _STATE),
}


def make(folder: Path, family: str, **special: Any) -> Path:
    kind = transformers.CONFIG_MAPPING[family]
    known = {*kind().to_dict(), *kind.attribute_map}
    torch.manual_seed(0)
    config = kind(**{**{key: value for key, value in _SIZES.items() if key in known}, **special})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as ones and zeros, so a model that skips them would pass
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
