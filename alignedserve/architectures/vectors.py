"""Models that make vectors: encoders, and how a folder makes one vector of the states of a text's tokens.

    folder of sentence-transformers (modules.json)   as its modules say: Transformer, Pooling, Dense, Normalize
    a head for whole texts (ForSequenceClassification)   that head; its one number is a score (num_labels 1)
    an encoder                                       the mean of its states
    a decoder                                        the state of its last token, of length 1

In an encoder a token attends to those after it too, so one step runs all of a text; so it does for a mean. The state of
the last token of a decoder needs no more than its KV: such a text may run in chunks, and begin with what is cached.
Nothing is kept of an encoder's tokens between two steps (engine/models/encoder.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from alignedserve.architectures.config import Activation, ModelConfig
from alignedserve.architectures.given import Given, read_json, read_json_if_there
from alignedserve.errors import ModelError, UnsupportedModel

HEAD = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """An encoder (families/encoders.py). The blocks of its requests count the tokens that are under way, as much memory
    as one layer's KV would take; nothing is written there."""

    depth: int  # layers; `num_layers` are those of the device cache
    intermediate_size: int
    activation: Activation
    norm_eps: float
    marks_second: bool = False  # whether it marks the tokens of the second text of a pair

    @property
    def inner_size(self) -> int:
        return 2 * self.intermediate_size

    @property
    def keeps_kv(self) -> bool:
        return False


def num_labels(given: Given) -> int:
    """Return how many numbers the head for whole texts has."""
    named = given.get("id2label")
    return len(named) if isinstance(named, dict) else given.whole("num_labels", 2)


# --- Vectors


MODULES = "modules.json"


class PoolKind(str, Enum):
    """Names the tokens of a text whose states make its vector."""

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"  # an encoder's [CLS]


class DenseActivation(str, Enum):
    NONE = "Identity"
    TANH = "Tanh"
    RELU = "ReLU"
    GELU = "GELU"
    SIGMOID = "Sigmoid"


_KINDS = {"cls": PoolKind.FIRST, "mean": PoolKind.MEAN, "lasttoken": PoolKind.LAST}
# Older folders name each kind by a key of its own.
_OLD_KINDS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}


@dataclass(frozen=True)
class Dense:
    """A layer after the pooling, in a folder of its own."""

    folder: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation


@dataclass(frozen=True)
class PooledRule:
    """Says how a folder makes its vectors."""

    kind: PoolKind
    size: int  # numbers of a vector
    is_normalised: bool = False
    is_bidirectional: bool = False
    dense: tuple[Dense, ...] = ()
    labels: int = 0  # numbers of its head; 0: it has none
    score_activation: DenseActivation = DenseActivation.NONE  # of these numbers
    longest: int | None = None  # tokens of a text
    dimensions: tuple[int, ...] | None = ()  # first numbers that it was trained to be cut to; None: any
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text that begins an input
    usual_prompt: str = ""
    generates: bool = True  # whether the model writes text too
    marks_second: bool = False  # whether tokens of the second text of a pair are marked

    @property
    def is_whole(self) -> bool:
        """Return whether one step must run all of a text."""
        return self.is_bidirectional or self.kind is not PoolKind.LAST

    @property
    def scores(self) -> bool:
        return self.labels == 1

    @property
    def embeds(self) -> bool:
        return not self.labels


def read_pooled(folder: Path, config: ModelConfig) -> PooledRule:
    """Return what a folder says of its vectors; raise UnsupportedModel where it asks for what is not done here."""
    given = Given(folder / "config.json")
    is_encoder = isinstance(config, EncoderConfig)
    facts: dict[str, Any] = {
        "size": config.hidden_size,
        "is_bidirectional": is_encoder,
        "generates": config.generates,
        "marks_second": isinstance(config, EncoderConfig) and config.marks_second,
    }
    if config.labels:
        kind = PoolKind.LAST
        if isinstance(config, EncoderConfig):
            kind = PoolKind.MEAN if given.get("classifier_pooling") == "mean" else PoolKind.FIRST
        return PooledRule(kind, labels=config.labels, score_activation=_score_activation(given, config.labels), **facts)
    if (folder / MODULES).is_file():
        return _by_modules(folder, given, facts)
    if is_encoder:
        return PooledRule(PoolKind.MEAN, **facts)
    return PooledRule(PoolKind.LAST, is_normalised=True, dimensions=_dimensions(given), **facts)


def most_in_step(config: ModelConfig, most_step_tokens: int) -> int:
    """Return how many tokens a step of this model may have: an encoder's step has room for its longest text."""
    return max(most_step_tokens, config.max_positions) if isinstance(config, EncoderConfig) else most_step_tokens


# --- Folders of sentence-transformers


def _by_modules(folder: Path, given: Given, facts: dict[str, Any]) -> PooledRule:
    kind, size, dense, is_normalised = None, facts["size"], list[Dense](), False
    for module in _modules(folder):
        name, place = str(module.get("type")).rpartition(".")[2], folder / str(module.get("path") or "")
        match name:
            case "Transformer":
                continue
            case "Pooling" if kind is None:
                kind = _kind(place)
            case "Dense" if kind is not None and not is_normalised:
                dense.append(_dense(place, size))
                size = dense[-1].outputs
            case "Normalize" if kind is not None:
                is_normalised = True
            case _:
                raise UnsupportedModel(f"{folder / MODULES}: a module {name:.60} at this place is not supported")
    if kind is None:
        raise UnsupportedModel(f"{folder / MODULES}: it has no module Pooling")
    more = read_json_if_there(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (more.get("prompts") or {}).items() if text}
    return PooledRule(
        kind,
        dense=tuple(dense),
        is_normalised=is_normalised,
        longest=read_json_if_there(folder / "sentence_bert_config.json").get("max_seq_length"),
        dimensions=_dimensions(given),
        prompts=prompts,
        usual_prompt=prompts.get(str(more.get("default_prompt_name")), ""),
        **facts | {"size": size},
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must hold a list of objects")
    return modules


def _kind(place: Path) -> PoolKind:
    told = read_json(place / "config.json")
    named = told.get("pooling_mode")
    if named is None:
        chosen = [key for key, value in told.items() if key.startswith("pooling_mode_") and value is True]
        named = [_OLD_KINDS.get(key.removeprefix("pooling_mode_"), key) for key in chosen]
    names = named if isinstance(named, list) else [named]
    if len(names) != 1 or names[0] not in _KINDS:
        shown = ", ".join(map(str, names))
        raise UnsupportedModel(f"{place}: pooling {shown:.80} is not supported: {', '.join(_KINDS)} are")
    if told.get("include_prompt") is False:
        raise UnsupportedModel(f"{place}: include_prompt false is not supported: prompts are pooled too")
    return _KINDS[names[0]]


def _dense(place: Path, inputs: int) -> Dense:
    told = Given(place / "config.json")
    if told.whole("in_features") != inputs:
        raise told.wrong("in_features", f"{inputs}, as what comes before", told.get("in_features"))
    activation = _activation(place, told.word("activation_function", "Tanh"))
    return Dense(place, inputs, told.whole("out_features"), told.flag("bias", True), activation)


def _activation(place: Path, name: str) -> DenseActivation:
    short = name.rpartition(".")[2]
    if short not in list(DenseActivation):
        known = ", ".join(kind.value for kind in DenseActivation)
        raise UnsupportedModel(f"{place}: activation {short:.60} is not supported: {known} are")
    return DenseActivation(short)


def _dimensions(given: Given) -> tuple[int, ...] | None:
    """Return to how many numbers vectors may be cut, where the folder says that it was trained for that."""
    listed = given.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(size) is int and size > 0 for size in listed):
        return tuple(listed)
    return None if given.get("is_matryoshka") is True else ()


def _score_activation(given: Given, labels: int) -> DenseActivation:
    """Return what a head's numbers go through; a single one goes through a sigmoid where the folder says nothing."""
    told = given.section("sentence_transformers").get("activation_fn")
    named = told or given.get("sbert_ce_default_activation_function")
    if named is None:
        return DenseActivation.SIGMOID if labels == 1 else DenseActivation.NONE
    return _activation(given.folder, str(named))
