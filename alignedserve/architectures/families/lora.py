"""Read and check an adapter (LoRA) in PEFT's format, without torch: its configuration, and the header of its weights.

adapter_config.json          rank, alpha, and options; those that change more than linear layers are refused by name
adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [rank, inputs], and lora_B [outputs, rank]
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alignedserve.architectures.config import ModelConfig
from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.opt import OptConfig
from alignedserve.architectures.given import read_json
from alignedserve.architectures.weight_files import FLOATS, read_shapes
from alignedserve.errors import AdapterError, ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
_PIECE = 1 << 20
_PANEL = 64  # outputs of B that lie together (kernels/common/adapters.py)
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Options that change more than A and B of linear layers say, by what they are called to people.
_REFUSED = {
    "modules_to_save": "whole layers of its own (modules_to_save)",
    "lora_bias": "biases of its own (lora_bias)",
    "layer_replication": "layers that are there twice (layer_replication)",
    "trainable_token_indices": "tokens of its own (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "alora_invocation_tokens": "tokens that switch it on (alora_invocation_tokens)",
    "kasa_config": "singular values of its own (kasa_config)",
}
_CHANGES_BASE = (
    "pissa",
    "olora",
    "corda",
    "lora_ga",
)  # beginnings of init_lora_weights for which the model was changed too


@dataclass(frozen=True)
class LoraFiles:
    """An adapter whose files fit its model."""

    folder: Path
    ranks: Mapping[str, int]  # linear layer -> rank
    scales: Mapping[str, float]  # linear layer -> factor of B A x
    shapes: Mapping[str, tuple[int, int]]  # linear layer -> its outputs and inputs

    @cached_property
    def id(self) -> str:
        """Return a hash of the content, so that another adapter of the same name has another."""
        content = b"".join(_hash_of(self.folder / name) for name in (CONFIG, WEIGHTS))
        return hashlib.sha256(content).hexdigest()[:32]

    def num_bytes(self, of_number: int) -> int:
        """Return the bytes that a worker of one rank keeps; outputs are filled up to whole panels."""
        return of_number * sum(
            rank * inputs + (rank + rank % 2) * -(-outputs // _PANEL) * _PANEL
            for rank, (outputs, inputs) in ((rank, self.shapes[layer]) for layer, rank in self.ranks.items())
        )

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @staticmethod
    def tensor_names(layer: str) -> tuple[str, str]:
        """Return the names of A and B of a layer."""
        return f"{_PREFIX}{layer}{_A}", f"{_PREFIX}{layer}{_B}"


def read_lora(folder: Path, model: ModelConfig) -> LoraFiles:
    """Return what the files of an adapter say; raise AdapterError, in a line, where they do not fit this model."""
    shapes = linear_shapes(model)
    if not shapes:
        raise AdapterError(
            f"{folder}: adapters change Llama's family, Gemma, GLM, Phi-3, Llama 4 and OPT, and not this"
        )
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder: name one with {CONFIG} and {WEIGHTS}")
    try:
        given, tensors = read_json(folder / CONFIG), _read_tensors(folder)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    _check_options(folder, given)
    layers = dict.fromkeys(_layer_of(folder, name) for name in tensors)
    if not layers:
        raise AdapterError(f"{folder / WEIGHTS} has no tensors of an adapter")
    ranks = {layer: _rank(folder, layer, tensors, shapes) for layer in layers}
    scales = {layer: _scale(folder, given, layer, rank) for layer, rank in ranks.items()}
    return LoraFiles(folder, ranks, scales, {layer: shapes[layer] for layer in ranks})


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each linear layer that adapters may change, by its name in transformers."""
    if isinstance(model, LlamaConfig):
        prefix, of_layers = f"{model.prefix}.layers", [_shapes_of_llama(model, n) for n in range(model.num_layers)]
    elif isinstance(model, OptConfig):
        prefix, of_layers = "model.decoder.layers", [_shapes_of_opt(model)] * model.num_layers
    else:
        return {}
    return {f"{prefix}.{n}.{name}": shape for n, shapes in enumerate(of_layers) for name, shape in shapes.items()}


def _shapes_of_opt(model: OptConfig) -> dict[str, tuple[int, int]]:
    hidden, query, inner = model.hidden_size, model.query_dim, model.intermediate_size
    shapes = {f"self_attn.{part}_proj": (query, hidden) for part in "qkv"}
    return shapes | {"self_attn.out_proj": (hidden, query), "fc1": (inner, hidden), "fc2": (hidden, inner)}


def _shapes_of_llama(model: LlamaConfig, number: int) -> dict[str, tuple[int, int]]:
    """Return the layers that all tokens run, of a mixture what it has beside its experts."""
    hidden, query, kv, names = model.hidden_size, model.query_dim, model.kv_dim, model.names
    shapes = {"self_attn.o_proj": (hidden, query)}
    if names.qkv is None:
        outputs = {"q": query, "k": kv, "v": kv}
        shapes |= {f"self_attn.{name}_proj": (out, hidden) for name, out in outputs.items()}
    else:
        shapes[f"self_attn.{names.qkv}"] = (query + 2 * kv, hidden)
    routing = model.routing_of(number)
    mlp, inner = (names.mlp, model.intermediate_size) if routing is None else (routing.names.shared, model.shared_size)
    if not inner:
        return shapes
    shapes[f"{mlp}.down_proj"] = (hidden, inner)
    if names.gate_up is None:
        shapes |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    else:
        shapes[f"{mlp}.{names.gate_up}"] = (2 * inner, hidden)
    return shapes


def _read_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapter's tensors."""
    path = folder / WEIGHTS
    if not path.is_file():
        other = next((f": {found.name} is not read, save it as safetensors" for found in folder.glob("*.bin")), "")
        raise AdapterError(f"{folder} has no {WEIGHTS}{other}")
    tensors = read_shapes(path)
    for name, (dtype, _) in tensors.items():
        if dtype not in FLOATS:
            raise AdapterError(f"{path}: tensor {name} holds {dtype}, and not floats of 16 bits or more")
    return {name: shape for name, (_, shape) in tensors.items()}


def _check_options(folder: Path, given: Mapping[str, Any]) -> None:
    path = folder / CONFIG
    if given.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {given.get('peft_type')!r:.40}, and only LORA is served")
    for key in given:  # such as use_dora: another way of computing than A and B
        if key.startswith("use_") and key != "use_rslora" and given[key]:
            raise AdapterError(f"{path}: this adapter has {key}, which is not served: train a plain LoRA")
    for key, what in _REFUSED.items():
        if given.get(key):
            raise AdapterError(f"{path}: this adapter has {what}, which is not served")
    if given.get("bias", "none") != "none":
        raise AdapterError(f"{path}: this adapter has biases of its own (bias {given['bias']!r:.20}): train with none")
    begun = given.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights {begun:.20} changed the model's own weights: convert it to a plain LoRA"
        )


def _layer_of(folder: Path, tensor: str) -> str:
    for end in (_A, _B):
        if tensor.startswith(_PREFIX) and tensor.endswith(end):
            return tensor[len(_PREFIX) : -len(end)]
    raise AdapterError(f"{folder / WEIGHTS}: tensor {tensor:.120} is neither A nor B of a linear layer")


def _rank(
    folder: Path, layer: str, tensors: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, int]]
) -> int:
    """Return the rank of an adapter's layer; raise where its A and B do not fit the model's layer."""
    path = folder / WEIGHTS
    if layer not in shapes:
        raise AdapterError(
            f"{path} changes {layer:.100}, which is none of this model's layers that adapters may change"
        )
    for name in LoraFiles.tensor_names(layer):
        if name not in tensors:
            raise AdapterError(f"{path}: tensor {name} is missing")
    a, b = (tensors[name] for name in LoraFiles.tensor_names(layer))
    outputs, inputs = shapes[layer]
    rank = a[0] if a else 0
    if a != (rank, inputs) or b != (outputs, rank) or type(rank) is not int or rank < 1:
        raise AdapterError(
            f"{path}: A {list(a)} and B {list(b)} of {layer} do not fit this model: it has [rank, {inputs}] and"
            f" [{outputs}, rank] there"
        )
    if rank > MOST_RANK:
        raise AdapterError(f"{path}: rank {rank} of {layer} is above {MOST_RANK}, the largest that is served")
    return rank


def _scale(folder: Path, given: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    alpha = _of_pattern(given.get("alpha_pattern"), layer, given.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{folder / CONFIG}: lora_alpha must be a number, not {alpha!r:.40}")
    return float(alpha) / (math.sqrt(rank) if given.get("use_rslora") else rank)


def _of_pattern(patterns: object, layer: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the layer's name, as PEFT finds it."""
    named = patterns.items() if isinstance(patterns, dict) else ()
    try:
        return next((value for pattern, value in named if re.match(rf"(.*\.)?({pattern})$", layer)), usual)
    except re.error:
        return usual


def _hash_of(path: Path) -> bytes:
    read = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                read.update(piece)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from error
    return read.digest()
