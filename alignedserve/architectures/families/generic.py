"""The configuration of a model that transformers runs, by the names that its families use.

Planning needs this without torch and transformers. The engine checks that the model is what its file says when it loads
the model (engine/models/transformers_checks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from alignedserve.architectures.config import DTYPE_BYTES, ModelConfig, stored_dtype, whole_head
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import positions_of_short
from alignedserve.architectures.stored_form import stored_form
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.safe_path import pip_command

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_INNER = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")

# Key that is not null or false -> what it says of a model, which is refused before its weights are read.
_REFUSED = {"is_encoder_decoder": "it has an encoder"}

# Families, by model_type, and kinds of layers, that keep a state which each token changes.
_OF_STATES = {
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
}
_STATES = {"conv", "linear_attention", "mamba", "mamba2", "recurrent"}

_IN_ALL_LAYERS = {"ministral", "ministral3", "phimoe", "starcoder2"}  # by model_type
# Families whose older files name no types: every fourth layer of cohere2 has no window.
_PATTERN = {"cohere2": 4}
# Families whose layers attend by themselves, not through the AttentionInterface of transformers -> their usual length.
_ATTEND_THEMSELVES = {"bloom": 2048, "falcon": 2048, "mpt": 2048}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class GenericConfig(ModelConfig):
    architecture: str  # the class that transformers runs
    widest: int  # the widest part of a layer that config.json names
    attends_itself: bool = False  # whether its layers attend to copies of K and V

    @property
    def inner_size(self) -> int:
        return 3 * self.widest  # gate, up and their product

    @property
    def why_not_int8(self) -> str | None:
        if self.attends_itself:
            return "layers of this model attend by themselves, to plain K and V"
        return super().why_not_int8

    def step_bytes(self, tokens: int, batch: int, dtype: str) -> int:
        least = super().step_bytes(tokens, batch, dtype)
        if not self.attends_itself:
            return least
        scores = self.num_heads * tokens * self.max_positions * DTYPE_BYTES["float32"]
        return least + 2 * (scores + self.kv_bytes(self.max_positions, dtype))


def check_transformers(folder: Path, architecture: str) -> None:
    """Raise where transformers, which runs this architecture, is not installed. It is not imported: that takes
    seconds."""
    if find_spec("transformers") is None:
        raise ModelError(
            f"{folder}: {architecture} is run by transformers, which is not installed:"
            f" {pip_command()} install 'alignedserve[transformers]'"
        )


def read_generic(given: Given, architecture: str) -> GenericConfig:
    text = given.text
    for key, why in _REFUSED.items():
        if text.get(key):
            raise _unsupported(given, architecture, f"{why} ({key})")

    if text.get("model_type") in _OF_STATES or _STATES & _kinds_of_layers(text):
        raise _unsupported(given, architecture, "it has layers that keep a state in place of K and V of each token")

    def named(keys: Sequence[str]) -> int:
        """Return the number that has one of these names."""
        if not _key(text, keys):
            raise _unsupported(given, architecture, f"its config.json has none of {', '.join(keys)}")
        return text.whole(_key(text, keys))

    hidden, heads = named(_HIDDEN), named(_HEADS)
    kv_heads, head_dim = _kv_heads(text, heads), _head_dim(text, hidden, heads)
    if text.get("kv_lora_rank"):  # latent attention: K and V are made for all heads, K in two parts
        kv_heads, head_dim = heads, text.whole("qk_nope_head_dim") + text.whole("qk_rope_head_dim")
        if head_dim != text.whole("v_head_dim"):
            widths = f"K has {head_dim} numbers and V has {text.whole('v_head_dim')}"
            raise _unsupported(given, architecture, f"of each head, {widths}")
    usual = _ATTEND_THEMSELVES.get(str(text.get("model_type")))
    length = usual if usual and not _key(text, _POSITIONS) else named(_POSITIONS)
    layers, positions = named(_LAYERS), min([length, *positions_of_short(text)])
    return GenericConfig(
        architecture=architecture,
        widest=_widest(text, hidden),
        attends_itself=usual is not None,
        vocab_size=text.whole("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=positions,
        dtype=stored_dtype(given, text),
        stored=stored_form(given, text),
        eos_tokens=given.token_ids("eos_token_id") or text.token_ids("eos_token_id"),
        windows=windows_of(text, layers, positions),
    )


def _unsupported(given: Given, architecture: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{given.folder}: {architecture} is not supported: {why}")


def _kinds_of_layers(text: Given) -> set[str]:
    kinds = text.get("layer_types")
    return {str(kind) for kind in kinds} if isinstance(kinds, list) else set()


def _widest(text: Given, hidden: int) -> int:
    inner = (text.whole(key) for key in _INNER if text.get(key) is not None)
    return max([4 * hidden, *inner]) * text.whole("num_experts_per_tok", 1)


def _kv_heads(text: Given, heads: int) -> int:
    if text.get("model_type") == "falcon":  # the newer form copies K and V for all heads
        return 1 if text.flag("multi_query", True) and not text.flag("new_decoder_architecture") else heads
    if text.get("multi_query") is True:
        return 1
    for part in (text, text.section("attn_config")):
        if key := _key(part, _KV_HEADS):
            return part.whole(key)
    return heads


def _head_dim(text: Given, hidden: int, heads: int) -> int:
    if text.get("head_dim") is not None:
        return text.whole("head_dim")
    return whole_head(text, hidden, heads, _key(text, _HEADS))


def _key(given: Given, keys: Sequence[str]) -> str:
    """Return the first of these keys that config.json has."""
    return next((key for key in keys if given.get(key) is not None), "")


def windows_of(text: Given, layers: int, positions: int) -> tuple[int | None, ...]:
    """Return the window of each layer; () where config.json names none, or does not say which layers have it.

    The engine compares it with what the layers read when it loads the model (engine/models/transformers_checks.py).
    """
    types = text.get("layer_types") or _usual_types(text, layers)
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False or not isinstance(types, list):
        return ()
    if len(types) != layers or not {*types} <= {_SLIDING, _FULL} or _SLIDING not in types:
        return ()
    size = text.whole("sliding_window")
    return tuple(size if kind == _SLIDING else None for kind in types) if size < positions else ()


def _usual_types(text: Given, layers: int) -> list[str] | None:
    family = text.get("model_type")
    if family in _IN_ALL_LAYERS:
        return [_SLIDING] * layers
    if family not in _PATTERN:
        return None
    every = text.whole("sliding_window_pattern", _PATTERN[family])
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
