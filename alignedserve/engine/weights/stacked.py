"""Experts of a layer that the files have stacked into one tensor, by the names that experts of their own have.

NAME.experts.gate_up_proj        [experts, inputs, 2 * inner]   NAME.experts.0.gate_proj.weight   [inner, inputs]
                                                                NAME.experts.0.up_proj.weight     [inner, inputs]
NAME.experts.gate_up_proj_bias   [experts, 2 * inner]           NAME.experts.0.gate_proj.bias     [inner]
                                                                NAME.experts.0.up_proj.bias       [inner]
NAME.experts.down_proj           [experts, inner, outputs]      NAME.experts.0.down_proj.weight   [outputs, inner]
NAME.experts.down_proj_bias      [experts, outputs]             NAME.experts.0.down_proj.bias     [outputs]
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from alignedserve.architectures.routing import Stack
from alignedserve.engine.weights.tensors import Cut, Weights, whole_shape
from alignedserve.kernels.common.quantised import AnyQuantised

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class StackedExperts(Weights):
    """The weights of a model whose experts are stacked; all others are as they were."""

    def __init__(self, tensors: Weights, experts: int, stack: Stack) -> None:
        self._tensors, self._experts, self._stack = tensors, experts, stack

    def __contains__(self, name: str) -> bool:
        found = _EXPERT.fullmatch(name)
        return name in self._tensors if found is None else _tensor_of(found) in self._tensors

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        return None if _EXPERT.fullmatch(f"{layer}.weight") else self._tensors.quantised(layer, shape, cut)

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        found = _EXPERT.fullmatch(name)
        if found is None:
            self._tensors.read_into(out, name, cut)
            return
        numbers = self._expert(found, whole_shape(out.shape, cut), out.dtype, out.device)
        out.copy_(numbers if cut is None else numbers.narrow(cut.dim, cut.start, out.shape[cut.dim]))

    def _expert(self, found: re.Match[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a layer's weight [outputs, inputs] or bias [outputs]."""
        outputs, *inputs = shape
        of_two = found[3] != "down"
        stored = torch.empty(1, *inputs, outputs * (1 + of_two), dtype=dtype, device=device)
        self._tensors.read_into(stored, _tensor_of(found), Cut(0, int(found[2]), self._experts))
        numbers = stored[0].t()
        if not of_two:
            return numbers
        is_up = found[3] == "up"
        return numbers[is_up::2] if self._stack is Stack.IN_TURN else numbers.narrow(0, is_up * outputs, outputs)


def _tensor_of(found: re.Match[str]) -> str:
    """Return the name of the tensor that an expert's weight or bias lies in."""
    layer = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"
    return layer if found[4] == "weight" else f"{layer}_bias"
