"""The weight files of a model folder, and how many numbers they hold, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.architectures.gguf.places import PLACES, kept_bytes, read_places
from alignedserve.architectures.given import read_json
from alignedserve.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_GPTQ = "gptq_model*.safetensors"  # as AutoGPTQ named the only file
_NOT_READ = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")  # pickled, or formats of other programs
FLOATS, _FLOATS_OF_8_BITS = ("F64", "F32", "BF16", "F16"), ("F8_E4M3",)
_PACKED = (".qweight", ".weight_packed", "_blocks")
_MXFP4 = ("_blocks", "_scales")  # of experts (engine/weights/forms.py)
_SCALES, _ZEROS = ("scales", "weight_scale"), ("qzeros", "weight_zero_point")
_MOST_HEADER = 100_000_000  # bytes; the limit of safetensors itself
_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a file: other weights of the same shapes differ nearly everywhere


def tensor_places(index: Path) -> dict[str, Path]:
    """Return the file of each tensor; only files beside the index count."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} has no weight_map of tensors to files")
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} must be in a file of this folder, not in {file!r:.60}")
    return {name: index.parent / file for name, file in places.items()}


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return sorted(set(tensor_places(folder / INDEX).values()))
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if len(alone := [*folder.glob(_OF_GPTQ)]) == 1:
        return alone
    raise ModelError(f"{folder} holds neither {WEIGHTS} nor {INDEX}{_instead(folder)}")


def weights_mark(folder: Path) -> str:
    """Return a digest that tells a folder's weights from others: of its configuration, and of the name, the size and
    256 samples of each file. Times count for nothing: each node of a cluster fetches its own files."""
    is_gguf = (folder / PLACES).is_file()
    files = sorted({place.file for place in read_places(folder).values()}) if is_gguf else weight_files(folder)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in files:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\n".encode())
                for number in range(_SAMPLES):
                    file.seek(size * number // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()[:24]


def _instead(folder: Path) -> str:
    """Return what to do about weights in another format, if the folder has any."""
    others = sorted(path.name for pattern in _NOT_READ for path in folder.glob(pattern))
    return f": {others[0]} is not read, save the model as safetensors" if others else ""


def count_numbers(folder: Path) -> int:
    """Count the numbers in all floating-point tensors; a few of them may not be needed."""
    return sum(tensor.numbers for tensor in _tensors(folder).values() if tensor.dtype in FLOATS)


def count_in_experts(folder: Path) -> int:
    """Count the numbers of a mixture's experts, which stay as they are where layers are quantised while loaded."""
    tensors = _tensors(folder).items()
    return sum(tensor.numbers for name, tensor in tensors if ".experts." in name or len(tensor.shape) > 2)


def count_tables(folder: Path, shape: tuple[int, int]) -> int:
    """Count the tensors that have the shape of the embedding: one, or two where the head has numbers of its own."""
    return sum(tensor.shape == shape for tensor in _tensors(folder).values())


def largest_numbers(folder: Path, bits: int) -> int:
    """Return the numbers of the largest tensor; a packed number has `bits` bits."""
    tensors = _tensors(folder).items()
    return max(8 * tensor.num_bytes // bits if name.endswith(_PACKED) else tensor.numbers for name, tensor in tensors)


def quantised_bytes(folder: Path, whole: int) -> int:
    """Return the bytes that the weights of a quantised folder take: whole numbers and scales as many as in the files,
    zeros as many as scales, all floats else `whole` bytes each."""
    if (folder / PLACES).is_file():
        return kept_bytes(folder, whole)
    tensors = _tensors(folder)
    return sum(_kept_bytes(name, tensors, whole) for name in tensors)


def _kept_bytes(name: str, tensors: Mapping[str, _Tensor], whole: int) -> int:
    layer, _, last = name.rpartition(".")
    if last in _ZEROS:
        scale = next((f"{layer}.{scale}" for scale in _SCALES if f"{layer}.{scale}" in tensors), name)
        return tensors[scale].num_bytes
    tensor = tensors[name]
    if name.endswith(_MXFP4):  # it is expanded: a byte of blocks has two numbers, and scales are not kept
        return 2 * tensor.num_bytes * whole if name.endswith(_MXFP4[0]) else 0
    if last in _SCALES or tensor.dtype not in (*FLOATS, *_FLOATS_OF_8_BITS):
        return tensor.num_bytes
    return tensor.numbers * whole


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each tensor of a file."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in _read_header(path).items()}


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """Return all tensors of a folder, those of a GGUF file as the floats that they stand for."""
    if (folder / PLACES).is_file():
        places = read_places(folder).items()
        return {name: _Tensor(FLOATS[0], place.shape, place.num_bytes) for name, place in places}
    return {name: tensor for path in weight_files(folder) for name, tensor in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Return what the file's header says of each tensor: the header's length in eight bytes, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MOST_HEADER, os.fstat(file.fileno()).st_size):
                raise ValueError("it has no safetensors header")
            tensors: dict[str, Any] = json.loads(file.read(length))
            size, found = os.fstat(file.fileno()).st_size, dict[str, _Tensor]()
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            begin, end = tensor["data_offsets"]
            if end + 8 + length > size:
                raise ValueError("it ends before its last tensor does, so it was not fetched whole")
            found[name] = _Tensor(tensor["dtype"], tuple(tensor["shape"]), end - begin)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
