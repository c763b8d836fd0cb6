"""Tests of what is read from the files of DeepSeek's models, and of what their compressed vectors take in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.deepseek import DeepseekConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.routing import Routing, Scores
from alignedserve.config.config import load
from alignedserve.errors import ConfigError, ModelError
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import demand

# The keys of DeepSeek-V3's config.json that a server reads.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "quantization_config": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}


def read(folder: Path, content: dict[str, Any], **changes: Any) -> DeepseekConfig:
    (folder / "config.json").write_text(json.dumps(content | changes))
    config = read_config(folder)
    assert isinstance(config, DeepseekConfig)
    return config


def test_deepseek_v3(tmp_path: Path) -> None:
    config = read(tmp_path, V3)
    assert config.routing == Routing(
        experts=256,
        chosen=8,
        dense_layers=frozenset(range(3)),
        scores=Scores.SIGMOID,
        groups=8,
        chosen_groups=4,
        is_biased=True,
        is_normalised=True,
        factor=2.5,
    )
    assert (config.kv_rank, config.rope.dim, config.plain_dim, config.value_dim) == (512, 64, 128, 128)
    assert config.scale(0) == pytest.approx(192**-0.5 * 1.3688879**2)
    assert config.stored is not None
    assert config.numbers == pytest.approx(671_026_419_200, rel=1e-5)  # as DeepSeek counts; norms are left out here


def test_a_token_takes_its_compressed_vector_alone(tmp_path: Path) -> None:
    assert read(tmp_path, V3).kv_bytes(1, "bfloat16") == 61 * (512 + 64) * 2 == 70_272
    assert read(tmp_path, LITE).kv_bytes(1, "bfloat16") == 27 * (512 + 64) * 2 == 31_104


def test_deepseek_v2_lite_has_no_groups_and_no_compressed_queries(tmp_path: Path) -> None:
    config = read(tmp_path, LITE)
    assert config.query_rank is None
    assert config.routing == Routing(experts=256, chosen=8, scores=Scores.SOFTMAX, dense_layers=frozenset({0}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_group": 7}, "n_group must be a divisor of n_routed_experts 256, not 7"),
        ({"kv_lora_rank": 511}, "kv_lora_rank must be even, not 511"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number, not -1"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type longrope is not supported"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, V3, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method noaux_tc is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob of DeepSeek V2 is not supported"),
    ],
)
def test_ways_to_choose_that_v2_does_not_have_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, LITE, **changes)


def test_the_pool_s_pages_and_the_device_cache_count_compressed_vectors(tmp_path: Path) -> None:
    config = load({"topology": "1+1", "engine.kv_memory_mb": 1000, "engine.max_model_len": 4096}, {}, None)
    found = capacity(config, read(tmp_path, LITE))
    assert found.page_bytes == 31_104 * config.page_size
    assert found.limits.num_tokens == (1000 << 20) // (31_104 * 16) * 16


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"engine.kv_dtype": "int8"}, "engine.kv_dtype cannot be int8: this model keeps a compressed vector"),
        (
            {"schedule.memory": "hybrid", "preset": "aligned-hybrid"},
            "schedule.memory cannot be hybrid: a hidden vector has 2048 numbers, and the compressed vector that this"
            " model keeps of a token in place of K and V has 576",
        ),
    ],
)
def test_other_ways_to_keep_tokens_are_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        capacity(load(changes, {}, None), read(tmp_path, LITE))


def test_ranks_divide_heads_and_experts_and_keep_whole_vectors(tmp_path: Path) -> None:
    whole = read(tmp_path, V3)
    share = whole.share(8)
    assert isinstance(share, DeepseekConfig)
    assert (share.num_heads, share.expert_size, share.shared_size, share.intermediate_size) == (16, 256, 256, 2304)
    assert share.kv_bytes(1, "bfloat16") == whole.kv_bytes(1, "bfloat16")


def test_memory_of_ranks_counts_what_each_has_whole(tmp_path: Path) -> None:
    """A rank of four has a quarter of the 100 Mi numbers, and the other three quarters of what every rank has whole."""
    shape, header = [100, 1 << 20], tmp_path / "model.safetensors"
    text = json.dumps({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}})
    header.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    model = read(tmp_path, LITE, vocab_size=1024)
    routers, table = 27 * 2048 * 256, 1024 * 2048
    on_all, plain = 27 * 2048 * 576 + routers, 27 * 16 * 256 * 512 + routers

    def weights(**changes: Any) -> int:
        config = load({"engine.max_model_len": 1024} | changes, {}, None)
        return demand(config, model, capacity(config, model), tmp_path).weights

    numbers = 100 << 20
    assert weights() == 2 * numbers
    ranks = {"engine.tensor_parallel_size": 4}
    assert weights(**ranks) == 2 * ((numbers - table) // 4 + table) + 2 * on_all * 3 // 4
    with_scales = numbers + numbers // 16  # two bytes for 32 numbers
    assert weights(**{"engine.quantization": "int8"}) == pytest.approx(with_scales + table + 2 * plain, rel=0.01)
