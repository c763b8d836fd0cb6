"""Runs the layers of BERT, RoBERTa, XLM-R, CamemBERT and ELECTRA, which share one architecture, with our kernels.

transformers reads the folder and makes the embeddings; its layers give their weights to ours, one after another. The
rows of all texts of a step run at once, each row by itself but in attention:

    x ─▶ query, K and V ─▶ attention ─▶ out ─▶ + x ─▶ norm ─▶ up ─▶ gelu ─▶ down ─▶ + ─▶ norm ─▶ the next layer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from alignedserve.engine.adapters.layers import AdaptedLayers
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.transformers_layers import WeightsOf
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import TextRows
from alignedserve.kernels.dispatch.dispatcher import Kernels

_MODEL_TYPES = {"bert", "roberta", "xlm-roberta", "camembert", "electra"}  # as transformers names them
# Rows that go through the layers behind attention together: what these hand on to each other stays in the caches.
_ROWS_AT_ONCE = 1024


def has_our_layers(model: Any) -> bool:
    """Return whether the layers of this encoder of transformers can be replaced by ours."""
    return model.config.model_type in _MODEL_TYPES


class BertLayers:
    """All layers of an encoder whose norms come behind each block."""

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
