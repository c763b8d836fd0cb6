"""Runs an encoder of transformers: all texts of a step at once.

All texts of a step are one row of a batch, each token with its position in its own text, so linear layers run over all
tokens at once and nothing is padded. Attention is by text.

Where the encoder is of BERT's kind, its layers are ours (`BertLayers`). Otherwise they are those of transformers with
our linear layers, and hand their query, K and V to our function, as in a decoder (transformers_model.py).
Each encoder is checked when it is loaded: two texts in one step must have the states that transformers gives each of
them alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.engine.adapters.layers import AdaptedLayers
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.transformers_layers import OurLinear, WeightsOf
from alignedserve.engine.models.transformers_model import (
    CLOSE,
    EAGER,
    PAGED,
    Call,
    Calls,
    FoundStates,
    off_by,
    one_line,
    quiet,
    register,
    standing_in,
)
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import TextRows
from alignedserve.kernels.dispatch.dispatcher import Kernels

log = logging.getLogger("alignedserve.engine")

_CHECKED = (9, 5)  # tokens of two texts
_CLOSE_QUANTISED = {Quantization.INT8: 0.2, Quantization.INT4: 0.8}


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

    def __init__(self, model: Any, config: EncoderConfig, kernels: Kernels) -> None:
        self._whole, self._config, self._kernels = model, config, kernels
        self._layers: BertLayers | None = None
        self._model = model.base_model
        self._device = next(model.parameters()).device
        self._calls = Calls(model)
        self._pooler = getattr(self._model, "pooler", None)
        if self._pooler is not None:
            self._model.pooler = None  # it is run for the tokens that count alone

    def states(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the states of each text's tokens, [tokens, hidden_size]."""
        # The shortest first: the reference kernel attends to texts of one length together.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        ordered = [texts[number] for number in order]
        rows = TextRows([len(text.tokens) for text in ordered])
        found = self._run(self._inputs(ordered), rows)
        states: list[Tensor] = [found] * len(texts)
        for number, own in zip(order, found.split(rows.lengths), strict=True):
            states[number] = own
        return states

    def _run(self, inputs: dict[str, Tensor], rows: TextRows) -> Tensor:
        """Return the states of all rows of a step."""
        if self._layers is not None:
            return self._layers(self._embedded(inputs), rows)
        with self._calls.answered_by(partial(_attend, self._kernels, rows)):
            states: Tensor = self._model(**inputs, return_dict=True).last_hidden_state[0]
        return states

    def _embedded(self, inputs: dict[str, Tensor]) -> Tensor:
        embedded = self._model.embeddings(**inputs)
        project = getattr(self._model, "embeddings_project", None)  # of ELECTRA, whose embeddings may be narrower
        found: Tensor = (embedded if project is None else project(embedded))[0]
        return found

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
        dtype = next(self._whole.parameters()).dtype
        tokens = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
        with standing_in(self._whole, FoundStates(states.to(dtype)[:, None], self._pooler)):
            logits: Tensor = self._whole(input_ids=tokens).logits
        return logits.float()

    def attend_by(self, name: str) -> None:
        self._whole.set_attn_implementation(name)

    def use_layers(self, folder: Path, loader: Loader) -> None:
        """Let our own layers take the place of those of transformers: whole ones, or else linear layers alone."""
        if has_our_layers(self._model):
            self._layers = BertLayers(self._model, loader)
            del self._model.encoder
        elif loader.quantization is not Quantization.NONE:
            raise UnsupportedModel(f"{folder}: {self._config.architecture} cannot be quantised yet")
        else:
            self._use_linears(loader.make_linear)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights that are not in layers of ours."""
        return sum(parameter.nbytes for parameter in self._whole.parameters())

    def _use_linears(self, make_linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
        """Let our own linear layers take the place of those of torch."""
        linears = [
            (module, name, child)
            for module in self._model.modules()
            for name, child in module.named_children()
            if type(child) is torch.nn.Linear
        ]
        for module, name, child in linears:
            bias = None if child.bias is None else child.bias.data
            setattr(module, name, OurLinear(make_linear(child.weight.data, bias)))


def _attend(kernels: Kernels, rows: TextRows, call: Call) -> Tensor:
    """Attend text by text for a layer of transformers."""
    query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    return kernels.attend_texts(query, key, value, rows, call.scale, call.options.get("sliding_window"))[None]


# --- Loading


def load_encoder(folder: Path, config: EncoderConfig, loader: Loader) -> Encoder:
    """Load an encoder, put our linear layers into it, and check it."""
    register(folder, config.architecture)
    with quiet():
        model = _read(folder, config, loader.dtype).to(loader.device)
        encoder, began = Encoder(model, config, loader.kernels), time.perf_counter()
        with one_line(folder, f"{config.architecture} cannot run with our attention"), torch.inference_mode():
            texts = _checked_texts(config)
            encoder.attend_by(EAGER)
            plain = [encoder.states_plainly(text) for text in texts]
            encoder.attend_by(PAGED)
            encoder.use_layers(folder, loader)
            _compare(folder, encoder.states(texts), plain, config, loader)
    loader.count(encoder.num_bytes)
    log.info("%s was checked against transformers in %.1f s", config.architecture, time.perf_counter() - began)
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
    folder: Path, ours: Sequence[Tensor], plain: Sequence[Tensor], config: EncoderConfig, loader: Loader
) -> None:
    is_exact = loader.dtype is torch.float32 and loader.quantization is Quantization.NONE
    close = max(CLOSE[loader.dtype], _CLOSE_QUANTISED.get(loader.quantization, 0))
    for found, reference in zip(ours, plain, strict=True):
        off = off_by(found, reference, is_exact)
        if not off <= close:
            raise UnsupportedModel(
                f"{folder}: {config.architecture} is not supported: with our attention, states are off by {off:.1g} of"
                " their spread"
            )


_MODEL_TYPES = {"bert", "roberta", "xlm-roberta", "camembert", "electra"}  # as transformers names them
# Rows that go through the layers behind attention together: what these hand on to each other stays in the caches.
_ROWS_AT_ONCE = 1024


def has_our_layers(model: Any) -> bool:
    """Return whether the layers of this encoder of transformers can be replaced by ours."""
    return model.config.model_type in _MODEL_TYPES


class BertLayers:
    """Runs the layers of BERT, RoBERTa, XLM-R, CamemBERT and ELECTRA, which share one architecture, with our kernels.

    transformers reads the folder and makes the embeddings; its layers give their weights to ours, one after
    another. The rows of all texts of a step run at once, each row by itself but in attention:

        x ─▶ query, K and V ─▶ attention ─▶ out ─▶ + x ─▶ norm ─▶ up ─▶ gelu ─▶ down ─▶ + ─▶ norm ─▶ the next layer
    """

    def __init__(self, model: Any, loader: Loader) -> None:
        """Take the weights of an encoder that transformers has read; its own layers stay as they are."""
        named = [(f"encoder.layer.{number}", layer) for number, layer in enumerate(model.encoder.layer)]
        # Adapters change no encoder, so the layers are not among those that they may change.
        taking = replace(loader, tensors=WeightsOf(model), adapted=AdaptedLayers())
        self._layers = [_BertLayer.taken(name, layer, taking) for name, layer in named]

    def __call__(self, x: Tensor, texts: TextRows) -> Tensor:
        """Return the states of all rows [rows, hidden]; x is overwritten."""
        for layer in self._layers:
            layer.run(x, texts)
        return x


@dataclass(frozen=True)
class _BertLayer:
    kernels: Kernels
    qkv: Linear
    out: Linear
    attention_norm: Norm
    up: Linear
    activation: Any
    down: Linear
    norm: Norm
    head_dim: int

    @classmethod
    def taken(cls, name: str, layer: Any, loader: Loader) -> _BertLayer:
        attention, inner = layer.attention.self, layer.intermediate
        hidden, widest = attention.query.in_features, inner.dense.out_features
        of_query = f"{name}.attention.self"
        return cls(
            loader.kernels,
            loader.by_rows([f"{of_query}.{part}" for part in ("query", "key", "value")], [hidden] * 3, hidden, True),
            loader.linear(f"{name}.attention.output.dense", hidden, hidden, True),
            _norm(f"{name}.attention.output.LayerNorm", layer.attention.output.LayerNorm, loader),
            loader.linear(f"{name}.intermediate.dense", widest, hidden, True),
            _activation(inner.intermediate_act_fn, loader.kernels),
            loader.linear(f"{name}.output.dense", hidden, widest, True),
            _norm(f"{name}.output.LayerNorm", layer.output.LayerNorm, loader),
            attention.attention_head_size,
        )

    def run(self, x: Tensor, texts: TextRows) -> None:
        """Run the layer on all rows, in place."""
        query, k, v = self.qkv(x).unflatten(1, (3, -1, self.head_dim)).unbind(1)
        attended = self.kernels.attend_texts(query, k, v, texts, self.head_dim**-0.5).flatten(1)
        for part, of_part in zip(x.split(_ROWS_AT_ONCE), attended.split(_ROWS_AT_ONCE), strict=True):
            self._finish(part, of_part)

    def _finish(self, x: Tensor, attended: Tensor) -> None:
        self.out.add_to(attended, x)
        inner = self._normed(x, self.attention_norm)
        self.down.add_to(self.activation(self.up(inner)), inner)
        x.copy_(self._normed(inner, self.norm))

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)


def _norm(name: str, norm: Any, loader: Loader) -> Norm:
    return loader.layer_norm(name, norm.normalized_shape[0], norm.eps)


def _activation(module: Any, kernels: Kernels) -> Any:
    """Return our gelu where the layer has that, else the function of transformers."""
    return kernels.gelu if type(module).__name__ == "GELUActivation" else module
