"""GGUF files of tiny random models, written by the gguf package, and what they say in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, TokenType

from alignedserve.architectures.gguf.places import Kind
from alignedserve.architectures.model_source import DEMO_FOLDER
from tests.reference import load

QUANTISED = [kind for kind in Kind if not kind.is_float]
_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}  # where the fp16 numbers of a block are


def random_blocks(kind: Kind, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return rows of blocks: of a K kind random bytes with small scales, since the package cannot make any."""
    draw = np.random.default_rng(seed)
    if kind not in _HALVES:
        numbers = draw.normal(0, 0.25, shape).astype(np.float32)
        return gguf.quantize(numbers, GGMLQuantizationType[kind.name])
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // kind.block, kind.num_bytes(kind.block)), np.uint8)
    for at in _HALVES[kind]:
        scales = draw.uniform(0.0002, 0.0004, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


@dataclass(frozen=True)
class Written:
    """A GGUF file, and the same numbers in transformers, in fp32."""

    path: Path
    reference: Any


def written(
    folder: Path,
    path: Path,
    architecture: str,
    kind_of: Callable[[str], Kind],
    more: Callable[..., None] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Written:
    """Write a model folder as a GGUF file, each matrix in the kind that `kind_of` says for its name in the file; its
    tokens are the demo model's, unless `tokenizer` writes others."""
    network, config = load(folder), json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config["num_hidden_layers"])
    for name, parameter in network.named_parameters():
        stem, _, last = name.rpartition(".")
        called = f"{names.get_name(stem)}.{last}"
        kind = kind_of(called) if parameter.dim() == 2 else Kind.F32
        stored, expanded = _stored(architecture, called, config, parameter.detach(), kind)
        raw = GGMLQuantizationType[kind.name]
        writer.add_tensor(called, stored, raw_dtype=None if kind is Kind.F32 else raw)
        parameter.data.copy_(expanded)
    (tokenizer or write_tokenizer)(writer)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, network)


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _stored(
    architecture: str, name: str, config: dict[str, Any], numbers: torch.Tensor, kind: Kind
) -> tuple[np.ndarray, torch.Tensor]:
    """Return a tensor as the file has it, and its numbers in transformers' order."""
    heads = config["num_attention_heads"]
    if architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
        there, back = _beside(heads if "attn_q" in name else config["num_key_value_heads"])
    else:
        there = back = lambda rows: rows
    ordered = there(numbers).contiguous().numpy()
    if kind is Kind.F32:
        more = 1 if architecture.startswith("gemma") and "_norm." in name else 0
        return ordered + more, numbers
    if kind in _HALVES:
        stored = random_blocks(kind, ordered.shape, seed=len(name))
    else:
        stored = gguf.quantize(ordered, GGMLQuantizationType[kind.name])
    return stored, back(torch.from_numpy(gguf.dequantize(stored, GGMLQuantizationType[kind.name]).copy()))


Order = Callable[[torch.Tensor], torch.Tensor]


def _beside(heads: int) -> tuple[Order, Order]:
    """Return how llama.cpp orders queries and keys, whose numbers turn in pairs that lie together, and the way back."""

    def order(rows: torch.Tensor, *view: int) -> torch.Tensor:
        return rows.reshape(heads, *view, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return lambda rows: order(rows, 2, rows.shape[0] // heads // 2), lambda rows: order(
        rows, rows.shape[0] // heads // 2, 2
    )


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path | None = None, pre: str = "gpt-2") -> None:
    """Write the vocabulary of a folder, by default the demo model's."""
    described = json.loads(((folder or DEMO_FOLDER) / "tokenizer.json").read_text())
    config = json.loads(((folder or DEMO_FOLDER) / "tokenizer_config.json").read_text())
    special = {token["content"] for token in described["added_tokens"]}
    ids = described["model"]["vocab"] | {token["content"]: token["id"] for token in described["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(config["chat_template"])
