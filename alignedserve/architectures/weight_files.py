"""The weight files of a model folder, and how many numbers they hold, without torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from alignedserve.architectures.given import read_json
from alignedserve.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_NOT_READ = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")  # pickled, or formats of other programs
_FLOATS = ("F64", "F32", "BF16", "F16")
_MOST_HEADER = 100_000_000  # bytes; the limit of safetensors itself


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
    raise ModelError(f"{folder} holds neither {WEIGHTS} nor {INDEX}{_instead(folder)}")


def _instead(folder: Path) -> str:
    """Return what to do about weights in another format, if the folder has any."""
    others = sorted(path.name for pattern in _NOT_READ for path in folder.glob(pattern))
    return f": {others[0]} is not read, save the model as safetensors" if others else ""


def count_numbers(folder: Path) -> int:
    """Count the numbers in all floating-point tensors, of which a few may not be needed."""
    return sum(map(_count_in, weight_files(folder)))


def _count_in(path: Path) -> int:
    """Count the numbers from the file's header alone: its length in eight bytes, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MOST_HEADER, os.fstat(file.fileno()).st_size):
                raise ValueError("it has no safetensors header")
            tensors: dict[str, Any] = json.loads(file.read(length))
        named = [tensor for name, tensor in tensors.items() if name != "__metadata__"]
        return sum(math.prod(tensor["shape"]) for tensor in named if tensor["dtype"] in _FLOATS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
