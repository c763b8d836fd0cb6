"""Reads the tensors of a GGUF file: of each only the rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.architectures.gguf.places import Kind, Place, read_places
from alignedserve.engine.weights.gguf_blocks import from_blocks
from alignedserve.engine.weights.packed import inputs_of
from alignedserve.engine.weights.tensors import Cut, whole_shape
from alignedserve.errors import ModelError
from alignedserve.kernels.common.quantised import QuantisedWeight, joined, rows_at_once

_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


class GgufWeights:
    """The tensors of the GGUF file from which a model folder was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = read_places(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        """Read a tensor into `out`, its numbers expanded where they are quantised."""
        shape = tuple(out.shape)
        place = self._place(name, shape, cut)
        if not place.kind.is_float:
            for rows, part in zip(out.split(rows_at_once(place.shape[1])), _parts(place, shape, cut), strict=True):
                rows.copy_(part.expanded())
            return
        numbers = _rows(place, *_range(shape, cut)).view(_FLOATS[place.kind])
        if cut is not None and cut.dim == 1:
            numbers = numbers[:, cut.start : cut.start + shape[1]]
        numbers = numbers.view(shape)
        out.copy_(numbers.float() - place.more if place.more else numbers)

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> QuantisedWeight | None:
        """Return the weight of a layer, or None where the file has it in floating point."""
        place = self._place(f"{layer}.weight", shape, cut)
        return None if place.kind.is_float else joined(_parts(place, shape, cut), shape[0])

    def _place(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> Place:
        if name not in self._places:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        place = self._places[name]
        wanted = whole_shape(shape, cut)
        if place.shape != wanted:
            raise ModelError(f"{place.file}: tensor {name} has shape {place.shape}, its metadata says {wanted}")
        return place


def _parts(place: Place, shape: tuple[int, ...], cut: Cut | None) -> Iterator[QuantisedWeight]:
    """Yield the weight that is asked for, some rows at a time: unpacking takes several times the memory of them."""
    at_once, (first, count) = rows_at_once(place.shape[1]), _range(shape, cut)
    for begin in range(first, first + count, at_once):
        weight = from_blocks(place.kind, _rows(place, begin, min(at_once, first + count - begin)))
        yield weight if cut is None or cut.dim == 0 else inputs_of(weight, place.file.name, cut.start, shape[1])


def _range(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, int]:
    """Return the first row that is asked for, and how many are."""
    return cut.start if cut is not None and cut.dim == 0 else 0, shape[0]


def _rows(place: Place, first: int, count: int) -> Tensor:
    """Return the bytes of some rows, in the order of transformers, [rows, bytes]."""
    row_bytes = place.num_bytes // place.shape[0]
    if place.rows is None:
        return _read(place, first, count, row_bytes)
    view, swap = place.rows.view, place.rows.swap
    order = torch.arange(place.shape[0]).view(view).transpose(*swap).flatten()[first : first + count]
    begin = int(order.min())
    return _read(place, begin, int(order.max()) + 1 - begin, row_bytes)[order - begin]


def _read(place: Place, first: int, count: int, row_bytes: int) -> Tensor:
    read = torch.empty(count, row_bytes, dtype=torch.uint8)
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset + first * row_bytes)
            found = file.readinto(read.numpy().data)
    except OSError as error:
        raise ModelError(f"{place.file} cannot be read: {error}") from error
    if found != read.nbytes:
        raise ModelError(f"{place.file} ends before its last tensor does: it was changed since its folder was made")
    return read
