"""Makes the model folder of a GGUF file, once, in the cache: all but its tensors, which stay where they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alignedserve.architectures.gguf.families import FAMILIES, ROPE_TENSORS, Family
from alignedserve.architectures.gguf.file import Facts, GgufFile, parts
from alignedserve.architectures.gguf.places import PLACES, Place, described
from alignedserve.architectures.gguf.tokenizer import (
    end_tokens,
    generation_config,
    read_vocabulary,
    tokenizer_config,
    tokenizer_json,
)
from alignedserve.errors import ModelError, UnsupportedModel

_FORMAT = 4  # raised whenever other folders are made of the same files


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
        why = error.strerror or error
        advice = "make room there, or set XDG_CACHE_HOME to a folder that can be written"
        raise ModelError(f"{folder} cannot be written: {why}: {advice}") from error


def _move(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process made it meanwhile
            raise


def _files(file: GgufFile) -> dict[str, dict[str, Any]]:
    facts = Facts(file)
    if facts.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{file.path}: architecture {facts.architecture} is not read from GGUF: {known} are")
    family = FAMILIES[facts.architecture]
    kind = {"architectures": [family.architecture], "model_type": family.model_type}
    config = {**kind, **_common(facts), **family.config(facts), **_quantized(facts)}
    tensors, vocabulary = _renamed(facts, family), read_vocabulary(file)
    return {
        "config.json": {**config, "eos_token_id": end_tokens(vocabulary)},
        "generation_config.json": generation_config(vocabulary),
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer_config(vocabulary),
        PLACES: described(tensors),
    }


# --- config.json, and the names of tensors


def _common(facts: Facts) -> dict[str, Any]:
    """Return the keys that all families have."""
    table = facts.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{facts.file.path}: tensor token_embd.weight is missing")
    return {
        "vocab_size": table.shape[0],
        "hidden_size": facts.whole("embedding_length"),
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_hidden_layers": facts.whole("block_count"),
        "num_attention_heads": facts.whole("attention.head_count"),
        "max_position_embeddings": facts.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "dtype": _dtype(facts),
    }


def _quantized(facts: Facts) -> dict[str, Any]:
    """Return how weights are quantised; an empty dictionary if they are not."""
    bits = sorted({place.kind.bits for place in facts.tensors.values() if not place.kind.is_float})
    return {"quantization_config": {"quant_method": "gguf", "bits": bits}} if bits else {}


def _dtype(facts: Facts) -> str:
    """Return the type that the model is served in: that of its matrices; bfloat16 where they are quantised."""
    kinds = {place.kind.name for place in facts.tensors.values() if len(place.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _renamed(facts: Facts, family: Family) -> dict[str, Place]:
    """Return the places of all tensors by the names of transformers."""
    tensors = {}
    for name, place in facts.tensors.items():
        if name in ROPE_TENSORS:
            continue
        called = _called(family, name)
        if called is None:
            raise facts.unsupported(f"tensor {name}, which no other file of the architecture {facts.architecture} has,")
        rows = None if family.rows is None else family.rows(facts, name, place.shape[0])
        tensors[called] = replace(place, rows=rows, more=family.norms_more if "_norm." in name else 0.0)
    return tensors


def _called(family: Family, name: str) -> str | None:
    """Return the name of a tensor in transformers: of `blk.3.attn_q.bias` `model.layers.3.self_attn.q_proj.bias`."""
    stem, _, last = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{family.names[stem]}.{last}" if stem in family.names else None
    _, number, part = (*stem.split(".", 2), "", "")[:3]
    return f"{family.layer}.{number}.{family.in_layer[part]}.{last}" if part in family.in_layer else None
