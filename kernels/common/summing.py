"""What stands between two products of a decoder: the sum over ranks, the residual, and the norm.

    out, down ──▶ part of a rank ──▶ sum over ranks ──▶ norm of it, in some families ──▶ + residual ──▶ norm ──▶ qkv, up

`Residual` holds a part back until the norm behind it is known, so that one call does all of this: `sum_add_norm`.
"""

from __future__ import annotations

from torch import Tensor

from alignedserve.kernels.common.decoder import Norm, Sums
from alignedserve.kernels.common.linear import Total
from alignedserve.kernels.common.reference import Reference


class SumThenNorm:
    """Sums by `total`, where there are other ranks, and then adds and norms by one kernel."""

    def __init__(self, kernels: Reference, total: Total | None = None) -> None:
        self._kernels, self._total = kernels, total

    def sum_add_norm(self, part: Tensor, x: Tensor, norm: Norm, after: Norm | None) -> Tensor:
        if self._total is not None:
            self._total(part)
        return self._kernels.add_and_norm(x, part, norm, after)

    def sum_add(self, part: Tensor, x: Tensor, after: Norm | None) -> None:
        if self._total is not None:
            self._total(part)
        x += part if after is None else self._kernels.normed(part, after)


class Residual:
    """The residual x of a step, and the last part if it is not added yet."""

    def __init__(self, x: Tensor, kernels: Reference, sums: Sums) -> None:
        self.x, self._kernels, self._sums = x, kernels, sums
        self._part: tuple[Tensor, Norm | None] | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether x has all that was added."""
        return self._part is None

    def add(self, part: Tensor, after: Norm | None) -> None:
        """Add a part, or the norm of it, to x: once the next norm is known."""
        assert self.is_whole, "each part is added before the next product"
        self._part = part, after

    def normed(self, norm: Norm) -> Tensor:
        """Return the norm of x with all that was added."""
        if self._part is None:
            return self._kernels.normed(self.x, norm)
        (part, after), self._part = self._part, None
        return self._sums.sum_add_norm(part, self.x, norm, after)

    def finish(self) -> None:
        """Add what is left to x."""
        if self._part is not None:
            (part, after), self._part = self._part, None
            self._sums.sum_add(part, self.x, after)
