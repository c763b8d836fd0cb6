"""Read the configuration of an encoder: BERT and its kin, and ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignedserve.architectures.config import Activation, activation, stored_dtype, whole_head
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import Rope, read_rope
from alignedserve.architectures.stored_form import stored_form
from alignedserve.architectures.vectors import HEAD, DenseActivation, EncoderConfig, num_labels
from alignedserve.errors import UnsupportedModel

_KINDS = ("Model", "ForMaskedLM", HEAD)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0  # of ModernBERT


@dataclass(frozen=True)
class BertFamily:
    """What sets a family apart: the names of its tensors, its positions, and its head for whole texts."""

    prefix: str  # of the names of all tensors but the head's
    follows_padding: bool  # whether positions begin behind the number of the padding token
    dense: str  # first layer of its head
    activation: DenseActivation  # between the two layers of its head
    out: str  # last layer of its head


_ROBERTA = BertFamily("roberta", True, "classifier.dense", DenseActivation.TANH, "classifier.out_proj")
# How the name of a class begins -> how such a model is read.
_FAMILIES = {
    "Bert": BertFamily("bert", False, "bert.pooler.dense", DenseActivation.TANH, "classifier"),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "Electra": BertFamily("electra", False, "classifier.dense", DenseActivation.GELU, "classifier.out_proj"),
}
_MODERN = "ModernBert"
_ENCODERS = {f"{family}{kind}": family for family in (*_FAMILIES, _MODERN) for kind in _KINDS}


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """BERT, RoBERTa, XLM-R, CamemBERT and ELECTRA."""

    family: BertFamily
    first_position: int
    types: int  # rows of the table that marks the texts of a pair
    embedding_size: int  # smaller than the hidden size in some ELECTRAs


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    sides: tuple[int | None, ...]  # layer -> tokens that it reads before a token, itself included, and after; None: all
    rope: Rope  # of layers that read all
    local_rope: Rope
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    head_bias: bool  # of the first layer of its head
    head_activation: Activation


def is_encoder(architecture: str) -> bool:
    return architecture in _ENCODERS


def read_encoder(given: Given, architecture: str) -> EncoderConfig:
    if given.get("is_decoder"):
        raise UnsupportedModel(f"{given.folder}: {architecture} with is_decoder is not supported")
    if given.word("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel(f"{given.folder}: relative positions of {architecture} are not supported")
    labels = num_labels(given) if architecture.endswith(HEAD) else 0
    family = _ENCODERS[architecture]
    return _read_modern(given, labels) if family == _MODERN else _read_bert(given, _FAMILIES[family], labels)


def _common(given: Given, labels: int) -> dict[str, Any]:
    hidden, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    return {
        "vocab_size": given.whole("vocab_size"),
        "hidden_size": hidden,
        "depth": given.whole("num_hidden_layers"),
        "intermediate_size": given.whole("intermediate_size"),
        "num_layers": 1,  # that the device cache has
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": whole_head(given, hidden, heads),
        "dtype": stored_dtype(given),
        "stored": stored_form(given, given),
        "eos_tokens": frozenset(),
        "generates": False,
        "labels": labels,
    }


def _read_bert(given: Given, family: BertFamily, labels: int) -> BertConfig:
    pad, types = given.get("pad_token_id", 1), given.whole("type_vocab_size", 2)
    first = pad + 1 if family.follows_padding and type(pad) is int else 0
    hidden = given.whole("hidden_size")
    return BertConfig(
        **_common(given, labels),
        family=family,
        first_position=first,
        max_positions=given.whole("max_position_embeddings") - first,
        types=types,
        marks_second=types == 2 and not family.follows_padding,
        embedding_size=given.whole("embedding_size", 128) if family.prefix == "electra" else hidden,
        activation=activation(given, "hidden_act", "gelu"),
        norm_eps=given.number("layer_norm_eps", 1e-12),
    )


def _read_modern(given: Given, labels: int) -> ModernBertConfig:
    facts, side = _common(given, labels), given.whole("local_attention", 128) // 2 + 1
    depth, every = facts["depth"], given.whole("global_attn_every_n_layers", 3)
    kinds = given.get("layer_types") or [_SLIDING if layer % every else _FULL for layer in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth or not {*kinds} <= {_FULL, _SLIDING}:
        raise given.wrong("layer_types", f"{depth} of {_FULL} and {_SLIDING}", kinds)
    if given.get("rope_scaling"):
        raise given.unsupported("rope_scaling in ModernBERT")
    ropes = given.section("rope_parameters")
    thetas = given.number("global_rope_theta", _GLOBAL_THETA), given.number("local_rope_theta", _LOCAL_THETA)
    rope, local_rope = (
        read_rope(given, ropes.section(kind), theta, facts["head_dim"])
        for kind, theta in zip((_FULL, _SLIDING), thetas, strict=True)
    )
    return ModernBertConfig(
        **facts,
        sides=tuple(side if kind == _SLIDING else None for kind in kinds),
        rope=rope,
        local_rope=local_rope,
        max_positions=given.whole("max_position_embeddings"),
        attention_bias=given.flag("attention_bias"),
        mlp_bias=given.flag("mlp_bias"),
        norm_bias=given.flag("norm_bias"),
        head_bias=given.flag("classifier_bias"),
        head_activation=activation(given, "classifier_activation", "gelu"),
        activation=activation(given, "hidden_activation", "gelu"),
        norm_eps=given.number("norm_eps", 1e-5),
    )
