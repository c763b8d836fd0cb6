"""Tells where the tensors of a GGUF file lie and how they are stored: the folder of the file keeps this table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from alignedserve.errors import ModelError

PLACES = "gguf.json"


class Kind(Enum):
    """How a tensor's numbers are stored: the format's id, numbers of a block, and its bytes; and, where they are
    quantised, how the engine keeps them: bits of a number, numbers of a group, and bytes of its scale and zero."""

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18, 4, 32, 2
    Q4_1 = 3, 32, 20, 4, 32, 8
    Q5_0 = 6, 32, 22, 8, 32, 2
    Q5_1 = 7, 32, 24, 8, 32, 8
    Q8_0 = 8, 32, 34, 8, 32, 2
    Q4_K = 12, 256, 144, 4, 32, 8
    Q5_K = 13, 256, 176, 8, 32, 8
    Q6_K = 14, 256, 210, 8, 16, 4
    BF16 = 30, 1, 2

    @property
    def block(self) -> int:
        return self.value[1]

    def num_bytes(self, numbers: int) -> int:
        return numbers // self.block * self.value[2]

    @property
    def is_float(self) -> bool:
        return self.block == 1

    @property
    def bits(self) -> int:
        """Return in how many bits the engine keeps a quantised number."""
        *_, bits, _group, _more = self.value
        return bits

    @property
    def group(self) -> int:
        *_, group, _more = self.value
        return group


_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Rows:
    """The order in which a file has a tensor's rows: seen as `view`, the axes `swap` have changed places."""

    view: tuple[int, ...]
    swap: tuple[int, int]


@dataclass(frozen=True)
class Place:
    """A tensor: where it lies, and how it is stored."""

    file: Path
    kind: Kind
    shape: tuple[int, ...]
    offset: int  # bytes from the begin of the file
    rows: Rows | None = None  # None: the rows are in the order of transformers
    more: float = 0.0  # how much more than in transformers its numbers are

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(self.numbers)

    def kept_bytes(self, whole: int, is_table: bool = False) -> int:
        """Return the bytes that the engine keeps, if numbers that are not quantised have `whole` bytes each; those of a
        table have one each, so that a row is quickly found."""
        if self.kind.is_float:
            return self.numbers * whole
        *_, bits, group, more = self.kind.value
        return self.numbers * (8 if is_table else bits) // 8 + self.numbers // group * more


def kept_bytes(folder: Path, whole: int) -> int:
    """Return the bytes that the engine keeps of all tensors; an embedding that is also the head is kept as the head."""
    places = read_places(folder)
    return sum(place.kept_bytes(whole, name == _TABLE and _HEAD in places) for name, place in places.items())


def described(places: Mapping[str, Place]) -> dict[str, Any]:
    """Return what the table's file says."""
    return {name: _described(place) for name, place in places.items()}


def _described(place: Place) -> dict[str, Any]:
    rows = None if place.rows is None else {"view": place.rows.view, "swap": place.rows.swap}
    lies = {"file": str(place.file), "offset": place.offset}
    return {**lies, "kind": place.kind.name, "shape": place.shape, "rows": rows, "more": place.more}


def read_places(folder: Path) -> dict[str, Place]:
    """Return the place of each tensor, by the name that transformers gives it."""
    table = folder / PLACES
    try:
        return {name: _place(entry) for name, entry in json.loads(table.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{table} cannot be read: {error}: remove its folder, which is made again") from error


def _place(entry: Mapping[str, Any]) -> Place:
    rows = entry["rows"] and Rows(tuple(entry["rows"]["view"]), tuple(entry["rows"]["swap"]))
    lies = Path(entry["file"]), Kind[entry["kind"]], tuple(entry["shape"]), entry["offset"]
    return Place(*lies, rows, entry["more"])
