"""Experts of a layer that the files have stacked into one tensor, by the names that experts of their own have.

NAME.experts.gate_up_proj   [experts, inputs, 2 * inner]   NAME.experts.0.gate_proj.weight   [inner, inputs]
                                                           NAME.experts.0.up_proj.weight     [inner, inputs]
NAME.experts.down_proj      [experts, inner, outputs]      NAME.experts.0.down_proj.weight   [outputs, inner]
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from alignedserve.engine.weights.tensors import Cut, Weights
from alignedserve.kernels.common.fp8 import AnyQuantised

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class StackedExperts(Weights):
    """The weights of a model whose experts are stacked; all others are as they were."""

    def __init__(self, tensors: Weights, experts: int) -> None:
        self._tensors, self._experts = tensors, experts

    def __contains__(self, name: str) -> bool:
        found = _EXPERT.fullmatch(name)
        return name in self._tensors if found is None else _stack(found) in self._tensors

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        return None if _EXPERT.fullmatch(f"{layer}.weight") else self._tensors.quantised(layer, shape, cut)

    def read_into(self, out: Tensor, name: str, shape: tuple[int, ...] | None = None, cut: Cut | None = None) -> None:
        found = _EXPERT.fullmatch(name)
        if found is None:
            self._tensors.read_into(out, name, shape, cut)
            return
        assert shape is None, "a part of an expert is read in its own shape"
        whole = [*out.shape] if cut is None else [cut.whole if dim == cut.dim else n for dim, n in enumerate(out.shape)]
        of_two = found[3] != "down"
        stored = torch.empty(1, whole[1], whole[0] * (1 + of_two), dtype=out.dtype)
        self._tensors.read_into(stored, _stack(found), cut=Cut(0, int(found[2]), self._experts))
        weight = stored[0].narrow(1, whole[0] if found[3] == "up" else 0, whole[0]).t()
        out.copy_(weight if cut is None else weight.narrow(cut.dim, cut.start, out.shape[cut.dim]))


def _stack(found: re.Match[str]) -> str:
    """Return the name of the tensor that an expert's weight lies in."""
    return f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"
