"""The steps that a profile measures: sizes that grow exponentially, then random sizes.

Real engines are measured so (engine/profiling.py), and simulated engines too, whose workers should know as much when
they start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, cycle, zip_longest

from alignedserve.core import Chunk, Decode, KvForm, Sampling, WorkerLimits, units_for
from alignedserve.cost.model import Kind, Shape

NOBODY = "trial "  # begins the names of requests that nobody sent; no client can give such a name
_SEED, _TRIALS_PER_KIND = 0, 60
_GREEDY = Sampling()
_DRAWS = 50  # random trials that are drawn for each that is wanted


@dataclass(frozen=True)
class Trial:
    """A step to measure."""

    chunks: tuple[tuple[int, int], ...] = ()  # (length, cached)
    prefixes: tuple[int, ...] = ()

    @cached_property  # a start draws thousands of trials, and asks for the shapes of each several times
    def shape(self) -> Shape:
        return Shape.build(self.chunks, self.prefixes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens of each request after the step."""
        return (*(length + cached for length, cached in self.chunks), *(prefix + 1 for prefix in self.prefixes))

    def num_blocks(self, block_size: int) -> list[int]:
        """Return how many blocks each request needs."""
        return [units_for(end, block_size) for end in self.ends]

    def parts(
        self, blocks: Sequence[int], block_size: int, draw: Callable[[], int] = lambda: 0
    ) -> tuple[tuple[Chunk, ...], tuple[Decode, ...]]:
        """Return the step's chunks and decodes on these blocks, for requests of nobody; `draw` returns a token."""
        counts = self.num_blocks(block_size)
        ends = [*accumulate(counts)]
        shares = iter([tuple(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)])
        chunks = tuple(
            Chunk(f"{NOBODY}c{number}", tuple(draw() for _ in range(length)), cached, KvForm(next(shares)), _GREEDY)
            for number, (length, cached) in enumerate(self.chunks)
        )
        decodes = tuple(
            Decode(f"{NOBODY}d{number}", draw(), prefix, KvForm(next(shares)), _GREEDY, 0)
            for number, prefix in enumerate(self.prefixes)
        )
        return chunks, decodes


@dataclass(frozen=True)
class Bounds:
    """The limits of a step on the worker that is measured."""

    limits: WorkerLimits
    longest: int  # most tokens of a request
    runs_whole: bool = False  # whether every prompt runs in one step, and nothing decodes

    def allow(self, trial: Trial) -> bool:
        shape, ends = trial.shape, trial.ends
        blocks = sum(units_for(end, self.limits.block_size) for end in ends)
        within = shape.tokens <= self.limits.max_step_tokens and len(ends) <= self.limits.max_batch
        return within and max(ends) <= self.longest and blocks <= self.limits.num_blocks


def trials(bounds: Bounds) -> list[Trial]:
    """Return the trials, the kinds in turn: for each kind sizes from small to large, then random steps."""
    batch, longest = bounds.limits.max_batch, bounds.longest
    chance = random.Random(_SEED)

    def sizes(first: int, last: int, by: int = 2) -> list[int]:
        """Draw sizes between the powers: kernels run powers of two faster than the sizes that requests have."""
        found = [first]
        while first * by < last:
            found.append(int(first * by ** (0.5 + chance.random())))
            first *= by
        return [*found, last]

    prefixes, batches = cycle(sizes(16, longest - 1, 8)), cycle(sizes(1, batch, 4))
    cached = cycle((0,) if bounds.runs_whole else (0, *sizes(64, max(64, longest // 2), 8)))
    tokens = bounds.limits.max_step_tokens
    ascending = (
        [Trial(((length, next(cached)),)) for length in sizes(1, tokens)],
        [Trial(prefixes=(next(prefixes),) * size) for size in sizes(1, batch)],
        [Trial(((length, 0),), (next(prefixes),) * next(batches)) for length in sizes(16, tokens)],
    )
    queues, at_random = [], random_trials(bounds, _TRIALS_PER_KIND, _SEED)
    for kind, growing in zip(Kind, ascending, strict=True):
        more = [trial for trial in at_random if trial.shape.kind is kind]
        queues.append([trial for trial in dict.fromkeys((*growing, *more)) if bounds.allow(trial)][:_TRIALS_PER_KIND])
    if bounds.runs_whole:
        return [trial for trial in queues[0] if not any(cached for _, cached in trial.chunks)]
    return [trial for trial in chain.from_iterable(zip_longest(*queues)) if trial is not None]


def random_trials(bounds: Bounds, count: int, seed: int) -> list[Trial]:
    """Return `count` trials of each kind, with all sizes equally likely on a logarithmic scale."""
    chance = random.Random(seed)
    found: dict[Kind, list[Trial]] = {kind: [] for kind in Kind}
    for _ in range(_DRAWS * count):  # a kind that the bounds do not allow gets fewer
        trial = _random_trial(bounds, chance)
        same = found[trial.shape.kind]
        if len(same) < count and bounds.allow(trial):
            same.append(trial)
            if all(len(same_kind) == count for same_kind in found.values()):
                break
    return [trial for same_kind in found.values() for trial in same_kind]


def _random_trial(bounds: Bounds, chance: random.Random) -> Trial:
    def size(least: int, most: int) -> int:
        return int(least * max(1.0, most / least) ** chance.random())

    kind, limits, longest = chance.choice([*Kind]), bounds.limits, bounds.longest
    chunks, prefixes = [], []
    if kind is not Kind.DECODE:
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            chunks.append((size(4, limits.max_step_tokens), chance.choice((0, size(16, longest)))))
    if kind is not Kind.PREFILL:
        typical, unevenness = size(16, longest), chance.choice((1.0, 1.2, 4.0))
        prefixes = [round(typical * unevenness ** chance.uniform(-1, 1)) for _ in range(size(1, limits.max_batch))]
        if chance.random() < 0.1:
            prefixes[0] = longest // 2  # one long request among short requests
    return Trial(tuple(chunks), tuple(prefixes))
