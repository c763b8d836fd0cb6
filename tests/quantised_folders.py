"""Model folders as the tools of other projects quantise them, each with the same weights expanded, in transformers.

The writers are plain: what they write is held against layers that the tools themselves wrote
(tests/engine/test_formats.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.reference import load

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of eight, from the lowest bits of a word to the highest
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Rounded:
    """A weight [outputs, inputs] as whole numbers from 0 on; scales and zeros [outputs, groups]."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    group_of: Tensor  # the group of each input
    bits: int

    @property
    def expanded(self) -> Tensor:
        by_input = [of[:, self.group_of].float() for of in (self.scale, self.zero)]
        return (self.q - by_input[1]) * by_input[0]


def rounded(
    weight: Tensor,
    bits: int,
    group: int | None,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Rounded:
    """Round a weight to whole numbers, around the middle or between the least and the largest of each group.

    With `act_order` groups have inputs that do not lie together.
    """
    outputs, inputs = weight.shape
    group = group or inputs
    group_of = torch.arange(inputs) // group
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    groups, top = -(-inputs // group), (1 << bits) - 1
    scale, zero = torch.empty(outputs, groups), torch.full((outputs, groups), float(1 << bits - 1))
    for number in range(groups):
        part = weight[:, group_of == number].float()
        if symmetric:
            scale[:, number] = part.abs().amax(1) / (top // 2)
        else:
            least, most = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale[:, number] = (most - least) / top
            zero[:, number] = (-least / scale[:, number]).round()
    scale = scale.to(dtype)
    q = (weight.float() / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return Rounded(q.int(), scale, zero.int(), group_of, bits)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row into words of 32 bits, the first number into the lowest bits."""
    of_word = 32 // bits
    rows, count = numbers.shape
    filled = torch.zeros(rows, -(-count // of_word) * of_word, dtype=torch.long)
    filled[:, :count] = numbers
    shifts = torch.arange(of_word) * bits
    packed = (filled.view(rows, -1, of_word) << shifts).sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def gptq(weight: Rounded, less_one: bool = True) -> Tensors:
    zeros = words(weight.zero.t(), weight.bits)
    if less_one:
        zeros = zeros - sum(1 << bits for bits in range(0, 32, weight.bits))
    return {
        "qweight": words(weight.q, weight.bits).t().contiguous(),
        "qzeros": zeros,
        "scales": weight.scale.t().contiguous(),
        "g_idx": weight.group_of.int(),
    }


def awq(weight: Rounded) -> Tensors:
    def packed(by_output: Tensor) -> Tensor:
        return words(by_output.t().reshape(-1, by_output.shape[0] // 8, 8)[:, :, AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": packed(weight.q),
        "qzeros": packed(weight.zero),
        "scales": weight.scale.t().contiguous(),
    }


def packed_by_inputs(weight: Rounded) -> Tensors:
    """Return the tensors of compressed-tensors' pack-quantized."""
    tensors = {
        "weight_packed": words(weight.q, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.q.shape),
    }
    if bool((weight.zero != 1 << weight.bits - 1).any()):
        tensors["weight_zero_point"] = words(weight.zero.t(), weight.bits).t().contiguous()
    if not torch.equal(weight.group_of, weight.group_of.sort().values):
        tensors["weight_g_idx"] = weight.group_of.int()
    return tensors


def bytes_each(weight: Rounded) -> Tensors:
    """Return the tensors of compressed-tensors' int-quantized."""
    tensors = {"weight": (weight.q - 128).to(torch.int8), "weight_scale": weight.scale}
    if bool((weight.zero != 128).any()):
        tensors["weight_zero_point"] = (weight.zero - 128).to(torch.int8)
    return tensors


def with_input_scale(weight: Rounded) -> Tensors:
    """Return the tensors of int-quantized, with a scale of what goes in, far from what the engine would choose."""
    return bytes_each(weight) | {
        "input_scale": torch.tensor([0.5]),
        "input_zero_point": torch.zeros(1, dtype=torch.int8),
    }


def float8(
    weight: Tensor, outputs: int | None, inputs: int | None, name: str = "weight_scale"
) -> tuple[Tensors, Tensor]:
    """Return the tensors of 8-bit floats with a scale for each block of so many outputs and inputs, and the numbers
    that they stand for."""
    sizes = outputs or weight.shape[0], inputs or weight.shape[1]
    places = [torch.arange(count) // size for count, size in zip(weight.shape, sizes, strict=True)]
    scale = torch.empty([int(of[-1]) + 1 for of in places])
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = weight[places[0] == row][:, places[1] == column]
            scale[row, column] = part.float().abs().amax() / 448
    of_each = scale[places[0]][:, places[1]]
    numbers = (weight.float() / of_each).to(torch.float8_e4m3fn)
    is_one = outputs is inputs is None
    return {"weight": numbers, name: scale.view(1) if is_one else scale}, numbers.float() * of_each


# --- Forms: what config.json says, and what each layer has

Layer = Callable[[Tensor], tuple[Tensors, Tensor]]  # a weight -> its tensors, and the numbers that they stand for


def _of(write: Callable[[Rounded], Tensors], bits: int, group: int | None, **options: Any) -> Layer:
    def layer(weight: Tensor) -> tuple[Tensors, Tensor]:
        done = rounded(weight, bits, group, **options)
        return write(done), done.expanded

    return layer


def _compressed(format: str, bits: int, strategy: str, group: int | None = None, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **more}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_W8A8 = _compressed("int-quantized", 8, "channel")
_W8A8["config_groups"]["group_0"]["input_activations"] = _DYNAMIC
_STATIC = _compressed("int-quantized", 8, "channel")
_STATIC["config_groups"]["group_0"]["input_activations"] = _DYNAMIC | {"strategy": "tensor", "dynamic": False}

Form = tuple[dict[str, Any], Layer]
FORMS: dict[str, Form] = {
    "gptq-4": (_gptq(4, 16), _of(gptq, 4, 16)),
    "gptq-4-act-order": (_gptq(4, 8, desc_act=True), _of(gptq, 4, 8, act_order=True)),
    "gptq-4-v2": (
        _gptq(4, -1, checkpoint_format="gptq_v2"),
        _of(lambda weight: gptq(weight, less_one=False), 4, None),
    ),
    "gptq-8": (_gptq(8, 16, checkpoint_format="gptq"), _of(gptq, 8, 16, symmetric=True)),
    "awq": (_AWQ, _of(awq, 4, 8)),
    "w8a8": (_W8A8, _of(bytes_each, 8, None, symmetric=True, dtype=torch.float32)),
    "w8a8-static": (_STATIC, _of(with_input_scale, 8, None, symmetric=True, dtype=torch.float32)),
    "w8a8-asymmetric": (_compressed("int-quantized", 8, "channel", symmetric=False), _of(bytes_each, 8, None)),
    "w8a16": (_compressed("pack-quantized", 8, "channel"), _of(packed_by_inputs, 8, None, symmetric=True)),
    "w4a16": (
        _compressed("pack-quantized", 4, "group", 8),
        _of(packed_by_inputs, 4, 8, symmetric=True, dtype=torch.bfloat16),
    ),
    "w4a16-asymmetric": (
        _compressed("pack-quantized", 4, "group", 8, symmetric=False),
        _of(packed_by_inputs, 4, 8),
    ),
    "w4a16-act-order": (
        _compressed("pack-quantized", 4, "group", 8, actorder="group"),
        _of(packed_by_inputs, 4, 8, symmetric=True, act_order=True),
    ),
    "fp8-tensor": (
        _compressed("float-quantized", 8, "tensor", type="float"),
        lambda weight: float8(weight, None, None),
    ),
    "fp8-channel": (
        _compressed("float-quantized", 8, "channel", type="float"),
        lambda weight: float8(weight, 1, None),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 16]},
        lambda weight: float8(weight, 24, 16, "weight_scale_inv"),
    ),
}


# Groups as the tools make them: hidden sizes of published models are multiples of 64.
PUBLISHED: dict[str, Form] = {
    "GPTQ": (_gptq(4, 64), _of(gptq, 4, 64)),
    "GPTQ act-order": (_gptq(4, 64, desc_act=True), _of(gptq, 4, 64, act_order=True)),
    "AWQ": (_AWQ | {"group_size": 64}, _of(awq, 4, 64)),
    "w4a16": (_compressed("pack-quantized", 4, "group", 64), _of(packed_by_inputs, 4, 64, symmetric=True)),
    "w8a16": FORMS["w8a16"],
    "w8a8": FORMS["w8a8"],
    "fp8": FORMS["fp8-channel"],
}


_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _place_of_expert(network: Any, name: str) -> Tensor:
    """Return where transformers, which has all experts of a layer in one tensor, has this weight of an expert."""
    matched = _OF_EXPERT.match(name)
    assert matched is not None
    experts, number = network.get_submodule(matched[1]), int(matched[2])
    place: Tensor
    if matched[3] == "down":
        place = experts.down_proj[number]
        return place
    gate, up = experts.gate_up_proj[number].chunk(2)
    place = gate if matched[3] == "gate" else up
    return place


def quantised_folder(plain: Path, folder: Path, form: str | Form, ignore: str = "lm_head") -> Any:
    """Write the model of `plain` to `folder` in a form, and return it expanded, in transformers.

    Layers whose names contain `ignore` stay plain.
    """
    config, write = FORMS[form] if isinstance(form, str) else form
    network, tensors = load(plain), load_file(plain / WEIGHTS)
    with torch.no_grad():
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear) and f"{name}.weight" in tensors and ignore not in name:
                stored, expanded = write(tensors.pop(f"{name}.weight"))
                tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
                layer.weight.copy_(expanded)
        for name in [name for name in tensors if _OF_EXPERT.match(name)]:
            stored, expanded = write(tensors.pop(name))
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in stored.items()}
            _place_of_expert(network, name).copy_(expanded)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    content = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content))
    return network
