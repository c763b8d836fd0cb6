"""The cost model: how long a step will take, by plain arithmetic that every core can afford.

    T_exec = δ + α0·ΣLn + α1·Σ Ln·La + γ0·B + γ1·ΣC + γ2·B·(max C − ΣC/B) + ρ·remade      (BROS §4.1)

Ln is the number of tokens of a chunk, La = cached + Ln/2 the number that each of them attends to on average, C the
prefixes of the B decodes. γ2 is the bubble (AlignedServe §2.2): what a batch pays for members of unequal length. Three
things are ours; docs/measured.md has the measurements behind them:

- α0 has a value for each power of two of tokens: a step reads the weights once however few tokens it has, so its first
  tokens cost next to nothing and the later ones their arithmetic.
- Each chunk costs a constant (κ0), and something for each token before it (κ1), as a decode does.
- ΣLn counts the decodes too: the linear layers treat them like prompt tokens.

A step's time depends only on sums and one maximum (`Shape`), so trying one more candidate is O(1): `StepEstimate`.
fit.py finds the coefficients, profile.py keeps them.
"""

# ruff: noqa: RUF002, RUF003  (formulas are in the papers' letters)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import frexp
from operator import mul, sub
from typing import NamedTuple

from alignedserve.core import CopyCost, StepPlan


class Kind(str, Enum):
    """Each kind of step has its own coefficients: attention in a mixed step costs more than its two parts."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Shape(NamedTuple):
    """The numbers that a step's time depends on. All are whole numbers, so the order of adding does not matter."""

    chunks: int = 0
    chunk_tokens: int = 0
    cached: int = 0  # tokens that have KV before the chunks
    work: int = 0  # 2 · Σ Ln·La of the chunks
    decodes: int = 0
    prefixes: int = 0  # ΣC
    longest: int = 0  # max C
    remade: int = 0  # tokens before the step's own whose K and V it computes again, since they are kept in another form

    @classmethod
    def build(cls, chunks: Iterable[tuple[int, int]] = (), prefixes: Sequence[int] = (), remade: int = 0) -> Shape:
        """Return the shape of a step with these chunks, as (length, cached), and decodes with these prefixes."""
        sizes = list(chunks)
        if not sizes:  # as in most steps
            return cls(0, 0, 0, 0, len(prefixes), sum(prefixes), max(prefixes, default=0), remade)
        return cls(
            chunks=len(sizes),
            chunk_tokens=sum(length for length, _ in sizes),
            cached=sum(cached for _, cached in sizes),
            work=sum(length * (2 * cached + length) for length, cached in sizes),
            decodes=len(prefixes),
            prefixes=sum(prefixes),
            longest=max(prefixes, default=0),
            remade=remade,
        )

    @property
    def kind(self) -> Kind:
        if not self.decodes:
            return Kind.PREFILL
        return Kind.MIXED if self.chunks else Kind.DECODE

    @property
    def tokens(self) -> int:
        return self.chunk_tokens + self.decodes


EMPTY = Shape()


def shape_of(plan: StepPlan) -> Shape:
    sizes = [(chunk.num_computed, chunk.num_before) for chunk in plan.chunks]
    remade = sum([part.start for part in plan.parts if part.kv.form])
    return Shape.build(sizes, [decode.num_before for decode in plan.decodes], remade)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of one kind of step, in seconds; none is negative."""

    fixed: float = 0.0  # δ
    token: tuple[float, ...] = (0.0,)  # α0 of tokens 0..2, 2..4, 4..8, ...; the last holds for all beyond
    work: float = 0.0  # α1
    chunk: float = 0.0  # κ0
    cached: float = 0.0  # κ1
    decode: float = 0.0  # γ0
    prefix: float = 0.0  # γ1
    bubble: float = 0.0  # γ2
    remade: float = 0.0  # ρ

    def scaled(self, reading: float, computing: float) -> Coefficients:
        """Return the coefficients with the time of reading memory and of computing multiplied by these factors.

        Steps read the weights, and the K and V of each prefix; what else they take grows with their tokens. The first
        two tokens go with the weights: nearly all steps have them, so a fit does not tell both apart.
        """
        first, *rest = self.token
        return Coefficients(
            fixed=reading * self.fixed,
            token=(reading * first, *(computing * value for value in rest)) if rest else (computing * first,),
            work=computing * self.work,
            chunk=computing * self.chunk,
            cached=reading * self.cached,
            decode=computing * self.decode,
            prefix=reading * self.prefix,
            bubble=reading * self.bubble,
            remade=computing * self.remade,
        )


_TAIL_OF_P90 = 2.90  # the 99.99 % quantile / the 90 % quantile of normally distributed errors


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The error of predictions for one kind of step: |measured / predicted - 1|."""

    median: float = 0.0
    p90: float = 0.0
    tails: Mapping[int, float] = field(default_factory=dict)  # of one step in ten thousand, by how long steps are

    def beyond(self, seconds: float) -> float:
        """Return the share of the prediction by which about one step in ten thousand of this length takes longer.

        Where only steps of another length are known, delays are taken to grow with the root of the time, as the sum of
        many small ones does.
        """
        if not self.tails:
            return _TAIL_OF_P90 * self.p90
        wanted = length_of(seconds)
        nearest = min(self.tails, key=lambda known: abs(known - wanted))
        return self.tails[nearest] * 2 ** ((nearest - wanted) / 2)


def length_of(seconds: float) -> int:
    """Return a number that steps share whose times are within a factor of two."""
    return frexp(seconds)[1]


# The form that prediction reads: seconds = base[i] + slope[i]·tokens + ..., where i is the bit length of the tokens.
_Table = tuple[tuple[float, ...], tuple[float, ...], float, float, float, float, float, float, float]
_BITS = 32  # no step has more than 2^31 tokens
_ENDS = tuple(1 << piece for piece in range(1, _BITS))


def _table(coefficients: Coefficients) -> _Table:
    of, token = coefficients, coefficients.token
    bends = map(mul, map(sub, token, token[1:]), _ENDS)  # so that neighbouring pieces meet
    base, slope = [of.fixed, *accumulate(bends, initial=of.fixed)], [token[0], *token]
    beyond = _BITS - len(base)
    rest = (of.chunk, of.cached, of.decode, of.prefix, of.bubble, of.remade)
    return ((*base, *base[-1:] * beyond), (*slope, *slope[-1:] * beyond), of.work / 2, *rest)


_FAR = 1 << 16  # tokens of a prefix


@dataclass(frozen=True)
class CostModel:
    """A snapshot of what is known: it does not change while a step is packed."""

    coefficients: Mapping[Kind, Coefficients]
    uncertainty: Mapping[Kind, Uncertainty] = field(default_factory=lambda: dict.fromkeys(Kind, Uncertainty()))
    tables: tuple[_Table, _Table, _Table] = field(init=False, repr=False, compare=False)  # prefill, decode, mixed

    def __post_init__(self) -> None:
        prefill, decode, mixed = (_table(self.coefficients[kind]) for kind in Kind)
        object.__setattr__(self, "tables", (prefill, decode, mixed))

    def seconds(self, shape: Shape) -> float:
        return _seconds(self.tables, *shape)

    def reading_s(self, shape: Shape) -> float:
        """Return how much of a step's time is reading memory: weights and KV."""
        return _seconds(self._reading, *shape)

    @cached_property
    def _reading(self) -> tuple[_Table, _Table, _Table]:
        prefill, decode, mixed = (_table(self.coefficients[kind].scaled(1.0, 0.0)) for kind in Kind)
        return prefill, decode, mixed

    @cached_property
    def one_decode(self) -> tuple[float, float]:
        """Return the time of a step with a single decode without a prefix, and the time for each prefix token."""
        least_s = self.seconds(Shape.build(prefixes=[0]))
        return least_s, (self.seconds(Shape.build(prefixes=[_FAR])) - least_s) / _FAR

    @cached_property
    def remade_token_s(self) -> float:
        """Return the time to compute K and V of a token again, beside decodes."""
        return self.coefficients[Kind.DECODE].remade

    def pivot(self, most: int) -> int:
        """Return S_pf, the number of prompt tokens that saturates the hardware.

        It is the least power of two whose throughput is nine tenths of the best throughput up to `most` tokens.
        """
        sizes = [1 << bits for bits in range(most.bit_length())]
        token_s = [self.seconds(Shape.build([(size, 0)])) / size for size in sizes]
        if not any(token_s):
            return most  # the model knows no times
        return next(size for size, seconds in zip(sizes, token_s, strict=True) if 0.9 * seconds <= min(token_s))

    def plan_seconds(self, plan: StepPlan) -> float:
        return self.seconds(shape_of(plan))

    def charges(self, plan: StepPlan) -> tuple[list[float], float]:
        """Return what each part of a step is charged with, and the sum, both in predicted seconds.

        A part is charged with its tokens, its attention and an equal share of what the step takes in any case. For
        example, of a step of 10 ms, 4 of them in any case, a chunk that alone takes 5 ms more and two decodes that take
        0.5 ms more each: 6.33, 1.83 and 1.83 ms.
        """
        chunks, decodes = plan.chunks, plan.decodes
        table = self.tables[(2 if chunks else 1) if decodes else 0]
        base, slope, per_work, per_chunk, per_cached, per_decode, per_prefix, *_ = table
        num = tokens = len(decodes)
        if chunks:  # seldom
            num, tokens = num + len(chunks), num + sum([chunk.num_computed for chunk in chunks])
        piece = tokens.bit_length()
        any_s = base[0] / num
        token_s = (base[piece] - base[0]) / tokens + slope[piece]
        decode_s = any_s + token_s + per_decode
        charges = [decode_s + per_prefix * (decode.start - decode.kv.dropped) for decode in decodes]  # num_before
        if chunks:
            of_chunks = [
                any_s + per_chunk + per_cached * before + length * (token_s + per_work * (2 * before + length))
                for length, before in [(chunk.num_computed, chunk.num_before) for chunk in chunks]
            ]
            charges = of_chunks + charges
        in_all = sum(charges)
        return (charges, in_all) if in_all > 0 else ([1.0] * num, num)

    def prompt_token_s(self, chunk: int) -> float:
        """Return the time of a prompt token in chunks of this size."""
        return self.seconds(Shape.build([(chunk, 0)])) / chunk

    def computing_s(self, start: int, end: int, tokens: int, beside: int) -> float:
        """Return by how much a step is longer that runs a prompt's tokens up to `tokens` from `start` on, and not only
        from `end` on. The step has `beside` other prompt tokens."""
        others = (beside, 0)
        whole = self.seconds(Shape.build([others, (tokens - start, start)]))
        return whole - self.seconds(Shape.build([others, (tokens - end, end)]))


class StepEstimate:
    """The time of a step that is being put together, and its time with one more member. Each is O(1).

    The numbers are those of a `Shape`; nothing is allocated on the way.
    """

    __slots__ = ("_tables", *Shape._fields)

    def __init__(self, model: CostModel, start: Shape = EMPTY) -> None:
        self._tables = model.tables
        self.chunks, self.chunk_tokens, self.cached, self.work = start[:4]
        self.decodes, self.prefixes, self.longest, self.remade = start[4:]

    @property
    def shape(self) -> Shape:
        return Shape(
            self.chunks, self.chunk_tokens, self.cached, self.work,
            self.decodes, self.prefixes, self.longest, self.remade,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        return _seconds(
            self._tables,
            self.chunks, self.chunk_tokens, self.cached, self.work,
            self.decodes, self.prefixes, self.longest, self.remade,
        )  # fmt: skip

    def add_chunk(self, length: int, cached: int) -> None:
        self.chunks += 1
        self.chunk_tokens += length
        self.cached += cached
        self.work += length * (2 * cached + length)

    def add_decode(self, prefix: int) -> None:
        self.decodes += 1
        self.prefixes += prefix
        if prefix > self.longest:
            self.longest = prefix

    def add_remade(self, tokens: int) -> None:
        self.remade += tokens

    def with_chunk(self, length: int, cached: int, remade: int = 0) -> float:
        """Return the seconds with one more, without adding it."""
        return _seconds(
            self._tables,
            self.chunks + 1, self.chunk_tokens + length, self.cached + cached,
            self.work + length * (2 * cached + length),
            self.decodes, self.prefixes, self.longest, self.remade + remade,
        )  # fmt: skip

    def with_decode(self, prefix: int, remade: int = 0) -> float:
        """Return the seconds with one more, without adding it."""
        return _seconds(
            self._tables,
            self.chunks, self.chunk_tokens, self.cached, self.work,
            self.decodes + 1, self.prefixes + prefix, prefix if prefix > self.longest else self.longest,
            self.remade + remade,
        )  # fmt: skip

    def with_remade(self, tokens: int) -> float:
        """Return the seconds if K and V of more tokens were computed again, without adding them."""
        return _seconds(
            self._tables,
            self.chunks, self.chunk_tokens, self.cached, self.work,
            self.decodes, self.prefixes, self.longest, self.remade + tokens,
        )  # fmt: skip


def _seconds(
    tables: tuple[_Table, _Table, _Table],
    chunks: int,
    chunk_tokens: int,
    cached: int,
    work: int,
    decodes: int,
    prefixes: int,
    longest: int,
    remade: int,
) -> float:
    tokens = chunk_tokens + decodes
    if not tokens:
        return 0.0
    base, slope, per_work, per_chunk, per_cached, per_decode, per_prefix, bubble, per_remade = tables[
        (2 if chunks else 1) if decodes else 0
    ]
    piece = tokens.bit_length()
    return (
        base[piece] + slope[piece] * tokens
        + per_work * work + per_chunk * chunks + per_cached * cached
        + per_decode * decodes + per_prefix * prefixes + bubble * (decodes * longest - prefixes)
        + per_remade * remade
    )  # fmt: skip


# --- Copies


class Route(str, Enum):
    """A route that KV travels."""

    ARENA_TO_DEVICE = "arena_to_device"
    DEVICE_TO_ARENA = "device_to_arena"
    DEVICE_TO_DEVICE = "device_to_device"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Link:
    """Copies over a route take their bytes over its bandwidth."""

    bandwidth: float  # bytes per second
    latency_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bandwidth if num_bytes else 0.0

    def copying(self, kv_bytes: int) -> CopyCost:
        """Return the time to copy KV, with `kv_bytes` for a token."""
        return CopyCost(kv_bytes / self.bandwidth, self.latency_s)
