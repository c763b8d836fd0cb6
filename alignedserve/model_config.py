"""Reads the configuration of a Hugging Face model folder; without torch, since every part needs to know it."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from alignedserve.errors import ModelError, UnsupportedModel

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know of a model of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    dtype: str  # of the stored weights
    eos_tokens: frozenset[int]

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes(self, tokens: int, dtype: str) -> int:
        """Of K and V of so many tokens in all layers."""
        return self.num_layers * 2 * tokens * self.kv_dim * DTYPE_BYTES[dtype]


def read_config(folder: Path) -> ModelConfig:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: name a Hugging Face model folder")
    given = _Given(folder / "config.json")
    architectures = given.get("architectures") or ["(none named)"]
    if architectures != ["LlamaForCausalLM"]:
        named = ", ".join(map(str, architectures if isinstance(architectures, list) else [architectures]))
        raise UnsupportedModel(f"{folder}: architecture {named:.100} is not supported: LlamaForCausalLM is")
    return _llama_config(folder, given)


class _Given:
    """What a config.json says, each key checked as it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_json(path)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number above 0", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < inf:
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def section(self, key: str) -> _Given:
        """An object within the object; empty where it is null or not there."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        section = copy(self)
        section._values = value
        return section

    def token_ids(self, key: str) -> frozenset[int]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in ids):
            raise self.wrong(key, "a token id or a list of them", value)
        return frozenset(ids)

    def wrong(self, key: str, wanted: str, value: Any) -> ModelError:
        return ModelError(f"{self._path}: {key} must be {wanted}, not {value!r:.60}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if default is None and key not in self._values:
            raise ModelError(f"{self._path}: {key} is missing")
        return default if value is None else value


def _llama_config(folder: Path, given: _Given) -> ModelConfig:
    rope = given.section("rope_parameters" if given.get("rope_parameters") else "rope_scaling")
    _refuse_unsupported(folder, given, rope)
    dtype = given.get("dtype") or given.get("torch_dtype") or "float32"
    if dtype not in list(DTYPE_BYTES):
        raise UnsupportedModel(f"{folder}: dtype {dtype!s:.60} is not supported: {', '.join(DTYPE_BYTES)} are")
    hidden, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    kv_heads, head_dim = given.whole("num_key_value_heads", heads), given.whole("head_dim", hidden // heads)
    if heads % kv_heads:
        raise given.wrong("num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    if head_dim % 2:
        raise given.wrong("head_dim", "even", head_dim)
    return ModelConfig(
        vocab_size=given.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=given.whole("intermediate_size"),
        num_layers=given.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=given.whole("max_position_embeddings"),
        norm_eps=given.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", given.number("rope_theta", 10_000.0)),
        tied_embeddings=given.flag("tie_word_embeddings"),
        dtype=dtype,
        eos_tokens=given.token_ids("eos_token_id"),
    )


def _refuse_unsupported(folder: Path, given: _Given, rope: _Given) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    activation = given.get("hidden_act") or "silu"
    quantized = given.section("quantization_config")
    refused = {
        f"rope_type {rope_type}": rope_type != "default",
        "attention_bias": given.get("attention_bias"),
        "mlp_bias": given.get("mlp_bias"),
        f"hidden_act {activation}": activation != "silu",
        f"quantization {quantized.get('quant_method')}": given.get("quantization_config"),
    }
    for option, used in refused.items():
        if used:
            raise UnsupportedModel(f"{folder}: {option:.100} is not supported")


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or a number without end
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return read
