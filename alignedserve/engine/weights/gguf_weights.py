"""Reads the tensors of a GGUF file: of each only the rows that are asked for.

A block has 32 or 256 numbers of a row. The lower and the upper half of a byte belong to numbers that lie apart;
`_nibbles` puts them in order. Groups of a block of a K kind have scales of their own: whole numbers times the block's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.architectures.gguf.places import Kind, Place, read_places
from alignedserve.engine.weights.packed import inputs_of
from alignedserve.engine.weights.tensors import Cut, whole_shape
from alignedserve.errors import ModelError
from alignedserve.kernels.common.quantised import QuantisedWeight, joined, rows_at_once
from alignedserve.kernels.library import Library, NoLibrary

_MORE_AT_ONCE = 16  # times as many rows as torch
_MIDDLE = 128  # of 8 bits: what a weight without zeros takes for zero


def from_blocks(kind: Kind, rows: Tensor) -> QuantisedWeight:
    """Return the weight of rows, [outputs, bytes], of blocks of this kind."""
    outputs, blocks = len(rows), rows.numel() // kind.num_bytes(kind.block)
    if (unpack := _kernel(kind)) is None:
        return _READ[kind](rows.view(outputs, -1, kind.num_bytes(kind.block)))
    q = torch.empty(outputs, blocks // outputs * kind.block, dtype=torch.uint8)
    scale = torch.empty(outputs, q.shape[1] // kind.group)
    zero = None if kind is Kind.Q6_K else torch.empty_like(scale)
    unpack(
        kind.value[0],
        rows.data_ptr(),
        blocks,
        q.data_ptr(),
        scale.data_ptr(),
        zero if zero is None else zero.data_ptr(),
    )
    return QuantisedWeight(q, scale, zero, kind.bits, kind.group)


@cache
def _kernel(kind: Kind) -> Callable[..., int] | None:
    """Return the kernel that unpacks blocks of this kind in a fifth of the time, where there is one."""
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        with suppress(NoLibrary):
            return Library().kernel("unpack", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    return None


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at these bytes of each block, [outputs, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(of: Tensor) -> Tensor:
    """Return the lower halves of the bytes, and after them the upper halves."""
    return torch.cat((of & 15, of >> 4), -1)


def _around_zero(q: Tensor, scale: Tensor, bits: int, group: int) -> QuantisedWeight:
    """Return a weight whose numbers are scale * (q - the middle); q is [outputs, ...], scale [outputs, ...]."""
    return QuantisedWeight(q.flatten(1).contiguous(), scale.flatten(1).contiguous(), None, bits, group)


def _from_least(q: Tensor, scale: Tensor, least: Tensor, bits: int, group: int) -> QuantisedWeight:
    """Return a weight whose numbers are scale * q + least."""
    scale, least = scale.float().flatten(1), least.float().flatten(1)
    q, flat = q.reshape(*scale.shape, group), scale == 0  # all numbers of a flat group are the least
    if flat.any():
        q = q.masked_fill(flat[..., None], 0)
        scale = torch.where(flat, least, scale)
    zero = torch.where(flat, -1.0, -least / scale.masked_fill(scale == 0, 1.0))
    return QuantisedWeight(q.flatten(1), scale, zero, bits, group)


# --- Blocks of 32


def _q8_0(blocks: Tensor) -> QuantisedWeight:
    return _around_zero(blocks[..., 2:] ^ _MIDDLE, _half(blocks, 0), 8, 32)


def _q4_0(blocks: Tensor) -> QuantisedWeight:
    return _around_zero(_nibbles(blocks[..., 2:]), _half(blocks, 0), 4, 32)


def _q4_1(blocks: Tensor) -> QuantisedWeight:
    return _from_least(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 4, 32)


def _q5_0(blocks: Tensor) -> QuantisedWeight:
    q = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _around_zero(q + (_MIDDLE - 16), _half(blocks, 0), 8, 32)


def _q5_1(blocks: Tensor) -> QuantisedWeight:
    q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _from_least(q, _half(blocks, 0), _half(blocks, 2), 8, 32)


def _fifth_bits(of: Tensor) -> Tensor:
    """Return the bits of four bytes one by one, each as 0 or 16."""
    bits = of[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


# --- Blocks of 256


def _q4_k(blocks: Tensor) -> QuantisedWeight:
    q = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return _from_least(q, *_scales_and_least(blocks), 4, 32)


def _q5_k(blocks: Tensor) -> QuantisedWeight:
    nibbles = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _from_least(nibbles | fifth << 4, *_scales_and_least(blocks), 8, 32)


def _scales_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the least number of each of eight groups, [outputs, blocks, 8] each.

    Both have six bits: of the first four groups in bytes of their own, whose upper two bits belong to the last four.
    """
    scales, least, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((scales & 63, (rest & 15) | (scales >> 6 << 4)), -1)
    least = torch.cat((least & 63, (rest >> 4) | (least >> 6 << 4)), -1)
    return scales * _half(blocks, 0).float()[..., None], -(least * _half(blocks, 2).float()[..., None])


def _q6_k(blocks: Tensor) -> QuantisedWeight:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    q = _nibbles(low).unflatten(-1, (4, 32)) | upper << 4
    scale = blocks[..., 192:208].view(torch.int8) * _half(blocks, 208).float()[..., None]
    return _around_zero(q + (_MIDDLE - 32), scale, 8, 16)


_READ: dict[Kind, Callable[[Tensor], QuantisedWeight]] = {
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}


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
    if _kernel(place.kind) is not None:  # it needs no memory on the way
        at_once *= _MORE_AT_ONCE
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
