"""Tests that a folder that cannot be served gives one error of one line that names the file, the tensor or the
option."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.engine.engine import Engine
from alignedserve.engine.weights.tensors import Tensors
from alignedserve.errors import ModelError, UnsupportedModel
from tests.models import WINDOW

FolderOf = Callable[[str], Path]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def broken(folder_of: FolderOf, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a sound folder, for a test to break."""
    return lambda name: Path(shutil.copytree(folder_of(name), tmp_path / name))


def refusal(folder: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(ModelError) as refused:
        Engine(folder, num_blocks=1)
    assert type(refused.value) is kind
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(folder) in message
    return message


def change(folder: Path, **changes: Any) -> Path:
    """Set keys of the configuration; `...` takes a key away."""
    return change_file(folder, CONFIG, changes)


def change_file(folder: Path, file: str, changes: dict[str, Any]) -> Path:
    path = folder / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


# --- config.json


def test_no_folder(tmp_path: Path) -> None:
    assert "not a folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "not a folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b'{"vocab_size": 3', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"vocab_size": ' + b"9" * 5_000 + b"}", "cannot be read"),
        (b"[1, 2]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
    ],
)
def test_a_config_that_is_no_json_object(broken: Callable[[str], Path], content: bytes, message: str) -> None:
    folder = broken("gqa-untied")
    (folder / CONFIG).write_bytes(content)
    refused = refusal(folder)
    assert message in refused
    assert CONFIG in refused


def test_no_config(broken: Callable[[str], Path]) -> None:
    folder = broken("gqa-untied")
    (folder / CONFIG).unlink()
    assert refusal(folder) == f"{folder / CONFIG} is missing"
    (folder / CONFIG).mkdir()
    assert f"{folder / CONFIG} cannot be read" in refusal(folder)


NEEDED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key(broken: Callable[[str], Path], key: str) -> None:
    folder = broken("gqa-untied")
    assert refusal(change(folder, **{key: ...})) == f"{folder / CONFIG}: {key} is missing"


@pytest.mark.parametrize("key", [*NEEDED, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", ["32", -4, [4], {}, True, 1e999, float("nan")])
def test_a_number_that_is_none(broken: Callable[[str], Path], key: str, value: Any) -> None:
    folder = broken("gqa-untied")
    refused = refusal(change(folder, **{key: value}))
    assert refused.startswith(f"{folder / CONFIG}: {key} ")


@pytest.mark.parametrize("key", NEEDED)
def test_a_number_that_is_null_or_zero(broken: Callable[[str], Path], key: str) -> None:
    folder = broken("gqa-untied")
    for value in (None, 0):
        assert refusal(change(folder, **{key: value})).startswith(f"{folder / CONFIG}: {key} ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_parameters": ..., "rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "high"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate"),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 40}, "short_factor"),
    ],
)
def test_an_option_that_makes_no_sense(broken: Callable[[str], Path], changes: dict[str, Any], named: str) -> None:
    folder = broken("gqa-untied")
    assert refusal(change(folder, **changes)).startswith(f"{folder / CONFIG}: {named} ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "must name one architecture, not LlamaForCausalLM, Other"),
        ({"architectures": "GPT2LMHeadModel"}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": [3]}, "must name one architecture, not 3"),
        ({"architectures": ...}, "(none named)"),
        ({"architectures": []}, "(none named)"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope_type axial is not supported"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "mrope"}}, "rope_type mrope is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "of their own for full_attention"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization bitsandbytes (read are compressed-"),
        ({"quantization_config": {"bits": 4}}, "quantization None"),
    ],
)
def test_what_is_not_supported(broken: Callable[[str], Path], changes: dict[str, Any], named: str) -> None:
    assert named in refusal(change(broken("gqa-untied"), **changes), UnsupportedModel)


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False}, "layer_types"),
        ("qwen2", {"layer_types": None, "max_window_layers": "all"}, "max_window_layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("opt", {"num_attention_heads": 5}, "num_attention_heads"),
        ("opt", {"ffn_dim": ...}, "ffn_dim"),
        ("llama4", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("llama4", {"moe_layers": "all"}, "moe_layers"),
    ],
)
def test_an_option_of_another_family_that_makes_no_sense(
    broken: Callable[[str], Path], model: str, changes: dict[str, Any], named: str
) -> None:
    folder = broken(model)
    assert refusal(change(folder, **changes)).startswith(f"{folder / CONFIG}: {named} ")


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("opt", {"activation_function": "gelu_10"}, "activation_function gelu_10 is not supported"),
        ("mistral", {"quantization_config": {"quant_method": "hqq"}}, "quantization hqq (read are"),
    ],
)
def test_what_is_not_supported_of_another_family(
    broken: Callable[[str], Path], model: str, changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(change(broken(model), **changes), UnsupportedModel)


def llama_config(folder: Path) -> LlamaConfig:
    config = read_config(folder)
    assert isinstance(config, LlamaConfig)
    return config


def test_windows_by_layer(broken: Callable[[str], Path]) -> None:
    """The windows of folders from several sources, and the defaults where the keys are missing."""
    assert read_config(broken("mistral")).windows == (WINDOW, WINDOW)
    assert read_config(change(broken("mistral-without-window"))).windows == ()
    qwen2 = broken("qwen2")
    assert read_config(qwen2).windows == (None, WINDOW)
    assert read_config(change(qwen2, layer_types=...)).windows == (None, WINDOW)
    assert read_config(change(qwen2, layer_types=..., max_window_layers=...)).windows == (None, None)
    assert read_config(change(qwen2, layer_types=..., sliding_window=None)).windows == ()
    assert read_config(change(qwen2, layer_types=..., use_sliding_window=...)).windows == ()


def test_keys_of_mistral_and_qwen_that_may_be_left_out(broken: Callable[[str], Path]) -> None:
    mistral = change(broken("mistral"), num_key_value_heads=..., sliding_window=..., num_attention_heads=8)
    assert read_config(mistral).num_kv_heads == 8
    assert read_config(mistral).windows == (4096, 4096)
    assert read_config(change(broken("qwen3"), head_dim=...)).head_dim == 128


def test_what_the_configs_say(folder_of: FolderOf) -> None:
    old, wide = llama_config(folder_of("old-style")), llama_config(folder_of("wide-heads"))
    assert (old.rope.theta, old.dtype, old.num_kv_heads) == (300.0, "float32", 2)
    assert (wide.rope.theta, wide.head_dim, wide.kv_dim, wide.tied_embeddings) == (10_000.0, 14, 14, True)
    assert read_config(folder_of("bfloat16")).dtype == "bfloat16"
    assert read_config(folder_of("mha-tied")).kv_bytes(3, "bfloat16") == 2 * 2 * 3 * 32 * 2


def test_all_biases_of_a_llama_are_read(folder_of: FolderOf) -> None:
    config, plain = llama_config(folder_of("llama-biases")), llama_config(folder_of("gqa-untied"))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)
    assert (plain.qkv_bias, plain.out_bias, plain.mlp_bias) == (False, False, False)


def test_keys_that_may_be_left_out(broken: Callable[[str], Path]) -> None:
    folder = change(
        broken("mha-tied"), num_key_value_heads=..., head_dim=..., rope_parameters=..., dtype=..., eos_token_id=[2, 5]
    )
    config = llama_config(folder)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.dtype) == (4, 8, 10_000.0, "float32")
    assert config.eos_tokens == {2, 5}
    assert read_config(change(folder, eos_token_id=...)).eos_tokens == frozenset()


# --- The weights


def test_no_weights(broken: Callable[[str], Path]) -> None:
    folder = broken("gqa-untied")
    (folder / WEIGHTS).unlink()
    assert f"{folder} holds neither {WEIGHTS} nor {INDEX}" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "llama-Q4_K_M.gguf"])
def test_weights_of_another_format(broken: Callable[[str], Path], name: str) -> None:
    folder = broken("gqa-untied")
    (folder / WEIGHTS).rename(folder / name)
    said = f"{folder} holds neither {WEIGHTS} nor {INDEX}: {name} is not read, save the model as safetensors"
    assert refusal(folder) == said


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_file(broken: Callable[[str], Path], keep: float) -> None:
    folder = broken("gqa-untied")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else int(keep)])
    assert f"{folder / WEIGHTS} cannot be read" in refusal(folder)


def test_a_file_that_is_cut_after_it_was_looked_at(broken: Callable[[str], Path]) -> None:
    folder = broken("gqa-untied")
    weights = Tensors(folder)
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelError, match=f"{folder / WEIGHTS} cannot be read"):
        weights.stored(DOWN)


def test_weights_of_other_bytes(broken: Callable[[str], Path]) -> None:
    folder = broken("gqa-untied")
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n")
    assert f"{folder / WEIGHTS} cannot be read" in refusal(folder)


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        DOWN,
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_a_missing_tensor(broken: Callable[[str], Path], name: str) -> None:
    folder = rewrite(broken("gqa-untied"), lambda tensors: tensors.pop(name))
    assert refusal(folder) == f"{folder}: tensor {name} is missing"


def test_a_tensor_of_another_shape(broken: Callable[[str], Path]) -> None:
    folder = rewrite(broken("gqa-untied"), lambda tensors: tensors.update({DOWN: torch.zeros(32, 8)}))
    assert refusal(folder) == f"{folder / WEIGHTS}: tensor {DOWN} has shape (32, 8), the configuration says (32, 56)"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-biases", "model.layers.1.self_attn.o_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
        ("opt", "model.decoder.embed_positions.weight"),
        ("opt-350m", "model.decoder.project_out.weight"),
    ],
)
def test_a_missing_tensor_of_another_family(broken: Callable[[str], Path], model: str, name: str) -> None:
    folder = rewrite(broken(model), lambda tensors: tensors.pop(name))
    assert refusal(folder) == f"{folder}: tensor {name} is missing"


def test_tensors_that_nobody_needs_are_not_read(broken: Callable[[str], Path]) -> None:
    folder = rewrite(
        broken("gqa-untied"), lambda tensors: tensors.update({"of.another": torch.zeros(3).to(torch.int8)})
    )
    Engine(folder, num_blocks=1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_tensor_of_quantized_numbers(broken: Callable[[str], Path], dtype: torch.dtype) -> None:
    """Quantized numbers mean nothing without their scales, which this engine does not read."""
    folder = rewrite(broken("gqa-untied"), lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    assert f"{folder / WEIGHTS}: tensor {DOWN} holds" in refusal(folder, UnsupportedModel)


def test_a_config_of_another_size(broken: Callable[[str], Path]) -> None:
    assert "has shape (97, 32), the configuration says (98, 32)" in refusal(change(broken("mha-tied"), vocab_size=98))
    assert "layers.2" in refusal(change(broken("sharded"), num_hidden_layers=3))


def shard_of(folder: Path, name: str) -> str:
    return str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def test_the_sharded_model_is_sharded(folder_of: FolderOf) -> None:
    assert len(list(folder_of("sharded").glob("*.safetensors"))) > 2
    assert not (folder_of("sharded") / WEIGHTS).exists()


def test_an_index_that_names_a_missing_file(broken: Callable[[str], Path]) -> None:
    folder = broken("sharded")
    shard = folder / shard_of(folder, DOWN)
    shard.unlink()
    assert f"{shard} cannot be read" in refusal(folder)
    shard.mkdir()
    assert f"{shard} cannot be read" in refusal(folder)


def test_a_shard_that_is_truncated(broken: Callable[[str], Path]) -> None:
    folder = broken("sharded")
    shard = folder / shard_of(folder, DOWN)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} cannot be read" in refusal(folder)


def test_a_shard_that_lacks_what_the_index_names(broken: Callable[[str], Path]) -> None:
    folder = broken("sharded")
    wrong, places = shard_of(folder, "lm_head.weight"), json.loads((folder / INDEX).read_text())["weight_map"]
    assert wrong != places[DOWN]
    change_file(folder, INDEX, {"weight_map": {**places, DOWN: wrong}})
    assert f"{folder / wrong}: tensor {DOWN} cannot be read" in refusal(folder)
    change_file(folder, INDEX, {"weight_map": {name: file for name, file in places.items() if name != DOWN}})
    assert refusal(folder) == f"{folder}: tensor {DOWN} is missing"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}"])
def test_a_broken_index(broken: Callable[[str], Path], content: str) -> None:
    folder = broken("sharded")
    (folder / INDEX).write_text(content)
    assert refusal(folder).startswith(str(folder / INDEX))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/hostname", "a/../../b", ""])
def test_an_index_that_leaves_the_folder(broken: Callable[[str], Path], file: str) -> None:
    folder = broken("sharded")
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    change_file(folder, INDEX, {"weight_map": {**places, DOWN: file}})
    assert refusal(folder).startswith(str(folder / INDEX))
