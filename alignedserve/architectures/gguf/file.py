"""Reads the metadata of a GGUF file and its table of tensors; the tensors themselves are not read."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.architectures.gguf.places import Kind, Place
from alignedserve.errors import ModelError, UnsupportedModel

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_ALIGNMENT = 32
_MOST_DIMS = 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


_KINDS = {kind.value[0]: kind for kind in Kind}
_NOT_READ = {
    **dict(enumerate(("Q2_K", "Q3_K"), 10)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 16)),
    **dict(enumerate(("IQ1_M",), 29)),
    **dict(enumerate(("TQ1_0", "TQ2_0"), 34)),
    **dict(enumerate(("MXFP4", "NVFP4"), 39)),
}


@dataclass(frozen=True)
class GgufFile:
    """Holds what a GGUF file says of a model, or all parts of a file that was split."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Place]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        first, *others = parts(path)
        metadata, tensors = _read(first)
        for other in others:
            tensors |= _read(other)[1]
        if (count := metadata.get("split.tensors.count")) is not None and count != len(tensors):
            raise ModelError(f"{path} and its other parts hold {len(tensors)} tensors, not {count}")
        return cls(first, metadata, tensors)

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a small tensor."""
        place = self.tensors[name]
        if place.kind is not Kind.F32:
            raise ModelError(f"{self.path}: tensor {name} is stored as {place.kind.name}, not as F32")
        with _one_line(place.file), place.file.open("rb") as file:
            file.seek(place.offset)
            return list(struct.unpack(f"<{place.numbers}f", file.read(place.num_bytes)))


def parts(path: Path) -> list[Path]:
    """Return all parts of the file that this one belongs to: itself alone, where it was not split."""
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, _, count = found.groups()
    every = [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    if missing := [part.name for part in every if not part.is_file()]:
        raise ModelError(f"{path.parent} lacks {missing[0]}, one of {len(every)} parts of {stem}")
    return every


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    with _one_line(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        if memory[:4] != _MAGIC:
            raise ModelError(f"{path} is no GGUF file")
        cursor = _Cursor(memory, 4)
        if (version := cursor.number("I")) not in _VERSIONS:
            raise UnsupportedModel(f"{path}: version {version} of GGUF is not supported, 2 and 3 are")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_keys)}
        table = [_entry(path, cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        begin = -(-cursor.at // alignment) * alignment
        tensors = {name: Place(path, kind, shape, begin + offset) for name, kind, shape, offset in table}
        ends = (place.offset + place.num_bytes for place in tensors.values())
        if max(ends, default=0) > len(memory):
            raise ModelError(f"{path} ends before its last tensor does: it was not fetched whole")
        return metadata, tensors


def _entry(path: Path, cursor: _Cursor) -> tuple[str, Kind, tuple[int, ...], int]:
    name, num_dims = cursor.text(), cursor.number("I")
    if num_dims > _MOST_DIMS:
        raise ModelError(f"{path}: tensor {name} has {num_dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dims)]))
    stored, offset = cursor.number("I"), cursor.number("Q")
    if stored not in _KINDS:
        named = _NOT_READ.get(stored, f"type {stored}")
        known = ", ".join(kind.name for kind in Kind)
        raise UnsupportedModel(f"{path}: tensor {name} is stored as {named}: only {known} are read")
    kind = _KINDS[stored]
    if not shape or shape[-1] % kind.block:
        raise ModelError(f"{path}: tensor {name} of shape {shape} is not made of blocks of {kind.block}")
    return name, kind, shape, offset


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn errors of a broken file into an error of one line."""
    try:
        yield
    except struct.error as error:
        raise ModelError(f"{path} ends in the middle of its header: fetch it again") from error
    except (OSError, ValueError, OverflowError, MemoryError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class _Cursor:
    """A place in a file, from which values are read one after the other."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._memory, self.at = memory, at

    def number(self, form: str) -> Any:
        return self._numbers(1, form)[0]

    def _numbers(self, count: int, form: str) -> tuple[Any, ...]:
        read = struct.unpack_from(f"<{count}{form}", self._memory, self.at)
        self.at += count * struct.calcsize(f"<{form}")
        return read

    def text(self) -> str:
        length = self.number("Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self._memory):
            raise ValueError("a text goes beyond its end")
        return self._memory[begin : self.at].decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _FIXED:
            return self.number(_FIXED[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        if depth > 1:
            raise ValueError("its metadata has arrays in arrays of arrays")
        of, count = self.number("I"), self.number("Q")
        if of in _FIXED:
            return list(self._numbers(count, _FIXED[of]))
        return [self.value(of, depth + 1) for _ in range(count)]


class Facts:
    """The metadata of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.tensors = file, file.tensors
        self.architecture: str = _checked(file, "general.architecture", file.metadata.get("general.architecture"), str)

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        number: int = _checked(self.file, f"{self.architecture}.{key}", default if value is None else value, int)
        if number < 1:
            raise ModelError(f"{self.file.path}: its metadata has {self.architecture}.{key} {number}")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        return float(_checked(self.file, f"{self.architecture}.{key}", value, (int, float)))

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {what} is not supported")


def _checked(file: GgufFile, key: str, value: Any, kind: Any) -> Any:
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise ModelError(f"{file.path}: its metadata has {'no ' if value is None else 'a wrong '}{key}")
