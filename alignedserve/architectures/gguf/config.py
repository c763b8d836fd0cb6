"""config.json from a GGUF file's metadata, and the names that transformers gives to the file's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from alignedserve.architectures.gguf.facts import Facts
from alignedserve.architectures.gguf.families import FAMILIES, ROPE_TENSORS, Family
from alignedserve.architectures.gguf.file import GgufFile
from alignedserve.architectures.gguf.places import Place
from alignedserve.errors import ModelError, UnsupportedModel


@dataclass(frozen=True)
class Model:
    """Holds what goes into config.json, and tells where each tensor lies."""

    config: dict[str, Any]
    tensors: dict[str, Place]  # by the names of transformers


def read_model(file: GgufFile) -> Model:
    facts = Facts(file)
    if facts.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{file.path}: architecture {facts.architecture} is not read from GGUF: {known} are")
    family = FAMILIES[facts.architecture]
    return Model({**_common(facts), **family.config(facts), **_quantized(facts)}, _renamed(facts, family))


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
