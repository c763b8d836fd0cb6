"""Tiny random model folders of every family, each with a detail that has broken servers before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 97
MAX_POSITIONS = 160
WINDOW = 24  # tokens that a query sees, where there is a window

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rms_norm_eps": 0.01,  # large enough to be noticed when missing
    # Random weights are far from zero: with the usual 0.02, attention hardly counts, and a model that forgets its past
    # would pass.
    "initializer_range": 0.25,
}


def made(
    folder: Path, config: transformers.PretrainedConfig, seed: int, dtype: torch.dtype, max_shard_size: str = "1GB"
) -> Path:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):  # also norms: all ones or zeros nothing would miss
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def llama(folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any) -> Path:
    return made(folder, transformers.LlamaConfig(**{**BASE, **changes}), len(changes), dtype, max_shard_size)


def old_style(folder: Path) -> Path:
    """Write the config as transformers 4 did: rope_theta at the top, rope_scaling null, torch_dtype."""
    llama(folder, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config))
    return folder


def gqa(folder: Path, **more: Any) -> Path:
    return llama(folder, num_key_value_heads=2, tie_word_embeddings=False, **more)


def mistral(folder: Path, **changes: Any) -> Path:
    config = {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": WINDOW, **changes}
    return made(folder, transformers.MistralConfig(**config), 1, torch.float32)


def qwen2(folder: Path, **changes: Any) -> Path:
    """Make a Qwen2 whose second layer has a window."""
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return made(
        folder, transformers.Qwen2Config(**{**BASE, "num_key_value_heads": 2, **windows, **changes}), 2, torch.float32
    )


def qwen3(folder: Path, **changes: Any) -> Path:
    """Make a Qwen3 with as many numbers for K as in a hidden vector, though two heads share them."""
    config = {**BASE, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, **changes}
    return made(folder, transformers.Qwen3Config(**config), 3, torch.float32)


def opt(folder: Path, **changes: Any) -> Path:
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "init_std": 0.25,
        "bos_token_id": 2,
    }
    return made(folder, transformers.OPTConfig(**{**base, **changes}), 4, torch.float32)


def opt_350m(folder: Path, **changes: Any) -> Path:
    return opt(folder, do_layer_norm_before=False, word_embed_proj_dim=20, **changes)


def without_its_head(folder: Path) -> Path:
    """Rewrite OPT as the hub has some sizes: names without the first part."""
    opt(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


_LATENT: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key not in ("num_hidden_layers", "tie_word_embeddings")},
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_OF_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_scaling_factor",
)
_COMPRESSED_QUERY = {"q_lora_rank": 20, "attention_bias": True}
_GROUPS = {"n_group": 4, "topk_group": 2}


def deepseek_v2(folder: Path, **changes: Any) -> Path:
    return made(folder, transformers.DeepseekV2Config(**{**_LATENT, **changes}), 6, torch.float32)


def deepseek_v3(folder: Path, **changes: Any) -> Path:
    config = transformers.DeepseekV3Config(**{**_LATENT, **_COMPRESSED_QUERY, **_GROUPS, **changes})
    return biased(made(folder, config, 7, torch.float32))


def biased(folder: Path) -> Path:
    """Give the experts numbers that count in their choice; a new model has zeros, which nothing would miss."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = 0.2 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(8))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


_MIXTURE: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
_ALL_EXPERTS = {"num_experts_per_tok": 8}


def mixtral(folder: Path, **changes: Any) -> Path:
    special = {"intermediate_size": 24, "num_local_experts": 8, "sliding_window": WINDOW}
    return made(folder, transformers.MixtralConfig(**{**_MIXTURE, **special, **changes}), 11, torch.float32)


def gpt_oss(folder: Path, **changes: Any) -> Path:
    """Make a mixture with sinks and biases, whose first layer has a window."""
    special = {"intermediate_size": 24, "num_local_experts": 8, "head_dim": 16, "sliding_window": WINDOW}
    return made(folder, transformers.GptOssConfig(**{**_MIXTURE, **special, **changes}), 19, torch.float32)


def qwen2_moe(folder: Path, **changes: Any) -> Path:
    """Make a mixture whose first layer is dense, and whose experts have a gated one beside them."""
    special = {"num_experts": 8, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}
    return made(folder, transformers.Qwen2MoeConfig(**{**_MIXTURE, **special, **changes}), 12, torch.float32)


def qwen3_moe(folder: Path, **changes: Any) -> Path:
    special = {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True}
    return made(folder, transformers.Qwen3MoeConfig(**{**_MIXTURE, **special, **changes}), 13, torch.float32)


def olmoe(folder: Path, **changes: Any) -> Path:
    special = {"num_experts": 8, "intermediate_size": 24}
    return made(folder, transformers.OlmoeConfig(**{**_MIXTURE, **special, **changes}), 15, torch.float32)


def glm4_moe(folder: Path, **changes: Any) -> Path:
    special = {"n_routed_experts": 8, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}
    return biased(made(folder, transformers.Glm4MoeConfig(**{**_MIXTURE, **special, **changes}), 16, torch.float32))


def minimax_m2(folder: Path, **changes: Any) -> Path:
    special = {"num_local_experts": 8, "intermediate_size": 24, "head_dim": 16, "rotary_dim": 8}
    return biased(made(folder, transformers.MiniMaxM2Config(**{**_MIXTURE, **special, **changes}), 17, torch.float32))


def dots1(folder: Path, **changes: Any) -> Path:
    special = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    return biased(
        made(folder, transformers.Dots1Config(**{**_MIXTURE, **special, **_GROUPS, **changes}), 14, torch.float32)
    )


def llama4(folder: Path, **changes: Any) -> Path:
    """Make a Llama 4 of four layers: the last does not turn, the second and the fourth have experts."""
    base = {
        **BASE,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 16,
        "intermediate_size_mlp": 56,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": WINDOW,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "tie_word_embeddings": False,
    }
    return made(folder, transformers.Llama4TextConfig(**{**base, **changes}), 14, torch.float32)


def with_images(folder: Path) -> Path:
    """Rewrite a Llama 4 as the hub has it: the text part has a prefix and a section of its own, beside other parts."""
    path = llama4(folder) / "config.json"
    config = json.loads(path.read_text())
    dtype, eos = config.pop("dtype"), config.pop("eos_token_id")
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "eos_token_id": [eos, 5]}
    path.write_text(json.dumps({**whole, "dtype": dtype, "text_config": {**config, "architectures": None}}))
    tensors = load_file(folder / "model.safetensors")
    beside = {"vision_model.class_embedding": torch.ones(8)}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**named, **beside}, folder / "model.safetensors", {"format": "pt"})
    return folder


# With the table of words as its head a random Gemma says the last word again: its embeddings are multiplied.
_GEMMA: dict[str, Any] = {**BASE, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def gemma(folder: Path, **changes: Any) -> Path:
    return made(folder, transformers.GemmaConfig(**{**_GEMMA, **changes}), 21, torch.float32)


def gemma2(folder: Path, **changes: Any) -> Path:
    """Make a Gemma 2 with caps that scores and logits reach."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
    return made(folder, transformers.Gemma2Config(**{**_GEMMA, **_WINDOWED, **caps, **changes}), 22, torch.float32)


def gemma3(folder: Path, **changes: Any) -> Path:
    config = transformers.Gemma3TextConfig(**{**_GEMMA, **_WINDOWED, "query_pre_attn_scalar": 24, **changes})
    return made(folder, config, 23, torch.float32)


def gemma3_of_first_files(folder: Path) -> Path:
    """Rewrite a Gemma 3 as the hub has it: each layer's type by a pattern, angles by keys of their own."""
    path = gemma3(folder) / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"sliding_window_pattern": 2, "rope_theta": 300.0, "rope_local_base_freq": 50.0, "rope_scaling": None}
    path.write_text(json.dumps(config))
    return folder


def gemma3_with_images(folder: Path) -> Path:
    """Make a Gemma 3 as the hub has it: the text part has a prefix and a section of its own, and few keys."""
    few = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "layer_types")
    more = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
    path = gemma3(folder, query_pre_attn_scalar=256, rms_norm_eps=1e-6, tie_word_embeddings=True) / "config.json"
    config = json.loads(path.read_text())
    text = {key: config[key] for key in few + more} | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    tiny = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "image_size", "patch_size")
    whole = transformers.Gemma3Config(
        text_config=text, vision_config=dict.fromkeys(tiny, 8) | {"num_hidden_layers": 1}
    ).to_dict()
    whole |= {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [2, 5], "text_config": text}
    path.write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


_FUSED: dict[str, Any] = {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0}


def phi3(folder: Path, **changes: Any) -> Path:
    return made(folder, transformers.Phi3Config(**{**_FUSED, "sliding_window": WINDOW, **changes}), 24, torch.float32)


def glm(folder: Path, **changes: Any) -> Path:
    return made(folder, transformers.GlmConfig(**{**_FUSED, "head_dim": 16, **changes}), 25, torch.float32)


def glm4(folder: Path, **changes: Any) -> Path:
    return made(folder, transformers.Glm4Config(**{**_FUSED, "head_dim": 16, **changes}), 26, torch.float32)


Make = Callable[[Path], Path]

# One family for each way of computing: the property tests run on all of these.
MODELS: dict[str, Make] = {
    "mha-tied": llama,
    "gqa-untied": gqa,
    "wide-heads": lambda folder: llama(folder, head_dim=14, num_key_value_heads=1),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "opt": opt,
    "opt-350m": opt_350m,
    "llama4": llama4,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "youtu": lambda folder: made(
        folder,
        transformers.YoutuConfig(**{key: value for key, value in _LATENT.items() if key not in _OF_EXPERTS}),
        10,
        torch.float32,
    ),
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "gpt-oss": gpt_oss,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "glm4": glm4,
}

# Models with the same computation, stored in other files.
STORED: dict[str, Make] = {
    "sharded": lambda folder: gqa(folder, max_shard_size="20KB"),
    "old-style": old_style,
    "bfloat16": lambda folder: gqa(folder, dtype=torch.bfloat16),
    "no-head": without_its_head,
    "llama4-with-images": with_images,
    "gemma3-with-images": gemma3_with_images,
    "gemma3-of-first-files": gemma3_of_first_files,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 40}

# Variants of a family by its options: their logits are compared.
OPTIONS: dict[str, Make] = {
    "llama-biases": lambda folder: gqa(folder, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda folder: llama(folder, **_rope("linear", factor=2.5)),
    "llama-dynamic": lambda folder: llama(folder, **_rope("dynamic", factor=2.0)),
    "llama-llama3": lambda folder: llama(folder, head_dim=16, **_rope("llama3", **_LLAMA3)),
    "llama-yarn": lambda folder: llama(folder, head_dim=16, **_rope("yarn", **_YARN)),
    "llama-yarn-scales": lambda folder: llama(folder, **_rope("yarn", mscale=0.7, mscale_all_dim=1.3, **_YARN)),
    "llama-yarn-options": lambda folder: llama(
        folder, **_rope("yarn", attention_factor=1.2, beta_fast=16, beta_slow=2, truncate=False, **_YARN)
    ),
    "llama-proportional": lambda folder: llama(folder, **_rope("proportional", factor=2.0, partial_rotary_factor=0.5)),
    "mistral-without-window": lambda folder: mistral(folder, sliding_window=None),
    "qwen2-layer-types": lambda folder: qwen2(folder, layer_types=["sliding_attention", "full_attention"]),
    "qwen2-without-window": lambda folder: qwen2(folder, use_sliding_window=False, tie_word_embeddings=False),
    "qwen3-biases": lambda folder: qwen3(folder, attention_bias=True, num_key_value_heads=1),
    "qwen3-window": lambda folder: qwen3(folder, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "opt-plain": lambda folder: opt(folder, enable_bias=False, layer_norm_elementwise_affine=False),
    "opt-no-final-norm": lambda folder: opt(folder, _remove_final_layer_norm=True, activation_function="gelu"),
    "opt-projected": lambda folder: opt(folder, word_embed_proj_dim=20),
    "opt-untied": lambda folder: opt(folder, tie_word_embeddings=False),
    "gemma": gemma,
    "gemma-tied": lambda folder: gemma(folder, tie_word_embeddings=True),
    "gemma-biases": lambda folder: gemma(folder, attention_bias=True, hidden_act="gelu"),
    "gemma2-plain": lambda folder: gemma2(folder, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3-ropes": lambda folder: gemma3(
        folder,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
        },
    ),
    "gemma3-capped": lambda folder: gemma3(
        folder, final_logit_softcapping=3.0, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "phi3-partial": lambda folder: phi3(
        folder, hidden_size=64, sliding_window=None, partial_rotary_factor=0.75, num_key_value_heads=1
    ),
    "phi3-longrope": lambda folder: phi3(
        folder,
        original_max_position_embeddings=MAX_POSITIONS - 40,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.5, 2.0, 3.5],
            "long_factor": [9.0] * 4,
        },
    ),
    "glm": glm,
    "glm-all-turns": lambda folder: glm(folder, partial_rotary_factor=1.0, attention_bias=False),
    "llama4-all-turn": lambda folder: llama4(folder, no_rope_layers=[1] * 4, use_qk_norm=False, attention_bias=True),
    "llama4-none-turns": lambda folder: llama4(folder, no_rope_layers=[0] * 4, tie_word_embeddings=True),
    "llama4-cool": lambda folder: llama4(
        folder, attn_temperature_tuning=False, moe_layers=[0, 1, 2, 3], num_experts_per_tok=1
    ),
    "llama4-one-head-of-k": lambda folder: llama4(folder, num_key_value_heads=1),
    "llama4-all-experts": lambda folder: llama4(folder, num_experts_per_tok=4),
    "llama4-llama3": lambda folder: llama4(folder, **_rope("llama3", **{**_LLAMA3, "high_freq_factor": 1.0})),
    "deepseek-v2-groups": lambda folder: deepseek_v2(
        folder, topk_method="group_limited_greedy", **_COMPRESSED_QUERY, **_GROUPS
    ),
    "deepseek-v2-yarn": lambda folder: deepseek_v2(folder, **_rope("yarn", mscale=0.7, mscale_all_dim=0.7, **_YARN)),
    "deepseek-v3-yarn": lambda folder: deepseek_v3(folder, **_rope("yarn", mscale=0.7, mscale_all_dim=1.3, **_YARN)),
    "deepseek-v3-halves": lambda folder: deepseek_v3(folder, rope_interleave=False, q_lora_rank=None),
    "deepseek-v2-all-experts": lambda folder: deepseek_v2(folder, num_experts_per_tok=8, routed_scaling_factor=0.5),
    "deepseek-v3-all-experts": lambda folder: deepseek_v3(
        folder, num_experts_per_tok=8, topk_group=4, routed_scaling_factor=0.5
    ),
    "deepseek-v3-plain-weights": lambda folder: deepseek_v3(folder, norm_topk_prob=False, n_group=1, topk_group=1),
    "mixtral-without-window": lambda folder: mixtral(folder, sliding_window=None),
    "gpt-oss-all-experts": lambda folder: gpt_oss(folder, **_ALL_EXPERTS),
    "mixtral-all-experts": lambda folder: mixtral(folder, **_ALL_EXPERTS, initializer_range=0.15),
    "qwen2-moe-normalised": lambda folder: qwen2_moe(folder, norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[]),
    "qwen2-moe-window": lambda folder: qwen2_moe(
        folder, use_sliding_window=True, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen2-moe-all-experts": lambda folder: qwen2_moe(folder, **_ALL_EXPERTS),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-every-second": lambda folder: qwen3_moe(folder, decoder_sparse_step=2, norm_topk_prob=False),
    "qwen3-moe-window": lambda folder: qwen3_moe(folder, use_sliding_window=True, sliding_window=WINDOW),
    "qwen3-moe-biases": lambda folder: qwen3_moe(folder, attention_bias=True),
    "olmoe": olmoe,
    "olmoe-normalised": lambda folder: olmoe(folder, norm_topk_prob=True, attention_bias=True),
    "glm4-moe": glm4_moe,
    "glm4-moe-plain": lambda folder: glm4_moe(folder, use_qk_norm=False, attention_bias=False, n_group=4, topk_group=2),
    "minimax-m2": minimax_m2,
    "dots1": dots1,
    "dots1-normalised": lambda folder: dots1(folder, norm_topk_prob=True, n_group=1, topk_group=1),
    "glm4-moe-lite": lambda folder: biased(
        made(folder, transformers.Glm4MoeLiteConfig(**{**_LATENT, **_COMPRESSED_QUERY, "n_group": 1}), 9, torch.float32)
    ),
}
