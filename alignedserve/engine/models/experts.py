"""The gated MLP of a layer: dense, or a mixture of experts, where each token takes a few."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import Activation
from alignedserve.architectures.routing import Clamp, ExpertNames, MixtureConfig, Routing, Stack
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.weights.adapters import AdaptedLayers
from alignedserve.engine.weights.tensors import Cut, Weights, whole_shape
from alignedserve.kernels.common.decoder import AttentionLayer, DecoderLayer, Inner, Layer, MlpLayer, Norm
from alignedserve.kernels.common.decoder import Mlp as DecoderMlp
from alignedserve.kernels.common.experts import ExpertLinear, ExpertWeights, add_experts, clamped
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import AnyQuantised
from alignedserve.kernels.dispatch.dispatcher import Kernels

_USUAL = ExpertNames()
_INNER = {Activation.SILU: Inner.SILU, Activation.GELU_TANH: Inner.GELU}


class Mlp(DecoderMlp, Protocol):
    def completed(self, layer: AttentionLayer) -> Layer:
        """Return the layer with this MLP."""


@dataclass(frozen=True)
class DenseMlp:
    up: Linear  # gate and up
    down: Linear
    kernels: Kernels
    clamp: Clamp | None = None
    activation: Activation = Activation.SILU  # of the gate
    after: Norm | None = None  # of what is added to the residual

    @property
    def adds_at_once(self) -> bool:
        return False  # it may have a norm of what is added

    def share(self, x: Tensor) -> Tensor:
        return self.down.share(self._inner(x))

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        add_normed(self.down, self.after, self._inner(x), residual, self.kernels)

    def _inner(self, x: Tensor) -> Tensor:
        made = self.up(x)
        if self.clamp is not None:
            return clamped(made, self.clamp)
        match self.activation:
            case Activation.SILU:
                return self.kernels.silu_mul(made)
            case Activation.GELU_TANH:
                return self.kernels.gelu_mul(made)
        gate, up = made.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up

    def completed(self, layer: AttentionLayer) -> Layer:
        if self.activation not in _INNER or self.clamp is not None:
            return MlpLayer(**vars(layer), mlp=self, after_mlp=self.after)
        inner = _INNER[self.activation]
        return DecoderLayer(**vars(layer), up=self.up, down=self.down, inner=inner, after_mlp=self.after)


def add_normed(linear: Linear, after: Norm | None, x: Tensor, residual: Tensor, kernels: Kernels) -> None:
    """Add a layer's outputs to the residual, or the norm of them where there is one."""
    if after is None:
        linear.add_to(x, residual)
    else:
        assert after.weight is not None
        residual += kernels.rms_norm(linear(x), after.weight, after.eps)


def dense_mlp(
    loader: Loader,
    name: str,
    hidden: int,
    inner: int,
    bias: bool = False,
    names: ExpertNames = _USUAL,
    clamp: Clamp | None = None,
) -> DenseMlp:
    """Read an MLP with a gate."""
    if names.gate_up is None:
        up = loader.by_rows([f"{name}.{names.gate}", f"{name}.{names.up}"], [inner] * 2, hidden, bias)
    else:
        up = loader.fused(f"{name}.{names.gate_up}", [inner] * 2, hidden, bias)
    down = loader.by_columns(f"{name}.{names.down}", hidden, inner, bias)
    return DenseMlp(up, down, loader.kernels, clamp)


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token, in fp32."""

    routing: Routing
    kernels: Kernels
    weight: Tensor  # [experts, hidden], fp32
    bias: Tensor | None = None  # [experts], fp32: counts in the choice alone
    offset: Tensor | None = None  # [experts], fp32: what every token's numbers have more

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each row, and their shares, both [rows, chosen]."""
        return self.kernels.route(F.linear(x.float(), self.weight, self.offset), self.routing, self.bias)


@dataclass(frozen=True)
class SharedMlp:
    """What all tokens take beside their experts."""

    mlp: DenseMlp
    gate: Tensor | None  # [1, hidden]: makes the weight of each token; None: it is one

    def share(self, x: Tensor) -> Tensor:
        made = self.mlp.share(x)
        return made if self.gate is None else made.mul_(F.linear(x, self.gate).sigmoid())


def _run_at_once(experts: ExpertWeights, loader: Loader) -> bool:
    """Return whether one kernel runs all experts of a layer: where there is one, and their weights are alike, and plain
    numbers or packed for it."""
    if not loader.kernels.captures_experts:
        return False
    layers = (*experts.ups, *experts.downs)
    if not all(isinstance(layer, ExpertLinear) or layer.memory.dtype is loader.dtype for layer in layers):
        loader.in_turn.append("experts whose inputs have small groups, or an order of their own, run one after another")
        return False
    if not experts.are_alike:
        loader.in_turn.append("experts whose weights are not alike run one after another")
        return False
    loader.mixtures.append(experts)
    return True


@dataclass(frozen=True)
class ExpertsMlp:
    """A mixture of experts, and what all tokens take beside it. Each rank has a part of each expert."""

    router: Router
    experts: ExpertWeights
    is_at_once: bool  # whether one kernel runs all experts; else they run one after another
    kernels: Kernels
    shared: SharedMlp | None
    total: Callable[[Tensor], None] | None  # sums the outputs over ranks

    @property
    def adds_at_once(self) -> bool:
        return self.total is None and self.is_at_once and (self.shared is None or self.shared.gate is None)

    def share(self, x: Tensor) -> Tensor:
        return self._added(x, None if self.shared is None else self.shared.share(x))

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if self.adds_at_once:
            self._added(x, residual)
            if self.shared is not None:
                self.shared.mlp.add_to(x, residual)
            return
        out = self.share(x)
        if self.total is not None:
            self.total(out)
        residual += out

    def completed(self, layer: AttentionLayer) -> Layer:
        return MlpLayer(**vars(layer), mlp=self)

    def _added(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return what the experts make, added to `out` where that is given."""
        if self.is_at_once:
            return self.kernels.add_experts(x, self.experts, *self.router(x), out)
        return add_experts(x, self.experts, *self.router(x), out, self.kernels.silu_mul)


def mlp_of(
    config: MixtureConfig,
    number: int,
    layer: str,
    loader: Loader,
    bias: bool = False,
    name: str = "mlp",
    names: ExpertNames = _USUAL,
) -> Mlp:
    """Read the MLP of a layer: a mixture of experts, or a dense one of this name with these parts."""
    routing = config.routing_of(number)
    if routing is None:
        return dense_mlp(loader, f"{layer}.{name}", config.hidden_size, config.intermediate_size, bias, names=names)
    return _experts_mlp(config, routing, layer, loader)


def _experts_mlp(config: MixtureConfig, routing: Routing, layer: str, loader: Loader) -> ExpertsMlp:
    """Read a mixture. Adapters change what all tokens take, but no expert: these run other rows than the step has."""
    names, hidden, shared = routing.names, config.hidden_size, None
    apart = replace(loader, adapted=AdaptedLayers(), at_once=loader.kernels.captures_experts)
    if routing.stack is not None:
        apart = replace(apart, tensors=StackedExperts(loader.tensors, routing.experts, routing.stack))

    def expert(number: int) -> DenseMlp:
        name, size = f"{layer}.{names.experts}.{number}", config.expert_size
        return dense_mlp(apart, name, hidden, size, routing.has_biases, names, routing.clamp)

    if config.shared_size:
        gate = f"{layer}.{names.shared_gate}.weight"
        shared = SharedMlp(
            dense_mlp(loader, f"{layer}.{names.shared}", hidden, config.shared_size),
            loader.vector(gate, 1, hidden) if routing.shared_is_gated else None,
        )
    each = [expert(number) for number in range(routing.experts)]
    ups, downs = [one.up for one in each], [one.down for one in each]
    experts = ExpertWeights(ups, downs, routing.clamp, routing.chosen, routing.weighs_inputs)
    return ExpertsMlp(
        _router(routing, layer, hidden, loader),
        experts,
        _run_at_once(experts, loader),
        loader.kernels,
        shared,
        loader.ranks.total if loader.ranks.size > 1 else None,
    )


def _router(routing: Routing, layer: str, hidden: int, loader: Loader) -> Router:
    names, experts = routing.names, routing.experts
    weight = loader.vector(f"{layer}.{names.router}.weight", experts, hidden, dtype=torch.float32)

    def numbers(name: str) -> Tensor:
        return loader.vector(name, experts, dtype=torch.float32)

    return Router(
        routing,
        loader.kernels,
        weight,
        bias=numbers(f"{layer}.{names.bias}") if routing.is_biased else None,
        offset=numbers(f"{layer}.{names.router}.bias") if routing.has_biases else None,
    )


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class StackedExperts(Weights):
    """The weights of a model whose files stack the experts of a layer: each by the name that it would have by itself.

    NAME.experts.gate_up_proj        [experts, inputs, 2 * inner]   NAME.experts.0.gate_proj.weight   [inner, inputs]
                                                                    NAME.experts.0.up_proj.weight     [inner, inputs]
    NAME.experts.gate_up_proj_bias   [experts, 2 * inner]           NAME.experts.0.gate_proj.bias     [inner]
                                                                    NAME.experts.0.up_proj.bias       [inner]
    NAME.experts.down_proj           [experts, inner, outputs]      NAME.experts.0.down_proj.weight   [outputs, inner]
    NAME.experts.down_proj_bias      [experts, outputs]             NAME.experts.0.down_proj.bias     [outputs]
    """

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
