"""How a layer scores tokens: what attention needs beside queries, K and V."""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_ALL = 2**62  # more tokens than any request has


class CScoring(Structure):
    """The struct of csrc/scoring.h."""

    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("stretch", c_int64),
    )


@dataclass(frozen=True, eq=False)
class Scoring:
    """A score is the scaled product of query and K. It may be capped."""

    scale: float
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # a score becomes softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] in fp32: a score beside the tokens', which takes weight and adds nothing
    stretch: int | None = None  # tokens of a stretch; a request is cut into them, and a query sees no earlier one

    def __post_init__(self) -> None:
        if self.sinks is not None and (self.sinks.dtype is not torch.float32 or not self.sinks.is_contiguous()):
            raise TypeError(f"sinks are {self.sinks.dtype}: they must be float32, side by side")

    @property
    def is_usual(self) -> bool:
        """Return whether scores are scaled products, of all tokens or of a window."""
        return self.softcap is None and self.sinks is None and self.stretch is None

    def first_seen(self, position: int) -> int:
        """Return the first token that a query at this position sees."""
        begin = 0 if self.window is None else max(0, position - self.window + 1)
        return begin if self.stretch is None else max(begin, position - position % self.stretch)

    def check(self, heads: int) -> None:
        """Raise ValueError where sinks are not of `heads` heads."""
        if self.sinks is not None and self.sinks.shape != (heads,):
            raise ValueError(f"sinks {tuple(self.sinks.shape)} are not of {heads} heads")

    @cached_property
    def struct(self) -> CScoring:
        sinks = None if self.sinks is None else self.sinks.data_ptr()
        return CScoring(self.scale, self.softcap or 0.0, self.window or _ALL, sinks, self.stretch or _ALL)

    @cached_property
    def in_c(self) -> int:
        """Return the address of what C++ reads."""
        return addressof(self.struct)
