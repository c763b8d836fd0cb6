"""Experts and rows to try kernels with: beside a row lie NaN, so a kernel that reads them shows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from alignedserve.architectures.routing import Clamp
from alignedserve.kernels.common.experts import ExpertLinear, ExpertPacking, ExpertWeights
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import FP8, AnyQuantised, Fp8Weight, quantised
from alignedserve.kernels.common.reference import Reference

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def in_fp8(weight: torch.Tensor, group: int) -> Fp8Weight:
    """Return a weight as 8-bit floats with a scale for each output and group of inputs."""
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % group)).unflatten(1, (-1, group))
    scale = groups.abs().amax(2) / 448
    return Fp8Weight((groups / scale[..., None]).flatten(1)[:, :inputs].to(FP8), scale, group)


FORMS: Mapping[str, Callable[[torch.Tensor], AnyQuantised]] = {
    "fp8": lambda weight: in_fp8(weight, 32),
    "fp8 of one group": lambda weight: replace(in_fp8(weight, weight.shape[1]), group=None),
    "int8": lambda weight: quantised(weight, 8, weight.shape[1]),
    "int4": lambda weight: quantised(weight, 4, 32),
    "int4 of large groups": lambda weight: quantised(weight, 4, 128),
}


@dataclass(frozen=True)
class MixtureCase:
    x: torch.Tensor  # [rows, hidden], strided
    up: torch.Tensor  # [experts, 2 * inner, hidden]
    down: torch.Tensor  # [experts, hidden, inner]
    biases: tuple[torch.Tensor, torch.Tensor] | None
    clamp: Clamp | None
    weighs_inputs: bool
    chosen: torch.Tensor  # [rows, experts of a row]
    shares: torch.Tensor
    beside: torch.Tensor  # [rows, hidden]: what is there before
    form: str | None = None  # of FORMS, in which the weights are kept

    @classmethod
    def made(
        cls,
        seed: int,
        dtype: torch.dtype,
        *,
        rows: int,
        experts: int,
        taken: int,
        hidden: int,
        inner: int,
        has_biases: bool = False,
        clamps: bool = False,
        weighs_inputs: bool = False,
    ) -> MixtureCase:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        apart = torch.full((rows, hidden + 8), torch.nan)
        apart[:, :hidden] = numbers(rows, hidden)
        return cls(
            apart.to(dtype)[:, :hidden],
            (numbers(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
            (numbers(experts, hidden, inner) / inner**0.5).to(dtype),
            (numbers(experts, 2 * inner).to(dtype), numbers(experts, hidden).to(dtype)) if has_biases else None,
            Clamp(limit=0.8, slope=1.7) if clamps else None,
            weighs_inputs,
            numbers(rows, experts).topk(taken, dim=1).indices,
            torch.rand(rows, taken, generator=generator),
            numbers(rows, hidden).to(dtype),
        )

    def weights(self, kernels: Reference, device: torch.device) -> ExpertWeights:
        up_bias, down_bias = self.biases or (None, None)

        def layer(own: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            if self.form is None:
                return kernels.linear(own.to(device), bias)
            packing = ExpertPacking.from_weight(FORMS[self.form](own.float()).on(device))
            assert packing is not None
            return ExpertLinear(packing, bias, own.dtype)

        def layers(weight: torch.Tensor, bias: torch.Tensor | None) -> list[Linear]:
            biases = [None] * len(weight) if bias is None else [*bias.to(device)]
            return [layer(own, of) for own, of in zip(weight, biases, strict=True)]

        ups, downs = layers(self.up, up_bias), layers(self.down, down_bias)
        return ExpertWeights(ups, downs, self.clamp, self.chosen.shape[1], self.weighs_inputs)

    def sums(self, kernels: Reference, device: torch.device) -> torch.Tensor:
        out = self.beside.to(device, copy=True)
        weights, (chosen, shares) = self.weights(kernels, device), (self.chosen.to(device), self.shares.to(device))
        kernels.add_experts(_strided_on(device, self.x), weights, chosen, shares, out)
        return out.cpu()

    def check(self, sums: torch.Tensor) -> None:
        """Fail unless sums are those of fp64, but for the rounding of what is between, and of the sum."""
        exact, size = self.beside.double(), torch.ones(len(self.x), dtype=torch.float64)
        for row in range(len(self.x)):
            for expert, share in zip(self.chosen[row].tolist(), self.shares[row].double(), strict=True):
                made = self._made(self.x[row].double(), expert, share)
                exact[row] += made
                size[row] += made.abs().max()
        allowed = 4 * _ROUNDING[sums.dtype] * (size[:, None] + exact.abs())
        assert bool(((sums.double() - exact).abs() <= allowed).all())

    def _weight(self, own: torch.Tensor) -> torch.Tensor:
        return own.double() if self.form is None else FORMS[self.form](own.float()).expanded().double()

    def _made(self, x: torch.Tensor, expert: int, share: torch.Tensor) -> torch.Tensor:
        both = self._weight(self.up[expert]) @ (x * share if self.weighs_inputs else x)
        if self.biases is not None:
            both += self.biases[0][expert]
        gate, up = both.chunk(2)
        if self.clamp is None:
            inner = torch.nn.functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=self.clamp.limit), up.clamp(-self.clamp.limit, self.clamp.limit)
            inner = (up + 1) * gate * torch.sigmoid(self.clamp.slope * gate)
        made = self._weight(self.down[expert]) @ inner
        if self.biases is not None:
            made += self.biases[1][expert]
        return made if self.weighs_inputs else made * share


def _strided_on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """Return x on the device with its strides, and what lies between its rows."""
    if device.type == "cpu":
        return x
    apart = torch.full((x.shape[0], x.stride(0)), torch.nan, dtype=x.dtype, device=device)
    apart[:, : x.shape[1]] = x.to(device)
    return apart[:, : x.shape[1]]


def random_mixture(seed: int, dtype: torch.dtype) -> MixtureCase:
    chance = random.Random(seed)
    experts = chance.choice((1, 3, 8, 20))
    return MixtureCase.made(
        seed,
        dtype,
        rows=chance.choice((1, 2, 5, 40, 70)),
        experts=experts,
        taken=chance.randint(1, min(4, experts)),
        hidden=chance.choice((16, 40, 72)),
        inner=chance.choice((8, 24, 80, 600)),
        has_biases=chance.random() < 0.4,
        clamps=chance.random() < 0.4,
        weighs_inputs=chance.random() < 0.3,
    )
