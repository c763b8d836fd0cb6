"""Reads the tensors of a Hugging Face model folder, one after the other, each straight to where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.weight_files import INDEX, WEIGHTS, tensor_places, weight_files

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Tensors:
    """The tensors of a folder, single or sharded. What is in it and not asked for is never read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = weight_files(folder)
        if (folder / INDEX).is_file():
            self._places = tensor_places(folder / INDEX)  # tensor name -> the file that holds it
        else:
            self._places = dict.fromkeys(_open(folder / WEIGHTS).keys(), folder / WEIGHTS)
        for file in files:
            _open(file)  # a broken file is found before anything is read

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._places

    def read_into(self, out: torch.Tensor, name: str, shape: tuple[int, ...] | None = None) -> None:
        """To `out`, converted to its dtype. The stored shape is that of `out`, or `shape` of as many numbers."""
        # The file is opened for each tensor: what was read of it counts as this process's memory until it is closed.
        path, stored = self._place(name)
        wanted = tuple(out.shape) if shape is None else shape
        try:
            tensor: torch.Tensor = _open(path).get_tensor(stored)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(f"{path}: tensor {name} holds {tensor.dtype}: quantized weights are not supported")
        if tuple(tensor.shape) != wanted:
            raise ModelError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, the configuration says {wanted}")
        out.copy_(tensor.view(out.shape))

    def _place(self, name: str) -> tuple[Path, str]:
        stored = self._stored(name)
        if stored not in self._places:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        return self._places[stored], stored

    def _stored(self, name: str) -> str:
        """A model that was saved without its head names its tensors without the first part."""
        return name if name in self._places else name.partition(".")[2]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
