"""Reads the tensors of a Hugging Face model folder, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.model_config import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Tensors:
    """The tensors of a folder, single or sharded, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # open safetensors file by path
        self._places: dict[str, Path] = {}  # tensor name -> the file that holds it
        index = folder / INDEX
        if index.is_file():
            self._places = _places(index)
        elif (folder / WEIGHTS).is_file():
            self._places = dict.fromkeys(self._open(folder / WEIGHTS).keys(), folder / WEIGHTS)
        else:
            raise ModelError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")
        self._folder = folder

    def read(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._places:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        path = self._places[name]
        try:
            tensor: torch.Tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(f"{path}: tensor {name} holds {tensor.dtype}: quantized weights are not supported")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor

    def _open(self, path: Path) -> Any:
        if str(path) not in self._files:
            try:
                self._files[str(path)] = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
        return self._files[str(path)]


def _places(index: Path) -> dict[str, Path]:
    """Which file holds which tensor; only files beside the index."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} has no weight_map of tensors to files")
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} must be in a file of this folder, not in {file!r:.60}")
    return {name: index.parent / file for name, file in places.items()}
