"""Runs an encoder of transformers: its layers, our packing.

All texts of a step are one row of a batch, each token with its position in its own text, so linear layers run over all
tokens at once and nothing is padded. Attention is by text: texts of one length together.

    texts, shortest first   a a | b b | c c c | d d d d d
    attention               [a b]       [c]     [d]

Like a decoder of transformers (transformers_model.py), a layer hands its query, K and V to our function. Each encoder
is checked when it is loaded: two texts in one step must have the states that transformers gives each of them alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.transformers_model import (
    EAGER,
    MEMBER,
    PAGED,
    Call,
    Calls,
    FoundStates,
    one_line,
    quiet,
    register,
)
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.kernels.common.linear import Linear

log = logging.getLogger("alignedserve.engine")

_CHECKED = (9, 5)  # tokens of two texts
# How far states may be off, relative to the spread of a token's states.
_CLOSE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Text:
    """The tokens of a text, or of a pair whose second text begins at `second_at`."""

    tokens: Sequence[int]
    second_at: int | None = None

    @property
    def segments(self) -> list[int]:
        length = len(self.tokens)
        first = length if self.second_at is None else min(self.second_at, length)
        return [0] * first + [1] * (length - first)


class Encoder:
    """An encoder as the engine runs it. `head` makes the numbers of whole texts, if it has one."""

    def __init__(self, model: Any, config: EncoderConfig) -> None:
        self._whole, self._config = model, config
        self._model = model.base_model
        self._device = next(model.parameters()).device
        self._calls = Calls()
        for module in model.modules():
            setattr(module, MEMBER, self._calls)
        self._pooler = getattr(self._model, "pooler", None)
        if self._pooler is not None:
            self._model.pooler = None  # it is run for the tokens that count alone

    def states(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the states of each text's tokens, [tokens, hidden_size]."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        ordered = [texts[number] for number in order]
        lengths = [len(text.tokens) for text in ordered]
        groups = [(length, len([*same])) for length, same in groupby(lengths)]
        with self._calls.answered_by(partial(_attend, groups)):
            found = self._model(**self._inputs(ordered), return_dict=True).last_hidden_state[0]
        states: list[Tensor] = [found] * len(texts)
        for number, rows in zip(order, found.split(lengths), strict=True):
            states[number] = rows
        return states

    def _inputs(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        first = self._config.first_position
        tokens = torch.tensor([token for text in texts for token in text.tokens])
        positions = torch.cat([torch.arange(first, first + len(text.tokens)) for text in texts])
        inputs = {"input_ids": tokens, "position_ids": positions}
        if self._config.marks_second:
            inputs["token_type_ids"] = torch.tensor([segment for text in texts for segment in text.segments])
        return {name: value[None].to(self._device) for name, value in inputs.items()}

    def states_plainly(self, text: Text) -> Tensor:
        """Return the states of a single text as transformers computes them without us."""
        inputs = self._inputs([text])
        mask = torch.ones_like(inputs["input_ids"])
        states: Tensor = self._model(**inputs, attention_mask=mask, return_dict=True).last_hidden_state[0]
        return states

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        return self._scored if self._config.labels else None

    def _scored(self, states: Tensor) -> Tensor:
        """Return the numbers of texts by the state of each that counts: the head sees texts of one token."""
        prefix, dtype = self._whole.base_model_prefix, next(self._whole.parameters()).dtype
        stand_in = FoundStates(states.to(dtype)[:, None], self._pooler)
        setattr(self._whole, prefix, stand_in)
        try:
            tokens = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
            logits: Tensor = self._whole(input_ids=tokens).logits
        finally:
            setattr(self._whole, prefix, self._model)
        return logits.float()

    def attend_by(self, name: str) -> None:
        self._whole.set_attn_implementation(name)

    def use_linears(self, make_linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
        """Let our own linear layers take the place of those of torch."""
        linears = [
            (module, name, child)
            for module in self._model.modules()
            for name, child in module.named_children()
            if type(child) is torch.nn.Linear
        ]
        for module, name, child in linears:
            bias = None if child.bias is None else child.bias.data
            setattr(module, name, _OurLinear(make_linear(child.weight.data, bias)))


class _OurLinear(torch.nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def _attend(groups: Sequence[tuple[int, int]], call: Call) -> Tensor:
    """Attend text by text; `groups` are (length, how many texts of it), in the order of their tokens."""
    window = call.options.get("sliding_window")
    parts, start = [], 0
    for length, count in groups:
        rows = slice(start, start + length * count)
        start = rows.stop
        heads = (x[0, :, rows] for x in (call.query, call.key, call.value))
        query, key, value = (x.unflatten(1, (count, length)).transpose(0, 1) for x in heads)
        mask = None if window is None or length <= window else _window_mask(length, window, call.query.device)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale)
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return which tokens see which: those nearer than `window`, before and after."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None]).abs() < window


# --- Loading


def load_encoder(folder: Path, config: EncoderConfig, loader: Loader) -> Encoder:
    """Load an encoder, put our linear layers into it, and check it."""
    register(folder, config.architecture)
    with quiet():
        model = _read(folder, config, loader.dtype).to(loader.device)
        loader.count(sum(parameter.nbytes for parameter in model.parameters()))
        encoder, began = Encoder(model, config), time.perf_counter()
        with one_line(folder, f"{config.architecture} cannot run with our attention"), torch.inference_mode():
            texts = _checked_texts(config)
            encoder.attend_by(EAGER)
            plain = [encoder.states_plainly(text) for text in texts]
            encoder.attend_by(PAGED)
            encoder.use_linears(loader.make_linear)
            _compare(folder, encoder.states(texts), plain, config, loader.dtype)
    log.info("%s, run by transformers, was checked in %.1f s", config.architecture, time.perf_counter() - began)
    return encoder


def _read(folder: Path, config: EncoderConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModel, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if config.labels else AutoModel
    with one_line(folder, f"{config.architecture} cannot be loaded by transformers"):
        model, found = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=EAGER,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    lacking = (*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"]))
    missing = sorted(name for name in lacking if config.labels or not name.startswith("pooler."))
    if missing:
        raise ModelError(f"{folder}: tensor {missing[0]} is missing, or of another shape than the configuration says")
    return model.eval().requires_grad_(False)


def _checked_texts(config: EncoderConfig) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, config.max_positions) for length in _CHECKED]
    return [Text(torch.randint(config.vocab_size, (length,), generator=generator).tolist()) for length in lengths]


def _compare(
    folder: Path, ours: Sequence[Tensor], plain: Sequence[Tensor], config: EncoderConfig, dtype: torch.dtype
) -> None:
    for found, reference in zip(ours, plain, strict=True):
        errors = (found.float() - reference.float()).square().mean(-1).sqrt() / reference.float().std(-1)
        off = float(errors.max() if dtype == torch.float32 else errors.median())
        if not off <= _CLOSE[dtype]:
            raise UnsupportedModel(
                f"{folder}: {config.architecture} is not supported: with our attention, states are off by {off:.1g} of"
                " their spread"
            )
