"""The shapes of fifteen models that are much used, as their config.json has them, without what no reader asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _shapes(
    architecture: str,
    family: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA, _QWEN2, _QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
_LLAMA3: Mapping[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": _LLAMA3_ROPE, "rms_norm_eps": 1e-5}
_GEMMA3: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": _shapes(
        *(_LLAMA, "llama", 128_256, 2048, 8192, 16, (32, 8), 131_072),
        **_LLAMA3,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": _shapes(
        *(_LLAMA, "llama", 128_256, 3072, 8192, 28, (24, 8), 131_072),
        **_LLAMA3,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": _shapes(_LLAMA, "llama", 128_256, 4096, 14_336, 32, (32, 8), 131_072, **_LLAMA3),
    "Llama-3.1-70B": _shapes(_LLAMA, "llama", 128_256, 8192, 28_672, 80, (64, 8), 131_072, **_LLAMA3),
    "Qwen2.5-0.5B": _shapes(_QWEN2, "qwen2", 151_936, 896, 4864, 24, (14, 2), 32_768, tie_word_embeddings=True),
    "Qwen2.5-1.5B": _shapes(_QWEN2, "qwen2", 151_936, 1536, 8960, 28, (12, 2), 32_768, tie_word_embeddings=True),
    "Qwen2.5-7B": _shapes(_QWEN2, "qwen2", 152_064, 3584, 18_944, 28, (28, 4), 32_768),
    "Qwen3-0.6B": _shapes(
        *(_QWEN3, "qwen3", 151_936, 1024, 3072, 28, (16, 8), 40_960), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-1.7B": _shapes(
        *(_QWEN3, "qwen3", 151_936, 2048, 6144, 28, (16, 8), 40_960), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-8B": _shapes(_QWEN3, "qwen3", 151_936, 4096, 12_288, 36, (32, 8), 40_960, head_dim=128),
    "Gemma-3-270m": _shapes("Gemma3ForCausalLM", "gemma3_text", 262_144, 640, 2048, 18, (4, 1), 32_768, **_GEMMA3),
    "Gemma-3-1B": _shapes("Gemma3ForCausalLM", "gemma3_text", 262_144, 1152, 6912, 26, (4, 1), 32_768, **_GEMMA3),
    "Phi-4-mini": _shapes(
        *("Phi3ForCausalLM", "phi3", 200_064, 3072, 8192, 32, (24, 8), 131_072),
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
        sliding_window=262_144,
    ),
    "Mistral-7B-v0.3": _shapes("MistralForCausalLM", "mistral", 32_768, 4096, 14_336, 32, (32, 8), 32_768),
    "SmolLM2-1.7B": _shapes(_LLAMA, "llama", 49_152, 2048, 8192, 24, (32, 32), 8192, tie_word_embeddings=True),
    "TinyLlama-1.1B": _shapes(_LLAMA, "llama", 32_000, 2048, 5632, 22, (32, 4), 2048),
}


def write(name: str, folder: Path) -> Path:
    """Write a model's config.json into the folder, and return it."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    return folder
