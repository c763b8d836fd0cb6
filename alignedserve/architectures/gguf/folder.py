"""Makes the model folder of a GGUF file, once, in the cache: all but its tensors, which stay where they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alignedserve.architectures.gguf.config import read_model
from alignedserve.architectures.gguf.file import GgufFile, parts
from alignedserve.architectures.gguf.places import PLACES, described
from alignedserve.architectures.gguf.tokenizer import (
    end_tokens,
    generation_config,
    read_vocabulary,
    tokenizer_config,
    tokenizer_json,
)
from alignedserve.errors import ModelError

_FORMAT = 3  # raised whenever other folders are made of the same files


def folder_of(path: Path, cache: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return the model folder of a GGUF file; make it where the cache has none, or one of an earlier file.

    `sampling` are defaults for requests, for a file that names none itself."""
    every = parts(path)
    digest = hashlib.sha256(str(_FORMAT).encode())
    for part in every:
        digest.update(identity(part))
    digest.update(json.dumps([*sampling.items()]).encode())
    folder = cache / "gguf" / f"{every[0].stem}-{digest.hexdigest()[:16]}"
    if not (folder / PLACES).is_file():
        files = _files(GgufFile.read(path))
        files["generation_config.json"] = {**sampling, **files["generation_config.json"]}
        make_folder(folder, files)
    return folder


def identity(path: Path) -> bytes:
    """Return what changes with a file, for a digest: its path, its size and when it was written."""
    try:
        there = path.resolve().stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return f"{path.resolve()} {there.st_size} {there.st_mtime_ns}\n".encode()


def make_folder(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Make a model folder of these JSON files, all of it or nothing, unless another process makes it meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}-", dir=folder.parent))
        try:
            for name, content in files.items():
                (made / name).write_text(json.dumps(content), encoding="utf-8")
            _move(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error}: set XDG_CACHE_HOME to a folder that can") from error


def _move(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process made it meanwhile
            raise


def _files(file: GgufFile) -> dict[str, dict[str, Any]]:
    model, vocabulary = read_model(file), read_vocabulary(file)
    return {
        "config.json": {**model.config, "eos_token_id": end_tokens(vocabulary)},
        "generation_config.json": generation_config(vocabulary),
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer_config(vocabulary),
        PLACES: described(model.tensors),
    }
