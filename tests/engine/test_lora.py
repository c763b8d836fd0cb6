"""Tests of reading adapters (LoRA): what they may be, and a line for each that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from alignedserve.architectures.families.lora import CONFIG, MOST_RANK, WEIGHTS, LoraFiles, linear_shapes, read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.errors import AdapterError
from tests.adapters import make_adapter
from tests.models import Make, gqa, llama4, opt, phi3
from tests.reference import load

_LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gqa(tmp_path_factory.mktemp("models") / "gqa")


@pytest.fixture(scope="module")
def sound(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapters") / "sound", seed=0, lora_alpha=6)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "adapter"))


def read(folder: Path, model: Path) -> LoraFiles:
    return read_lora(folder, read_config(model))


def change(folder: Path, **options: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def test_scale_and_size_are_those_of_peft(folder: Path, model: Path) -> None:
    files = read(folder, model)
    assert len(files.ranks) == 14
    assert set(files.ranks.values()) == {4}
    assert files.scales[_LAYER] == 6 / 4
    change(folder, use_rslora=True)
    assert read(folder, model).scales[_LAYER] == 6 / 2
    change(folder, use_rslora=False, alpha_pattern={"down_proj": 8})
    files = read(folder, model)
    assert files.scales[_LAYER] == 8 / 4
    assert files.scales["model.layers.0.mlp.up_proj"] == 6 / 4


@pytest.mark.parametrize("make", [phi3, llama4])
def test_the_layers_that_may_change_are_those_of_transformers(make: Make, tmp_path: Path) -> None:
    folder = make(tmp_path)
    linear = {name: layer for name, layer in load(folder).named_modules() if isinstance(layer, nn.Linear)}
    left_out = {"lm_head", *(name for name in linear if name.endswith("router"))}
    shapes = {name: tuple(layer.weight.shape) for name, layer in linear.items() if name not in left_out}
    assert linear_shapes(read_config(folder)) == shapes


def test_another_content_has_another_id(folder: Path, sound: Path, model: Path) -> None:
    assert read(folder, model).id == read(sound, model).id
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, folder / WEIGHTS)
    assert read(folder, model).id != read(sound, model).id


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"use_dora": True}, "use_dora, which is not served"),
        ({"use_new_idea": True}, "use_new_idea, which is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases of its own"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "convert it to a plain LoRA"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"lora_alpha": True}, "lora_alpha must be a number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_is_not_served_is_named(
    folder: Path, model: Path, options: dict[str, object], said: str
) -> None:
    change(folder, **options)
    with pytest.raises(AdapterError, match=said) as caught:
        read(folder, model)
    assert "\n" not in str(caught.value)


def _rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    kept = load_file(folder / WEIGHTS) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, folder / WEIGHTS)


def test_tensors_that_fit_nothing_are_named(folder: Path, model: Path) -> None:
    a, b = LoraFiles.tensor_names(_LAYER)
    wrongs: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({a: None}, "lora_A.weight is missing"),
        ({a: torch.zeros(4, 55)}, r"have? \[rank, 56\]|has \[rank, 56\]"),
        ({b: torch.zeros(32, 5)}, "do not fit this model"),
        ({a: torch.zeros(MOST_RANK + 1, 56), b: torch.zeros(32, MOST_RANK + 1)}, "rank 257 .* is above 256"),
        ({a: torch.zeros(4, 56, dtype=torch.int8)}, "holds I8"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "changes lm_head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 32)}, "neither A nor B"),
    ]
    before = load_file(folder / WEIGHTS)
    for tensors, said in wrongs:
        _rewrite(folder, **tensors)
        with pytest.raises(AdapterError, match=said):
            read(folder, model)
        save_file(before, folder / WEIGHTS)
    for rank in (1, MOST_RANK):
        _rewrite(folder, **{a: torch.zeros(rank, 56), b: torch.zeros(32, rank)})
        assert read(folder, model).ranks[_LAYER] == rank


def test_files_that_are_missing_or_broken_are_named(folder: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a folder"):
        read(tmp_path / "nowhere", model)
    (folder / WEIGHTS).write_bytes(b"\xff" * 20)
    with pytest.raises(AdapterError, match="cannot be read"):
        read(folder, model)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is not read, save it as safetensors"):
        read(folder, model)
    (folder / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match=CONFIG):
        read(folder, model)


def test_an_adapter_for_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="none of this model's layers"):
        read(folder, opt(tmp_path / "opt"))
    with pytest.raises(AdapterError, match="do not fit this model"):
        read(folder, gqa(tmp_path / "wide", hidden_size=64))
