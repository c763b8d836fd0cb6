"""Rotary positions as config.json describes them; engine/models/rope.py computes the frequencies.

transformers knows more kinds. With `longrope` angles depend on a request's length, and K of tokens that are turned
already cannot be turned again: such a model takes no more tokens than turn by the angles of short requests, or is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import TypeAlias

from alignedserve.architectures.given import Given

THETA = 10_000.0
_LONG = "longrope"


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_positions: int
    attention_factor: float  # factor of cos and sin
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class Proportional:
    """Only a share of the head's axes turns, with the frequencies of all axes."""

    factor: float
    share: float


@dataclass(frozen=True)
class Factors:
    """Each pair of numbers turns slower by a factor of its own, as in GGUF files, and in short requests of longrope."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0  # factor of cos and sin


Scaling: TypeAlias = LinearScaling | Llama3 | Yarn | Proportional | Factors


@dataclass(frozen=True)
class Rope:
    theta: float
    dim: int  # the first numbers of a head's vector, which turn
    scaling: Scaling | None = None


def rope_section(given: Given) -> Given:
    """Return the section of rotary positions: transformers 4 wrote `rope_scaling`, 5 writes `rope_parameters`."""
    section = given.section("rope_scaling" if given.get("rope_scaling") else "rope_parameters")
    for key in section.sections():
        raise given.unsupported(f"rope_parameters of their own for {key}")
    return section


def positions_of_short(text: Given) -> list[int]:
    """Return up to which length the angles are those of short requests, where angles depend on the length.

    K is kept as it was turned, so no request may be longer.
    """
    key = "original_max_position_embeddings"
    rope = text.section("rope_scaling" if text.get("rope_scaling") else "rope_parameters")
    sections = (rope, *map(rope.section, rope.sections()))
    return [(text if text.get(key) else section).whole(key) for section in sections if _kind(text, section) == _LONG]


def _kind(given: Given, rope: Given) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    # In Phi-3's first files, what is now called longrope was su, or yarn.
    names = ("su", "yarn") if given.get("model_type") == "phi3" else ("su",)
    return _LONG if kind in names else kind


def read_rope(
    given: Given, rope: Given, theta: float, head_dim: int, share: float | None = None, is_short: bool = False
) -> Rope:
    """Read the rotary positions; `theta` and `share` (of a head's numbers that turn) hold where `rope` has none.

    Without `share` all must turn. `is_short`: no request is longer than `positions_of_short`."""
    found = _read_rope(given, rope, rope.number("rope_theta", theta), head_dim, share or 1.0, is_short)
    if share is None and (found.dim != head_dim or head_dim % 2):
        raise given.unsupported(f"rotation of {found.dim} of a head's {head_dim} numbers (partial_rotary_factor)")
    return found


def _read_rope(given: Given, rope: Given, theta: float, head_dim: int, share: float, is_short: bool) -> Rope:
    share = rope.number("partial_rotary_factor", share)
    dim = int(head_dim * share)
    kind = _kind(given, rope)
    # With `dynamic`, angles change only beyond max_position_embeddings, where no request goes.
    if kind in ("default", "dynamic"):
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, LinearScaling(rope.number("factor")))
    if kind == "llama3":
        return Rope(theta, dim, _llama3(given, rope))
    if kind == "yarn":
        return Rope(theta, dim, _yarn(given, rope))
    if kind == "proportional":
        return Rope(theta, head_dim, Proportional(rope.number("factor", 1.0), share))
    if kind == "factors":
        return Rope(theta, dim, Factors(_factors(rope, "factors", dim // 2)))
    if kind == _LONG and is_short:
        return Rope(theta, dim, Factors(_factors(rope, "short_factor", dim // 2), _factor_of_long(given, rope)))
    raise given.unsupported(f"rope_type {kind}")


def _factors(rope: Given, key: str, pairs: int) -> tuple[float, ...]:
    factors = rope.get(key)
    are_numbers = isinstance(factors, list) and all(type(each) in (int, float) and each > 0 for each in factors)
    if not are_numbers or len(factors) != pairs:
        raise rope.wrong(key, f"{pairs} numbers above 0", factors)
    return tuple(map(float, factors))


def _factor_of_long(given: Given, rope: Given) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    original = _original_positions(given, rope)
    factor = rope.number("factor", given.whole("max_position_embeddings") / original)
    return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0


def _original_positions(given: Given, rope: Given) -> int:
    if given.get("original_max_position_embeddings"):
        return given.whole("original_max_position_embeddings")
    return rope.whole("original_max_position_embeddings", given.whole("max_position_embeddings"))


def _llama3(given: Given, rope: Given) -> Llama3:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.wrong("high_freq_factor", f"at least low_freq_factor {low:g}", high)
    return Llama3(rope.number("factor"), low, high, _original_positions(given, rope))


def _yarn(given: Given, rope: Given) -> Yarn:
    original = _original_positions(given, rope)
    if rope.has("factor") and rope.get("factor") is None:
        factor = given.whole("max_position_embeddings") / original
    else:
        factor = rope.number("factor")
    return Yarn(
        factor=factor,
        original_positions=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: Given, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(times: float) -> float:
        return 0.1 * times * log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
