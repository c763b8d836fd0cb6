"""Random weights in place of those of files, made on the device where they lie.

A number depends on the name of its tensor and on its place there, and on nothing else: all workers have the same model,
at every start, and ranks have parts of the same tensors.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from alignedserve.engine.weights.tensors import Cut, Weights

STD = 0.02  # what most models are initialised with
_UNIFORM = STD * math.sqrt(3) / 2**31  # a random whole number of 32 bits times this has that deviation
# Numbers. On a CPU they stay in the cache of a core, and torch takes one thread: several would meet after each step.
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 24}
# Multipliers and shifts of a hash in which each bit of the place changes half of the bits of the number.
_FACTORS, _SHIFTS = (0x7FEB352D, 0x5C2AB397), (15, 16)


class DummyWeights(Weights):
    """Every tensor that is asked for: ones for vectors, zeros for biases, random numbers for all else."""

    def __contains__(self, name: str) -> bool:
        return True

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        if name.endswith("bias"):
            out.zero_()
        elif out.dim() < 2:
            out.fill_(1)
        else:
            _fill(out, name, cut)


def _fill(out: Tensor, name: str, cut: Cut | None) -> None:
    """Fill a part of a tensor with its numbers, some rows at a time."""
    device, shape = out.device, out.shape[1:]
    first = cut.start if cut is not None and cut.dim == 0 else 0
    places = torch.arange(math.prod(shape), dtype=torch.int32, device=device).view(shape)
    of_row = places.numel()
    if cut is not None and cut.dim == 1:  # a row of the whole tensor has more columns
        inner = math.prod(shape[1:])
        places, of_row = places + cut.start * inner, cut.whole * inner
    seeds, at_once = _seeds(name), max(1, _AT_ONCE[device.type] // places.numel())
    for begin in range(0, len(out), at_once):
        rows = out[begin : begin + at_once]
        numbers = torch.arange(first + begin, first + begin + len(rows), dtype=torch.int32, device=device) * of_row
        numbers = numbers.view(-1, *[1] * len(shape)) + places
        for seed, factor, shift in zip(seeds, _FACTORS, _SHIFTS, strict=True):
            numbers.bitwise_xor_(seed).mul_(factor)
            numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << 32 - shift) - 1))  # torch shifts the sign in
        rows.copy_(numbers.float().mul_(_UNIFORM))


def _seeds(name: str) -> tuple[int, int]:
    """Return two whole numbers of 32 bits that depend on the name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:8], "little", signed=True)
