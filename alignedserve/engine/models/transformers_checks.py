"""Checks at load time that our attention can replace that of a transformers model.

1. A pass inspects the call of every layer: each layer must call once, with K and V in the shapes of config.json, and
   ask for nothing that our attention does not do: it has sinks and capped scores. Its mask must be causal, or causal
   with a window: the mask's rule is tried at early and late positions, since a short pass does not reach the end of a
   window.
2. One pass runs as transformers computes it without us; then a prompt runs in two chunks through the device cache, the
   second chunk in one step with another prompt. If the logits differ, the layers keep more of a token than K and V, or
   count positions by themselves.

Features that no short pass can show are refused by name, in architectures/families/generic.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import attention_of
from alignedserve.engine.models.transformers_model import (
    CLOSE,
    PAGED,
    PROBE,
    Call,
    Place,
    TransformersModel,
    off_by,
    one_line,
    quiet,
    read_model,
    register,
)
from alignedserve.errors import UnsupportedModel
from alignedserve.kernels.common.reference import attend_to
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels

log = logging.getLogger("alignedserve.engine")

PROMPT, CHUNK, OTHER = 9, 4, 6  # tokens of a prompt, of the first chunk, of another prompt beside the second chunk
_BLOCK_SIZE = 4
# Options that layers pass on and that ask nothing of attention. (The window is read from the mask.)
_HARMLESS = {"position_ids", "position_embeddings", "use_cache", "cache_position", "sliding_window", "layer_idx"}
# Options that our attention has: sinks of each head, and the cap of scores.
_SINKS, _SOFTCAP = "s_aux", "softcap"
_KNOWN = {*_HARMLESS, _SINKS, _SOFTCAP}
_UNSET = (None, False, 0.0)

Rule = Callable[..., Tensor]


def load_transformers(folder: Path, config: GenericConfig, loader: Loader) -> tuple[GenericConfig, TransformersModel]:
    """Return the configuration completed from the model's layers, and the model."""
    register(folder, config.architecture)
    with quiet():
        model, began = read_model(folder, config, loader), time.perf_counter()
        with one_line(folder, f"{model.kind} cannot run with our attention"):
            found = config if config.attends_itself else _probed(folder, model, config)
            _compare(folder, model, found, loader.dtype, loader.kernels)
        log.info("%s: all %d layers checked in %.1f s", model.kind, config.num_layers, time.perf_counter() - began)
    return found, model


def _probed(folder: Path, model: TransformersModel, config: GenericConfig) -> GenericConfig:
    """Find the layers of a model, and return the configuration with what they tell."""
    model.attend_by(PROBE)
    probe = _Probe(folder, model, config)
    positions = torch.arange(PROMPT, device=model.device)
    logits = model.answered(_prompt(config).to(model.device), positions, None, probe.answer)
    if len(model.layers) != config.num_layers:
        called = f"{len(model.layers)} of {config.num_layers} layers call the AttentionInterface of transformers"
        raise UnsupportedModel(f"{folder}: {model.kind} is not supported: {called}")
    if logits.shape[-1] != config.vocab_size:
        known = f"it has logits for {logits.shape[-1]} tokens, config.json names {config.vocab_size}"
        raise UnsupportedModel(f"{folder}: {model.kind} is not supported: {known}")
    scorings = [place.scoring for place in model.layers.values()]
    windows, scales = (tuple(each.window for each in scorings), tuple(each.scale for each in scorings))
    narrow = [window for window in config.windows if window is not None]
    if narrow and any(map(_reads_more, windows, config.windows)):
        read = f"a layer reads more than the last {narrow[0]} tokens, which config.json's sliding_window names"
        raise UnsupportedModel(f"{folder}: {model.kind} is not supported: {read}: set it to null")
    # What config.json names stays: workers plan by it, and a layer that reads less loses nothing.
    return replace(config, windows=config.windows or windows, scales=scales)


def _reads_more(found: int | None, named: int | None) -> bool:
    return named is not None and (found is None or found > named)


class _Probe:
    """Inspects every layer's call, and answers it with attention of torch."""

    def __init__(self, folder: Path, model: TransformersModel, config: GenericConfig) -> None:
        self._folder, self._model, self._config = folder, model, config
        self._windows_of: dict[Rule, int | None] = {}

    def answer(self, call: Call) -> Tensor:
        why = self._why_not(call)
        if why is not None:
            layer = f"layer {len(self._model.layers)} ({self._model.name_of(call.module)})"
            raise UnsupportedModel(f"{self._folder}: {self._model.kind} is not supported: {layer} {why}")
        scoring = _scoring(call, self._window(call.mask.rule))
        self._model.layers[call.module] = Place(len(self._model.layers), scoring)
        query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        return attend_to(query, key, value, scoring)[None]

    def _why_not(self, call: Call) -> str | None:
        """Return the first reason why our attention cannot answer a layer's call, or None."""
        wanted = (1, self._config.num_kv_heads, PROMPT, self._config.head_dim)
        asked = [name for name, value in call.options.items() if name not in _KNOWN and not _is_unset(value)]
        rule = getattr(call.mask, "rule", None)
        reasons = {
            "attends twice in a pass": call.module in self._model.layers,
            f"has K of {_shape(call.key)} and V of {_shape(call.value)}": call.key.shape != call.value.shape,
            f"has K of {_shape(call.key)}, config.json says {wanted[1]} x {wanted[3]} for each token": call.key.shape
            != wanted,
            f"has queries of {_shape(call.query)}": call.query.shape[2:] != wanted[2:]
            or call.query.shape[1] % wanted[1] != 0,
            f"asks attention for {', '.join(asked)}": bool(asked),
            "brings no mask that transformers made": rule is None,
        }
        reason = next((why for why, holds in reasons.items() if holds), None)
        if reason is None and self._window(rule) == 0:
            return "has a mask that is neither causal nor a window"
        return reason

    def _window(self, rule: Any) -> int | None:
        if rule not in self._windows_of:
            self._windows_of[rule] = window_of(rule, self._config.max_positions)
        return self._windows_of[rule]


def _scoring(call: Call, window: int | None) -> Scoring:
    softcap, sinks = (call.options.get(name) for name in (_SOFTCAP, _SINKS))
    sinks = None if sinks is None else sinks.detach().flatten().float().contiguous()
    return Scoring(call.scale, window, softcap or None, sinks)


def window_of(rule: Rule, positions: int) -> int | None:
    """Return how many tokens a query sees by this rule, itself included; None for all, 0 if the rule is no window."""
    window = len(_seen(rule, positions - 1, positions))
    tried = {*range(3), *range(window - 1, window + 3), 3 * window // 2, positions // 2, positions - 2, positions - 1}
    for at in sorted(tried & {*range(positions)}):
        if _seen(rule, at, positions) != range(max(0, at + 1 - window), at + 1):
            return 0
    return None if window == positions else window


def _seen(rule: Rule, at: int, positions: int) -> range:
    """Return the range of tokens that the token at position `at` sees; an empty range if they are not a range."""
    zero = torch.tensor(0)
    sees = rule(zero, zero, torch.tensor([[at]]), torch.arange(positions)[None]).expand(1, positions)[0]
    seen: list[int] = sees.nonzero()[:, 0].tolist()
    whole = range(seen[0], seen[-1] + 1) if seen else range(0)
    return whole if len(whole) == len(seen) else range(0)


def _is_unset(value: Any) -> bool:
    return not isinstance(value, Tensor) and value in _UNSET


def _shape(vectors: Tensor) -> str:
    return f"{vectors.shape[1]} x {vectors.shape[3]} for each of {vectors.shape[2]} tokens"


def _prompt(config: GenericConfig) -> Tensor:
    return torch.randint(config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0))


def _compare(
    folder: Path, model: TransformersModel, config: GenericConfig, dtype: torch.dtype, kernels: Kernels
) -> None:
    prompt = _prompt(config).to(model.device)
    plain = model.run_plainly(prompt)
    model.attend_by(PAGED)
    first, second, other = _in_two_steps(model, prompt, config, dtype, kernels)
    for what, ours, reference in (
        ("a prompt", first, plain[:CHUNK]),
        ("a prompt's second chunk", second, plain[CHUNK:]),
        ("a prompt beside another", other, plain[:OTHER]),
    ):
        off = off_by(ours, reference, dtype is torch.float32)
        if not off <= CLOSE[dtype]:
            raise UnsupportedModel(
                f"{folder}: {model.kind} is not supported: with our attention, logits of {what} are off by"
                f" {off:.1g} of their spread: its layers keep more than K and V, or count positions by themselves"
            )


def _in_two_steps(
    model: TransformersModel, prompt: Tensor, config: GenericConfig, dtype: torch.dtype, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of a prompt's two chunks, and of a shorter prompt that runs beside the second chunk."""
    shape, device = (config.num_layers, 2 * 5, _BLOCK_SIZE, config.kv_dim), prompt.device
    cache = torch.full(shape, float("nan"), dtype=dtype, device=device)

    def step(tokens: Tensor, lies: list[QuerySpan]) -> Tensor:
        spans = Spans(lies, _BLOCK_SIZE)
        attention = attention_of(spans, cache, kernels)
        rows = torch.arange(len(tokens), device=device)
        return model.forward(tokens, spans.positions.to(device), rows, attention)

    first = step(prompt[:CHUNK], [QuerySpan(CHUNK, CHUNK, (3, 0, 4))])
    both = torch.cat((prompt[CHUNK:], prompt[:OTHER]))
    second, other = step(both, [QuerySpan(PROMPT - CHUNK, PROMPT, (3, 0, 4)), QuerySpan(OTHER, OTHER, (2, 1))]).split(
        [PROMPT - CHUNK, OTHER]
    )
    return first, second, other
