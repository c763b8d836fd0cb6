"""The time of a step on a GPU, interpolated from grids: the simulator's truth, not the cores' belief.

The grids were measured, or come from roofline.py for GPUs that were not.

The time of a step is that of its linear layers, by tokens; of its attention, in every layer; of the work for each
request that samples; and with tensor parallelism of the all-reduce, twice a layer.

Attention of prompts alone and of decodes alone is measured; where both share a step, attention takes the sum times a
measured factor, 0.4 to 5. Decodes of unequal prefixes take between the time at the mean prefix and at the longest: the
mean's plus α times the difference, with α measured by the number of requests and of long requests.

Weak spots. The grids have one prompt chunk in a step: several chunks count as the sum, and beside decodes as one chunk
of all tokens. α was measured with long prefixes four times as long as the short prefixes, and on one device. The grids
are of one rank, and no rank waits for a slower one. Logits that ranks gather and the host's work are left out. On the
A100 prompts and decodes were measured apart, so a step with both takes the sum;
the output layer, about 0.15 ms, is left out.
"""

# ruff: noqa: RUF002  (formulas are in the papers' letters)

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import isfinite, log2
from pathlib import Path
from typing import Any

from alignedserve.core import StepPlan
from alignedserve.cost.sums import added
from alignedserve.errors import ProfileError

FOLDER = Path(__file__).parent / "profiles"
FORMAT = 1
_MICRO, _MILLI, _KILO = 1e-6, 1e-3, 1e3
_FACTORS = ("mixed", "skew_decode", "skew_mixed")
NAMES = ("linear", "per_sequence", "prefill", "decode", *_FACTORS)  # of grids
_FACTORS_FROM = "rtxpro6000-llama-3.1-8b-tp1"

Cell = tuple[int, int, float]  # two places on an axis, and where between them: 0 at the first, 1 at the second


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> GpuTruth:
    if name not in names():
        raise ProfileError(f"there is no GPU profile {name!r:.60}: there are {', '.join(names())}")
    return GpuTruth(_tree(name))


def _tree(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return tree


@cache
def factors() -> dict[str, Any]:
    """Return how mixed steps and unequal prefixes slow attention down on the GPU on which all of that was measured."""
    tree = _tree(_FACTORS_FROM)
    return {name: tree[name] for name in _FACTORS}


class GpuTruth:
    """The grids of a GPU and a model; a profile that lacks the factors of attention has those of `factors`."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        if tree.get("format") != FORMAT:
            raise ProfileError(f"a GPU profile of format {FORMAT} is needed, as those in lab/devices/profiles are")
        tree = tree if all(name in tree for name in _FACTORS) else {**factors(), **tree}
        self.about: Mapping[str, Any] = tree["about"]
        self._layers: int = tree["about"]["layers"]
        self._linear, self._per_sequence = _grid(tree, "linear", 1), _grid(tree, "per_sequence", 1)
        self._prefill, self._decode = _grid(tree, "prefill", 2), _grid(tree, "decode", 2)
        self._mixed = _grid(tree, "mixed", 4)
        self._all_reduce_us = _all_reduce_us(tree)
        self._hidden_token_s: float = _MICRO * tree.get("hidden_token_us", 0.0)
        self._known_us: dict[tuple[int, int], float] = {}
        self._skew = {False: _grid(tree, "skew_decode", 2), True: _grid(tree, "skew_mixed", 2)}

    def seconds(self, plan: StepPlan) -> float:
        prefixes = [decode.start - decode.kv.dropped for decode in plan.decodes]
        hidden_s = self._hidden_token_s and self._hidden_token_s * sum(
            part.start for part in plan.parts if part.kv.form
        )
        if not plan.chunks:  # most steps
            return self.seconds_of((), prefixes) + hidden_s
        chunks = [(len(chunk.tokens), chunk.start - chunk.kv.dropped) for chunk in plan.chunks]
        sampled = sum(chunk.sampling is not None for chunk in plan.chunks) + len(prefixes)
        return self.seconds_of(chunks, prefixes, sampled) + hidden_s

    def seconds_of(
        self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int], sampled: int | None = None
    ) -> float:
        """Return the time of a step of chunks (length, cached) and decodes; without `sampled`, all requests sample."""
        tokens = sum(length for length, _ in chunks) + len(prefixes)
        if not tokens:
            return 0.0
        sampling = len(chunks) + len(prefixes) if sampled is None else sampled
        return _MICRO * (self._once_us(tokens, sampling) + self._layers * self.attention_us(chunks, prefixes))

    def _once_us(self, tokens: int, sampling: int) -> float:
        """Return the time of all but attention; it is kept, because many steps have the same pair of numbers."""
        if (known := self._known_us.get((tokens, sampling))) is None:
            known = self._linear.line(tokens) + (self._per_sequence.line(sampling) if sampling else 0.0)
            latency_us, token_us = self._all_reduce_us
            known += 2 * self._layers * (latency_us + token_us * tokens)  # after attention, and after the MLP
            self._known_us[tokens, sampling] = known
        return known

    def hidden_token_s(self) -> float:
        """Return 0 where hidden vectors are larger than K and V, as with grouped queries."""
        return self._hidden_token_s

    def attention_us(self, chunks: Sequence[tuple[int, int]], prefixes: Sequence[int]) -> float:
        """Return the time of attention in one layer."""
        if not prefixes:
            return self._prefill_us(chunks)
        requests, shortest, longest = len(prefixes), min(prefixes), max(prefixes)
        mean_prefix = sum(prefixes) / requests
        mean = self._shared_us(chunks, requests, mean_prefix)
        if longest == shortest:
            return mean
        worst = self._shared_us(chunks, requests, longest)
        # The share of longest prefixes, if each prefix were either the shortest or the longest and the mean the same.
        alpha = self._skew[bool(chunks)].near(requests, (mean_prefix - shortest) / (longest - shortest))
        return mean + _MILLI * alpha * max(0.0, worst - mean)

    def _prefill_us(self, chunks: Sequence[tuple[int, int]]) -> float:
        return added(self._prefill.line(length, cached) for length, cached in chunks)

    def _shared_us(self, chunks: Sequence[tuple[int, int]], requests: int, prefix: float) -> float:
        """Return the time of attention for decodes that all have this prefix, beside these chunks."""
        alone = self._decode.line(requests, prefix)
        if not chunks:
            return alone
        length = sum(length for length, _ in chunks)
        cached = sum(length * cached for length, cached in chunks) / length
        return (self._prefill_us(chunks) + alone) * _MILLI * self._mixed.near(length, cached, requests, prefix)


def _all_reduce_us(tree: Mapping[str, Any]) -> tuple[float, float]:
    """Return the latency of a sum over tensor-parallel ranks, and its time for each token.

    Without a profile's own, steps of several ranks would be too fast."""
    about, known = tree["about"], tree.get("all_reduce")
    ranks = about["tensor_parallel"]
    if ranks == 1:
        return 0.0, 0.0
    if known is not None:
        return known["latency_us"], known["token_bytes"] / (_KILO * known["gb_s"])
    raise ProfileError(
        f"the profile of {about['model']} on {ranks} x {about['gpu']} has no all_reduce, so its steps would be too"
        " fast: add it as the profiles in lab/devices/profiles have it"
    )


class Grid:
    """Values that were measured at all combinations of some sizes, and are interpolated in between."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        axes: list[list[float]] = tree["axes"]
        if not _fits(axes, tree["values"]):
            raise ValueError("a grid needs two ascending sizes or more on each axis, and a time for each combination")
        self._first, self._others = axes[0], axes[1:]
        self._values: list[Any] = tree["values"]  # nested lists, a level for each axis
        # First axes count tokens or requests: few numbers, which return at nearly every step, so the cells are kept.
        self._line_cells: dict[float, Cell] = {}
        self._near_cells: dict[float, Cell] = {}

    def line(self, size: float, *sizes: float) -> float:
        """Return a time: linear between measured sizes, and beyond the ends with the slope of the last sizes."""
        if (first := self._line_cells.get(size)) is None:
            first = self._line_cells[size] = _cell(self._first, size)
        if len(sizes) == 1:  # decodes alone, which is asked twice in every step
            return max(0.0, _blend_two(self._values, first, _cell(self._others[0], sizes[0])))
        return max(0.0, _blend(self._values, first, list(map(_cell, self._others, sizes))))

    def near(self, size: float, *sizes: float) -> float:
        """Return a factor: linear in the logarithms of sizes, and beyond the ends as at the ends."""
        if (first := self._near_cells.get(size)) is None:
            first = self._near_cells[size] = _log_cell(self._first, size)
        if len(sizes) == 1:
            return _blend_two(self._values, first, _log_cell(self._others[0], sizes[0]))
        return _blend(self._values, first, list(map(_log_cell, self._others, sizes)))


def _grid(tree: Mapping[str, Any], name: str, num_axes: int) -> Grid:
    if len(tree[name]["axes"]) != num_axes:
        raise ValueError(f"{name} needs {num_axes} axes")
    return Grid(tree[name])


def _fits(axes: Sequence[Sequence[float]], values: Any) -> bool:
    """Return whether there is a value, not negative, for each combination of sizes."""
    if not axes:
        return isfinite(values) and values >= 0
    ascends = len(axes[0]) > 1 and all(low < high for low, high in pairwise(axes[0]))
    return ascends and len(values) == len(axes[0]) and all(_fits(axes[1:], row) for row in values)


def _cell(axis: Sequence[float], size: float) -> Cell:
    last = len(axis) - 1
    high = bisect_right(axis, size, 1, last)
    # Beyond the end the two places are far apart, so that noise does not set the slope.
    low = high - 1 if size <= axis[last] else bisect_right(axis, axis[last] / 2) - 1
    return low, high, (size - axis[low]) / (axis[high] - axis[low])


def _log_cell(axis: Sequence[float], size: float) -> Cell:
    """Return the cell of a size on a logarithmic axis; a first size of 0 lies one doubling below the second."""
    first = axis[0] or axis[1] / 2
    size = min(max(size, first), axis[-1])
    high = bisect_right(axis, size, 1, len(axis) - 1)
    low = axis[high - 1] or first
    return high - 1, high, log2(size / low) / log2(axis[high] / low)


def _blend_two(values: Any, first: Cell, second: Cell) -> float:
    """Return the same as `_blend` for two axes, equal to the last bit, but faster."""
    low, high, share = first
    near, far, share_far = second
    row = values[low]
    start = row[near] + share_far * (row[far] - row[near]) if share_far else row[near]
    if not share:
        return float(start)
    row = values[high]
    end = row[near] + share_far * (row[far] - row[near]) if share_far else row[near]
    return float(start + share * (end - start))


def _blend(values: Any, first: Cell, others: Sequence[Cell]) -> float:
    """Return the interpolated value, blended along the last axis first."""
    low, high, share = first
    if others:
        start = _blend(values[low], others[0], others[1:])
        return start + share * (_blend(values[high], others[0], others[1:]) - start) if share else start
    start = values[low]
    return float(start + share * (values[high] - start)) if share else float(start)
