"""A configuration says which layers of a Llama have a bias."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import read_config


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_are_those_of_the_configuration(family: str, key: str, tmp_path: Path) -> None:
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    given = {"model_type": family, "architectures": [name], **sizes, **heads, key: True}
    (tmp_path / "config.json").write_text(json.dumps(given))
    config, of_attention = read_config(tmp_path), key == "attention_bias"
    assert isinstance(config, LlamaConfig)
    assert (config.qkv_bias, config.out_bias) == (of_attention, of_attention)
    assert config.mlp_bias is (not of_attention and family == "llama")
