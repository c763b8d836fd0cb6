"""A request's share of a step, and the check that the engine can execute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.core import Adapter, CacheKind, Chunk, Decode, Fold, Sampling
from alignedserve.errors import PlanError


@dataclass(frozen=True, slots=True)
class Run:
    """A request's tokens in a step, and the blocks that hold them and its earlier tokens."""

    request: str
    tokens: Sequence[int]
    start: int  # position of the first token
    pairs: Sequence[int]
    sampling: Sampling | None
    index: int
    from_right: Sequence[int]  # pairs that are filled from the right
    kind: CacheKind
    blocks: Sequence[int]
    dropped: int = 0  # first tokens whose KV was given up: `pairs` begin after them
    adapter: Adapter | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_hidden(self) -> bool:
        return self.kind is CacheKind.HIDDEN


def run_of(part: Chunk | Decode, tokens: Sequence[int]) -> Run:
    return Run(
        part.request,
        tokens,
        part.start,
        part.pairs,
        part.sampling,
        part.index,
        part.from_right,
        part.kind,
        part.blocks,
        part.dropped,
        part.adapter,
    )


class Checker:
    """Refuses runs that would read or write in a wrong place."""

    def __init__(self, config: ModelConfig, num_pairs: int, block_size: int, why_not_hidden: str | None) -> None:
        self._config, self._num_pairs, self._block_size = config, num_pairs, block_size
        self._why_not_hidden = why_not_hidden

    def check(self, run: Run) -> None:
        vocabulary, most = self._config.vocab_size, self._config.max_positions
        if not run.tokens:
            raise PlanError(f"request {run.request} is to run no token")
        if not _within(run.tokens, vocabulary):
            raise PlanError(f"request {run.request} names a token outside 0..{vocabulary - 1}")
        if run.start < 0:
            raise PlanError(f"request {run.request} is to start at {run.start}")
        if run.end > most:
            raise PlanError(f"request {run.request} would reach {run.end} tokens, the model has {most} positions")
        if run.is_hidden:
            if run.adapter is not None:
                raise PlanError(f"request {run.request} has an adapter: it keeps KV, not hidden vectors")
            if run.pairs or run.from_right:
                raise PlanError(f"request {run.request} keeps hidden vectors: it takes blocks, not block pairs")
            self.check_hidden(run.request, run.blocks, run.end)
        else:
            self.check_dropped(run)
            self.check_pairs(run.request, run.pairs, run.end - run.dropped)
            if run.from_right and not set(run.from_right) <= set(run.pairs):
                raise PlanError(
                    f"request {run.request} is to fill a block pair from the right that is not among its own"
                )

    def check_dropped(self, run: Run) -> None:
        if not run.dropped:  # nearly always: the layers are not gone through for each request of a step
            return
        reach, fold = self._config.reach, self._config.fold
        if fold is not None:
            self._check_folded(run, fold.fold)
            return
        if run.dropped < 0 or reach is None or run.dropped > run.start + 1 - reach:
            raise PlanError(f"request {run.request} lacks its first {run.dropped} tokens, which a layer reads")
        if run.dropped % self._block_size:
            raise PlanError(f"request {run.request} lacks its first {run.dropped} tokens, which are no whole pairs")

    def _check_folded(self, run: Run, fold: Fold) -> None:
        """Check a request that has folded pairs: it counts as dropped what that spares."""
        if run.dropped < 0 or run.dropped % (self._block_size * (fold.pairs - 1)):
            raise PlanError(f"request {run.request} is spared {run.dropped} tokens, which no folded pairs spare")
        folded = fold.folded(run.dropped)
        if folded > fold.sight.first_read(run.start):
            raise PlanError(f"request {run.request} has folded its first {folded} tokens, which a layer reads")
        if run.from_right:
            raise PlanError(f"request {run.request} has folded pairs, and fills some from the right")

    def check_pairs(self, request: str, pairs: Sequence[int], tokens: int) -> None:
        if tokens > len(pairs) * self._block_size:
            raise PlanError(f"request {request} has {len(pairs)} block pairs, too few for {tokens} tokens")
        if not _within(pairs, self._num_pairs):
            raise PlanError(f"request {request} names a block pair outside 0..{self._num_pairs - 1}")

    def check_hidden(self, request: str, blocks: Sequence[int], tokens: int) -> None:
        if self._why_not_hidden is not None:
            raise PlanError(f"request {request} cannot keep hidden vectors: {self._why_not_hidden}")
        if tokens > len(blocks) * self._block_size:
            raise PlanError(f"request {request} has {len(blocks)} hidden blocks, too few for {tokens} tokens")
        if not _within(blocks, 2 * self._num_pairs):
            raise PlanError(f"request {request} names a block outside 0..{2 * self._num_pairs - 1}")


def _within(numbers: Sequence[int], end: int) -> bool:
    """Return whether all numbers are in 0..end - 1; by min and max, as a step may have tens of thousands of tokens."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < end)
