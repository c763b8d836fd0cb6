"""Tests of folders whose experts are in MXFP4: they say what transformers says with the same numbers expanded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.weight_files import count_numbers, quantised_bytes
from alignedserve.engine.engine import Engine
from alignedserve.errors import ConfigError, ModelError
from tests.engine.test_transformers import check_greedy
from tests.models import gpt_oss
from tests.reference import Tally, load

EXPERTS = ("gate_up_proj", "down_proj")


def packed(folder: Path) -> tuple[Path, Path]:
    """Make a model of random MXFP4, and the same model with its numbers expanded by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes a second to import

    plain = gpt_oss(folder / "plain", hidden_size=64, intermediate_size=32)
    tensors = load_file(plain / "model.safetensors")
    torch.manual_seed(1)
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith(EXPERTS):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(123, 127, blocks.shape[:-1], dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert wide.shape == tensor.shape
        tensors[name] = wide.contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    made = folder / "mxfp4"
    made.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (made / "config.json").write_text(json.dumps(config))
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    return made, plain


def test_greedy_output_is_that_of_the_expanded_model(tmp_path: Path, tally: Tally) -> None:
    made, plain = packed(tmp_path)
    check_greedy(made, tally, reference=load(plain))


def test_plans_count_the_expanded_numbers(tmp_path: Path) -> None:
    made, plain = packed(tmp_path)
    assert quantised_bytes(made, 2) == 2 * count_numbers(plain)
    stored = read_config(made).stored
    assert stored is not None
    assert stored.label == "mxfp4 of 4-bit floats"


def test_it_cannot_be_quantised_anew(tmp_path: Path) -> None:
    made, _ = packed(tmp_path)
    with pytest.raises(ConfigError, match="quantised already"):
        Engine(made, num_blocks=1, quantization=Quantization.INT4)


@pytest.mark.parametrize("lost", ["_blocks", "_scales"])
def test_blocks_of_another_shape_or_none_are_refused(lost: str, tmp_path: Path) -> None:
    made, _ = packed(tmp_path)
    tensors = load_file(made / "model.safetensors")
    name = next(name for name in tensors if name.endswith(lost))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, made / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="is stored in blocks and scales of"):
        Engine(made, num_blocks=1, dtype="float32")
    del tensors[name]
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="is missing"):
        Engine(made, num_blocks=1, dtype="float32")
