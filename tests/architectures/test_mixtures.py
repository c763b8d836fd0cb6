"""Tests that mixtures of experts are read from their config.json, and wrong ones refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.lora import WEIGHTS, read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.routing import Scores
from alignedserve.errors import AdapterError, ConfigError, ModelError
from tests.adapters import make_adapter
from tests.models import dots1, glm4_moe, mixtral, qwen2_moe, qwen3_moe


def changed(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def read(folder: Path) -> LlamaConfig:
    config = read_config(folder)
    assert isinstance(config, LlamaConfig)
    return config


def test_layers_without_experts_are_known(tmp_path: Path) -> None:
    config = read(qwen3_moe(tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [config.routing_of(layer) is not None for layer in range(6)] == [False, True, False, False, False, True]


def test_what_all_tokens_take_has_a_size_of_its_own(tmp_path: Path) -> None:
    config = read(qwen2_moe(tmp_path))
    assert (config.expert_size, config.shared_size, config.intermediate_size) == (16, 20, 56)
    assert config.routing is not None
    assert (config.routing.scores, config.routing.shared_is_gated) == (Scores.SOFTMAX, True)


def test_half_of_a_head_turns_where_glm_says_no_other_share(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = read(changed(glm4_moe(tmp_path), rope_parameters=rope))
    assert (config.rope.dim, config.head_dim) == (8, 16)


def test_ranks_share_each_expert(tmp_path: Path) -> None:
    config, share = read(dots1(tmp_path)), read(tmp_path).share(2)
    assert isinstance(share, LlamaConfig)
    assert (share.expert_size, share.shared_size) == (config.expert_size // 2, config.shared_size // 2)
    with pytest.raises(ConfigError, match="does not divide the model's expert_size 17"):
        read(changed(tmp_path, moe_intermediate_size=17)).share(2)


@pytest.mark.parametrize(
    ("make", "changes", "complaint"),
    [
        (qwen3_moe, {"mlp_only_layers": [2]}, "mlp_only_layers must be a list of layers below 2"),
        (qwen3_moe, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 8 experts of a layer, not 9"),
        (qwen3_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, not 0"),
        (mixtral, {"num_local_experts": "8"}, "num_local_experts must be a whole number above 0, not '8'"),
        (mixtral, {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        (dots1, {"n_group": 3}, "n_group must be a divisor of n_routed_experts 8, not 3"),
        (
            qwen2_moe,
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 2},
            "layer_types must be 2 of full_attention and sliding_attention",
        ),
    ],
)
def test_wrong_keys_are_refused(
    make: Callable[[Path], Path], changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=complaint) as refusal:
        read_config(changed(make(tmp_path), **changes))
    assert "\n" not in str(refusal.value)


def test_an_adapter_may_change_what_is_beside_experts_and_no_choice(tmp_path: Path) -> None:
    folder = qwen2_moe(tmp_path / "model", mlp_only_layers=[])
    beside = make_adapter(folder, tmp_path / "beside", seed=1, targets=["down_proj"])
    assert "model.layers.0.mlp.shared_expert.down_proj" in read_lora(beside, read_config(folder)).ranks
    tensors = {name.replace(".down_proj", "_gate"): of for name, of in load_file(beside / WEIGHTS).items()}
    save_file(tensors, beside / WEIGHTS)
    with pytest.raises(AdapterError, match=r"shared_expert_gate, which is none of this model's layers") as refusal:
        read_lora(beside, read_config(folder))
    assert "\n" not in str(refusal.value)
