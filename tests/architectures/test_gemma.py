"""Tests that Gemma, Phi and GLM are read from files of several ages, and wrong ones refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.rope import LinearScaling
from alignedserve.errors import ModelError
from tests.models import MAX_POSITIONS, gemma, gemma2, gemma3, gemma3_with_images, glm, phi3


def changed(folder: Path, **changes: Any) -> Path:
    """Set keys of the configuration; `...` takes a key away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def read(folder: Path) -> LlamaConfig:
    config = read_config(folder)
    assert isinstance(config, LlamaConfig)
    return config


def test_a_file_of_few_keys_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    path.write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}))
    config = read(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (26, 8, 4, 256)
    assert (config.vocab_size, config.max_positions, config.tied_embeddings) == (262_208, 131_072, True)
    assert config.windows[:7] == (*[1024] * 5, None, 1024)
    assert (config.rope.theta, config.rope.scaling) == (1e6, LinearScaling(8.0))
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.scaling) == (1e4, None)
    assert (config.rope_of(4), config.rope_of(5)) == (1, 0)


def test_caps_may_be_null(tmp_path: Path) -> None:
    config = read(changed(gemma2(tmp_path), attn_logit_softcapping=None, final_logit_softcapping=...))
    assert (config.score_cap, config.logit_cap) == (None, 30.0)


def test_angles_of_short_requests_limit_a_phi(tmp_path: Path) -> None:
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    keys = {"rope_parameters": ..., "rope_scaling": rope, "original_max_position_embeddings": 40}
    assert read(changed(phi3(tmp_path), **keys)).max_positions == 40 < MAX_POSITIONS


@pytest.mark.parametrize(
    ("make", "changes", "complaint"),
    [
        (gemma, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (gemma, {"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads 4, not 3"),
        (gemma2, {"layer_types": ["full_attention"]}, "layer_types must be 2 of full_attention and sliding_attention"),
        (gemma3, {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type longrope is not"),
        (gemma3_with_images, {"text_config": {"hidden_activation": "mish"}}, "hidden_activation mish is not supported"),
        (glm, {"partial_rotary_factor": 0.2, "rope_parameters": {}}, "partial_rotary_factor None is not supported"),
        (phi3, {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ],
)
def test_wrong_keys_are_refused(
    make: Callable[[Path], Path], changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=complaint) as refusal:
        read_config(changed(make(tmp_path), **changes))
    assert "\n" not in str(refusal.value)
