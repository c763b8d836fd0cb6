"""Gives a transformers model linear layers of ours, whose weights are quantised.

A new model's weights take no memory before they are written. So a layer is read and put into the place of that of
transformers before the next: no more than one has its plain numbers in memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from alignedserve.engine.models.loading import Head, Loader
from alignedserve.engine.weights.tensors import Cut, Weights
from alignedserve.errors import UnsupportedModel
from alignedserve.kernels.common.linear import Linear

log = logging.getLogger("alignedserve.engine")

# Layers that choose the experts of a token: they have few numbers, and each decides much.
_ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}


class OurLinear(nn.Module):
    """A linear layer of ours in the place of a layer of transformers."""

    def __init__(self, linear: Linear, more: nn.Parameter | None = None) -> None:
        """`more` is a bias that the layer shares with other modules."""
        super().__init__()
        self._linear = linear
        self.bias, self._more = linear.bias if more is None else more, more

    @property
    def weight(self) -> Tensor:
        """Return the weight: a copy where it is quantised."""
        return self._linear.weight

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self._linear.shape.out)
        if not x.numel():  # logits of a step that wants none
            return x.new_empty(shape)
        made = self._linear(x.reshape(-1, x.shape[-1])).view(shape)
        return made if self._more is None else made + self._more


class _RowsOfHead(nn.Embedding):
    """A table of embeddings that the output head holds; the weight that is left here has no numbers."""

    rows: Callable[[Tensor], Tensor]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows(tokens)


def read_weights(model: Any, loader: Loader) -> None:
    """Read all weights of a new model from its files, those of linear layers into layers of ours."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2 and name not in loader.tensors:  # transformers has all experts of a layer in one tensor
            raise UnsupportedModel(f"{name}: experts of a mixture are not read where they are quantised")
    _replace_layers(model, loader)
    for name, into in [*model.named_parameters(), *_stored_buffers(model, loader.tensors)]:
        if into.numel():
            _read(into, name, loader.tensors)


def quantise_layers(model: Any, loader: Loader) -> None:
    """Quantise the linear layers of a model that transformers has read."""
    _replace_layers(model, replace(loader, tensors=WeightsOf(model)))
    experts = [parameter for parameter in model.parameters() if parameter.dim() > 2]
    if experts:
        megabytes = sum(parameter.nbytes for parameter in experts) >> 20
        log.info("experts of a mixture are not quantised: they take %d MB as %s", megabytes, loader.dtype)


def reads_as_stored(model: Any, tensors: Weights) -> bool:
    """Return whether the files have each parameter of a model as the model has it, and in the type that is served."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    keeps_fp32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    if any(getattr(model, name, None) for name in keeps_fp32):
        return False
    is_changed = bool(get_model_conversion_mapping(model, add_legacy=False))
    return not is_changed and all(name in tensors for name, _ in model.named_parameters())


def _stored_buffers(model: Any, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for name, buffer in model.named_buffers() if name in tensors)


def _read(into: Tensor, name: str, tensors: Weights) -> None:
    shape, found = tuple(into.shape), None
    if len(shape) == 2:
        found = tensors.quantised(name.removesuffix(".weight"), shape)
    if found is None:
        tensors.read_into(into, name)
    else:
        into.copy_(found.expanded())


class WeightsOf(Weights):
    """The weights of a model that has them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __contains__(self, name: str) -> bool:
        return any(name == found for found, _ in self._model.named_parameters())

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        whole: Tensor = self._model.get_parameter(name)
        out.copy_(whole if cut is None else whole.narrow(cut.dim, cut.start, out.shape[cut.dim]))


# --- Layers


def _replace_layers(model: Any, loader: Loader) -> None:
    head = _name_of(model, model.get_output_embeddings())
    if head is not None:
        _put(model, head, _made_head(model, head, loader))
    for name in _names_of_layers(model, loader):
        _put(model, name, OurLinear(_made(model.get_submodule(name), name, loader)))


def _name_of(model: Any, head: Any) -> str | None:
    """Return the name of the output head, if it is a linear layer like others."""
    return next((name for name, module in model.named_modules() if type(head) is nn.Linear and module is head), None)


def _names_of_layers(model: Any, loader: Loader) -> list[str]:
    users = Counter(id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear | nn.Embedding))
    return [
        name
        for name, layer in model.named_modules()
        if (type(layer) is nn.Linear or type(layer).__name__ == "FalconLinear" or _is_transposed(layer))
        and users[id(layer.weight)] <= 1
        and layer.weight.dtype is loader.dtype
        and not _ROUTERS & {*name.split(".")[-2:]}
    ]


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is one as GPT-2 has them: its weight is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D"


def _made(layer: Any, name: str, loader: Loader) -> Linear:
    if _is_transposed(layer):
        return loader.transposed(name, layer.nf, layer.nx)
    return loader.by_rows([name], [layer.out_features], layer.in_features, layer.bias is not None)


def _made_head(model: Any, name: str, loader: Loader) -> OurLinear:
    head, table = model.get_submodule(name), model.get_input_embeddings()
    if not isinstance(table, nn.Embedding) or table.weight is not head.weight:
        return OurLinear(loader.linear(name, head.out_features, head.in_features, head.bias is not None, is_head=True))
    of_table = next(found for found, module in model.named_modules() if module is table)
    embedding = loader.embedding(f"{of_table}.weight", head.out_features, head.in_features, tied=True)
    made = loader.head(f"{name}.weight", embedding, tied=True)
    assert isinstance(made, Head)
    _take_rows(table, made.linear)
    return OurLinear(made.linear, head.bias)


def _take_rows(table: Any, head: Linear) -> None:
    """Make a table take its rows from the head. What else its class does, such as scaling them, it still does."""
    kind = type(table)
    table.__class__ = _RowsOfHead if kind is nn.Embedding else type(kind.__name__, (kind, _RowsOfHead), {})
    table.rows = head.rows
    table.weight = nn.Parameter(table.weight.new_empty(0), requires_grad=False)


def _put(model: Any, name: str, layer: nn.Module) -> None:
    """Put a layer into the place of that of this name, and wherever else the model has it."""
    old = model.get_submodule(name)
    for found, module in [*model.named_modules(remove_duplicate=False)]:
        if module is old:
            model.set_submodule(found, layer)
