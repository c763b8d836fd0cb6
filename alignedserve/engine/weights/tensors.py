"""Reads the tensors of a Hugging Face model folder, one after the other, each directly to its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignedserve.architectures.weight_files import INDEX, tensor_places, weight_files
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.kernels.common.quantised import AnyQuantised, rows_at_once

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FLOATS_OF_8_BITS = (torch.float8_e4m3fn,)


@dataclass(frozen=True)
class Cut:
    """A part of a stored tensor: it begins at `start` of dimension `dim`, which has size `whole` in the file."""

    dim: int  # 0 or 1
    start: int
    whole: int


def whole_shape(part: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Return the shape that a tensor has in the file, by that of a part."""
    return part if cut is None else tuple(cut.whole if dim == cut.dim else n for dim, n in enumerate(part))


def expand_into(out: Tensor, weight: AnyQuantised) -> None:
    """Write the numbers of a quantised weight, some rows at a time: in fp32 they take several times its memory."""
    at_once = rows_at_once(out.shape[1])
    for first in range(0, len(out), at_once):
        rows = slice(first, first + at_once)
        out[rows].copy_(weight.rows(rows).expanded())


class Weights(Protocol):
    """The weights of a model, by the names that transformers gives them, from files of any format."""

    def __contains__(self, name: str) -> bool: ...

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        """Read a tensor of the shape of `out`, or a part of that shape, and convert it to the dtype of `out`.

        It also reads the weight of a layer for which `quantised` returns None.
        """

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        """Return the weight [outputs, inputs] of a linear layer as the files have it quantised.

        `layer` is the name of the weight without `.weight`. `shape` is that of the part which is wanted, where there is
        a `cut` of outputs (dim 0) or of inputs (dim 1). None: the files do not have it quantised, or the kernels cannot
        multiply with what they have, so it is to be read as numbers of the served dtype.
        """
        return None


class Form:
    """How the files of a folder keep the weights of layers: here as plain numbers, in the other files quantised."""

    expands = False  # whether it has scales for floats of 8 bits

    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> AnyQuantised | None:
        """Return a layer's weight, as `Weights.quantised` says."""
        return None

    def expand(self, tensors: Tensors, name: str, part: Tensor, cut: Cut | None, out: Tensor) -> None:
        """Write the numbers of a tensor, or part, that is stored in floats of 8 bits, into `out` of its shape."""
        raise NotImplementedError  # only a form that `expands` is asked


PLAIN = Form()


class Tensors:
    """The tensors of a folder with one weight file or several. Tensors that are not asked for are never read."""

    def __init__(self, folder: Path, form: Form = PLAIN) -> None:
        self._folder, self._form = folder, form
        files = weight_files(folder)
        if (folder / INDEX).is_file():
            self._places = tensor_places(folder / INDEX)  # tensor name -> file that holds it
        else:
            self._places = dict.fromkeys(_open(files[0]).keys(), files[0])
        for file in files:
            _open(file)  # a broken file is found before anything is read

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._places

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        tensor = self.part(name, tuple(out.shape), cut)
        if tensor.dtype in _FLOATS_OF_8_BITS:
            self._form.expand(self, name, tensor, cut, out)
        else:
            out.copy_(tensor)

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        return self._form.read(self, layer, shape, cut)

    def part(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> Tensor:
        """Return a tensor of floats, or the part of it that has this shape, as it is stored."""
        # The file is opened for each tensor: the parts read count as this process's memory until the file is closed.
        path, wanted = self._place(name)[0], whole_shape(shape, cut)
        with self._opened(name) as (file, stored):
            found, tensor = _read(file, stored, shape, cut)
        if tensor.dtype not in _FLOATS and not (tensor.dtype in _FLOATS_OF_8_BITS and self._form.expands):
            raise UnsupportedModel(
                f"{path}: tensor {name} holds {tensor.dtype}, which means nothing without its scales:"
                " config.json names no quantization that has them"
            )
        if found != wanted:
            raise ModelError(f"{path}: tensor {name} has shape {found}, the configuration says {wanted}")
        return tensor

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, as it is stored."""
        with self._opened(name) as (file, stored):
            tensor: Tensor = file.get_tensor(stored) if rows is None else file.get_slice(stored)[rows]
        return tensor

    def stored_type(self, name: str) -> str:
        """Return the type of a tensor's numbers as the file calls it."""
        with self._opened(name) as (file, stored):
            return str(file.get_slice(stored).get_dtype())

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, str]]:
        """Yield the file of a tensor, and the name that it has there."""
        path, stored = self._place(name)
        try:
            yield _open(path), stored
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error

    def _place(self, name: str) -> tuple[Path, str]:
        stored = self._stored(name)
        if stored not in self._places:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        return self._places[stored], stored

    def _stored(self, name: str) -> str:
        """Return the name in the files: a model saved without its head names its tensors without the first part, and
        files of GPT-NeoX call the head otherwise."""
        known = (each for each in (name, name.replace("lm_head.", "embed_out.")) if each in self._places)
        return next(known, name.partition(".")[2])


def _read(file: Any, stored: str, shape: tuple[int, ...], cut: Cut | None) -> tuple[tuple[int, ...], Tensor]:
    """Return the stored shape, and the tensor or its part."""
    if cut is None:
        tensor: Tensor = file.get_tensor(stored)
        return tuple(tensor.shape), tensor
    part = file.get_slice(stored)
    rows = slice(cut.start, cut.start + shape[cut.dim])
    return tuple(part.get_shape()), part[rows] if cut.dim == 0 else part[:, rows]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
