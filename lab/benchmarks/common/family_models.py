"""Random models of families that our modules run and transformers could run too, each of 100 to 400 M parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.lab.benchmarks.common.models import saved

_WORDS = {"vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHARED = _WORDS | {"max_position_embeddings": 4096, "tie_word_embeddings": False}
_SIZES = _SHARED | {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4}
_DENSE = _SIZES | {"intermediate_size": 3072}
_GEMMA = _DENSE | {"head_dim": 64, "tie_word_embeddings": True}
_CHOSEN = {"num_experts_per_tok": 4}
_MIXTURE = _DENSE | _CHOSEN | {"moe_intermediate_size": 768, "head_dim": 64}
_SHARED_EXPERT = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}

# model_type -> what its configuration has beside the defaults of transformers
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "mistral": _DENSE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"query_pre_attn_scalar": 64, "sliding_window": 1024},
    "gemma3_text": _GEMMA | {"query_pre_attn_scalar": 64, "sliding_window": 512},
    "phi3": _DENSE,
    "phi": _DENSE,
    "glm": _DENSE | {"head_dim": 64},
    "glm4": _DENSE | {"head_dim": 64},
    "mixtral": _DENSE | _CHOSEN | {"intermediate_size": 768, "num_local_experts": 16},
    "qwen2_moe": _MIXTURE | {"num_experts": 16, "shared_expert_intermediate_size": 768},
    "qwen3_moe": _MIXTURE | {"num_experts": 16},
    "olmoe": _DENSE | _CHOSEN | {"intermediate_size": 768, "num_experts": 16},
    "dots1": _MIXTURE | _SHARED_EXPERT,
    "glm4_moe": _MIXTURE | _SHARED_EXPERT,
    "gpt_oss": _DENSE | _CHOSEN | {"intermediate_size": 768, "num_local_experts": 16, "head_dim": 64},
    "minimax_m2": _DENSE | _CHOSEN | {"intermediate_size": 768, "num_local_experts": 16, "head_dim": 64},
}


def make(family: str, folder: Path) -> Path:
    """Make a model of the family; its weights are those of nobody."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **FAMILIES[family])
    return saved(AutoModelForCausalLM.from_config, config, folder)
