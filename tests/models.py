"""Tiny random Llama folders, each with one thing about it that has broken servers before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 97
MAX_POSITIONS = 160

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rms_norm_eps": 0.01,  # large enough to be missed
    # Far from zero: with the usual 0.02 attention hardly counts, and a model that forgets its past would pass.
    "initializer_range": 0.25,
}


def llama(folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any) -> Path:
    torch.manual_seed(len(changes))
    config = LlamaConfig(**{**_BASE, **changes})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # which otherwise are all ones, and could be left out
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def old_style(folder: Path) -> Path:
    """As transformers 4 wrote it: rope_theta at the top, rope_scaling null, torch_dtype."""
    llama(folder, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config))
    return folder


def gqa(folder: Path, **more: Any) -> Path:
    return llama(folder, num_key_value_heads=2, tie_word_embeddings=False, **more)


MODELS: dict[str, Callable[[Path], Path]] = {
    "mha-tied": llama,
    "gqa-untied": gqa,
    "wide-heads": lambda folder: llama(folder, head_dim=14, num_key_value_heads=1),
    "sharded": lambda folder: gqa(folder, max_shard_size="20KB"),
    "old-style": old_style,
    "bfloat16": lambda folder: gqa(folder, dtype=torch.bfloat16),
}
