"""Describe the layers of a decoder for kernels that run all of them at once; norms come before attention and MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_int32
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

from torch import Tensor

from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans

Angles: TypeAlias = tuple[Tensor, Tensor]  # cosines and sines of rows, [rows, rotated numbers / 2]


@dataclass(frozen=True)
class Norm:
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool  # LayerNorm; else RMSNorm, whose weight may be in fp32 where other numbers are not


class Inner(IntEnum):
    """What becomes of the outputs of a dense MLP's first layer; the numbers are those of csrc/kernels.h."""

    RELU = 0
    SILU = 1  # silu(gate) * up, which lie side by side
    GELU = 2  # the same with gelu, approximated by tanh


@dataclass(frozen=True)
class Heads:
    """The heads in the outputs of a layer: queries, then those of K, then those of V."""

    queries: int
    kv: int
    head_dim: int
    query_norm: Tensor | None = None  # RMSNorm of each head; both or none
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """A layer without its MLP."""

    attention_norm: Norm
    qkv: Linear
    query_norm: Tensor | None  # RMSNorm of each head (or of all, where no kernel runs it), with attention_norm's eps
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Norm
    heads: int
    kv_heads: int
    head_dim: int
    turned: int  # how many of a head's first numbers are rotated
    angles: int = 0  # by which of the step's angles
    after_attention: Norm | None = None  # of what attention adds
    scoring: Scoring

    @property
    def split(self) -> Heads:
        norms = self.query_norm, self.k_norm
        return Heads(self.heads, self.kv_heads, self.head_dim, *norms, self.attention_norm.eps)


@dataclass(frozen=True, kw_only=True)
class DecoderLayer(AttentionLayer):
    """A layer with a dense MLP, which a kernel can run whole."""

    up: Linear  # gate and up where it is gated
    down: Linear
    inner: Inner
    after_mlp: Norm | None = None  # of what the MLP adds


class Mlp(Protocol):
    """An MLP that runs by itself, such as a mixture of experts."""

    @property
    def adds_at_once(self) -> bool:
        """Return whether `add_to` takes no more launches than `share`."""

    def share(self, x: Tensor) -> Tensor:
        """Return what this rank makes of rows [rows, hidden]; the shares of all ranks are to be summed."""

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """Add the outputs of rows, summed over ranks, to the residual, in place."""


@dataclass(frozen=True, kw_only=True)
class MlpLayer(AttentionLayer):
    """A layer whose MLP runs by itself."""

    mlp: Mlp
    after_mlp: Norm | None = None  # of what the MLP adds


Layer: TypeAlias = DecoderLayer | MlpLayer


@dataclass(frozen=True)
class Paged:
    """The places of K and V of a step's tokens, and the step's adapters."""

    cache: Tensor  # [layers, 2 * blocks, block_size, kv_dim]
    spans: Spans
    adapters: StepAdapters | None = None


class Pauses:
    """Lets a step pause between two layers: what `work` does then may be another step."""

    def __init__(self) -> None:
        self._asked = c_int32()
        self.address = addressof(self._asked)  # where C++ looks
        self.work: Callable[[], None] = lambda: None

    def ask(self) -> None:
        """Have the step that runs pause after its present layer. Any thread may ask."""
        self._asked.value = 1

    def take(self) -> None:
        """Do what the pause is for; the step goes on behind it."""
        self._asked.value = 0
        self.work()


class Sums(Protocol):
    """Sums parts over ranks and adds them to a residual x; all are [rows, hidden], side by side. Parts may be
    overwritten."""

    def sum_add_norm(self, part: Tensor, x: Tensor, norm: Norm, after: Norm | None) -> Tensor:
        """Add to x, in place, the sum of all ranks' parts or the norm `after` of it, and return the norm of x."""

    def sum_add(self, part: Tensor, x: Tensor, after: Norm | None) -> None:
        """Do the same where no norm follows."""


class Decoder(Protocol):
    @property
    def pauses(self) -> Pauses | None:
        """Return the pauses of its steps; None where they run without a pause."""

    def takes(self, rows: int) -> bool:
        """Return whether `rows` tokens run as fast this way as layer by layer."""

    def rehearsals(self, cache: Tensor) -> Sequence[Callable[[], None]]:
        """Return what measures on a GPU, before the first step, which ways are fastest: some write to the cache of a
        layer, which no request uses yet."""

    def run(self, x: Tensor, angles: Sequence[Angles], paged: Paged, rows: Tensor | None = None) -> None:
        """Run x [rows, hidden] through all layers, in place; `angles`: those of its rows, where heads rotate.

        With `rows` the output of other rows is undefined: the last layer need only keep their K and V.
        """
