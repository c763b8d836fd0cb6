"""Rotary positions: frequencies as transformers computes them; cosines and sines are looked up once for each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignedserve.architectures.rope import Factors, LinearScaling, Llama3, Proportional, Rope, Yarn
from alignedserve.engine.device.devices import CPU
from alignedserve.kernels.common.placing import on_device

_FIRST_TABLE = 1024  # positions


class Rotation:
    """Cosines and sines of positions: a GPU computes those of a step, a CPU looks them up in tables.

    The tables grow with the positions used: a model may never use all its 128 Ki. Angles are in fp32 whatever the
    weights' dtype, and rounded where the reference rounds: those of late positions need this.
    """

    def __init__(self, rope: Rope, device: torch.device = CPU) -> None:
        self._device = device
        self._frequencies = frequencies(rope).to(device)
        self._scale = rope.scaling.attention_factor if isinstance(rope.scaling, Yarn | Factors) else 1.0
        self._cos = self._sin = torch.empty(0)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions, [tokens, rotated numbers / 2] each."""
        if self._device.type != "cpu":
            return self._computed(on_device(positions, self._device))
        try:
            return self._selected(positions)
        except IndexError:  # beyond the tables
            count = max(_FIRST_TABLE, 2 * len(self._cos), int(positions.max()) + 1)
            self._cos, self._sin = self._computed(torch.arange(count))
        return self._selected(positions)

    def _selected(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def part_neighbours(heads: Tensor, out: Tensor) -> Tensor:
    """Write heads whose neighbouring numbers turn together to `out`, where these lie half a vector apart; return it."""
    out.unflatten(-1, (2, -1)).copy_(heads.unflatten(-1, (-1, 2)).transpose(-1, -2))
    return out


def frequencies(rope: Rope) -> Tensor:
    """Return the angle by which each pair of numbers rotates from one position to the next."""
    scaling = rope.scaling
    if isinstance(scaling, Proportional):
        return _proportional(rope, scaling)
    periods = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    plain = 1.0 / periods
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, Factors):
        return 1.0 / (torch.tensor(scaling.factors) * periods)
    if isinstance(scaling, Llama3):
        return _llama3(plain, scaling)
    if isinstance(scaling, Yarn):
        return _yarn(rope, scaling)
    return plain


def _proportional(rope: Rope, scaling: Proportional) -> Tensor:
    turning = int(scaling.share * rope.dim // 2)
    turned = 1.0 / rope.theta ** (torch.arange(0, 2 * turning, 2).float() / rope.dim)
    return torch.cat((turned, torch.zeros(rope.dim // 2 - turning))) / scaling.factor


def _llama3(plain: Tensor, scaling: Llama3) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and interpolate those between the two bounds.

    The bounds may be one: then nothing lies between.
    """
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * slowed / scaling.factor + share * slowed
    is_between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(is_between, between, slowed)


def _yarn(rope: Rope, scaling: Yarn) -> Tensor:
    """Scale as Llama 3 does, but with a linear ramp over the pairs between the two bounds."""
    low, high = _dim_of_turns(rope, scaling, scaling.beta_fast), _dim_of_turns(rope, scaling, scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    periods = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    ramp = (torch.arange(rope.dim // 2).float() - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (scaling.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _dim_of_turns(rope: Rope, scaling: Yarn, turns: float) -> float:
    """Return the pair that makes `turns` turns within the positions of the original training."""
    return rope.dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
