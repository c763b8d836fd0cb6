"""A request's share of a step, and the check that the engine can execute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.core import Adapter, Chunk, Decode, Fold, KvForm, Sampling
from alignedserve.errors import PlanError


@dataclass(frozen=True, slots=True)
class Run:
    """A request's tokens in a step, and the blocks that hold these and earlier tokens."""

    request: str
    tokens: Sequence[int]
    start: int  # position of the first token
    kv: KvForm
    sampling: Sampling | None
    index: int
    adapter: Adapter | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_held(self) -> int:
        """Return how many tokens have KV when the step has run."""
        return self.start + len(self.tokens) - self.kv.dropped


def run_of(part: Chunk | Decode, tokens: Sequence[int]) -> Run:
    return Run(part.request, tokens, part.start, part.kv, part.sampling, part.index, part.adapter)


class Checker:
    """Refuses runs that would read or write in a wrong place."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, problem: Callable[[Run], str | None]
    ) -> None:
        """`problem` says why a run is impossible in another form than KV (engine/forms/other.py)."""
        self._config, self._num_blocks, self._block_size = config, num_blocks, block_size
        self._problem = problem

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
        if run.kv.form and (problem := self._problem(run)) is not None:
            raise PlanError(f"request {run.request} {problem}")
        self.check_dropped(run)
        self.check_blocks(run.request, run.kv, run.num_held)

    def check_dropped(self, run: Run) -> None:
        if not run.kv.dropped:  # nearly always: the layers are not gone through for each request of a step
            return
        reach, fold = self._config.reach, self._config.fold
        if fold is not None:
            self._check_folded(run, fold.fold)
            return
        if run.kv.dropped < 0 or reach is None or run.kv.dropped > run.start + 1 - reach:
            raise PlanError(f"request {run.request} lacks its first {run.kv.dropped} tokens, which a layer reads")
        if run.kv.dropped % self._block_size:
            raise PlanError(f"request {run.request} lacks its first {run.kv.dropped} tokens, which are no whole blocks")

    def _check_folded(self, run: Run, fold: Fold) -> None:
        """Check a request with folded blocks: `dropped` counts the tokens that folding spares."""
        if run.kv.dropped < 0 or run.kv.dropped % (self._block_size * (fold.blocks - 1)):
            raise PlanError(f"request {run.request} is spared {run.kv.dropped} tokens, which no folded blocks spare")
        folded = fold.folded(run.kv.dropped)
        if folded > fold.sight.first_read(run.start):
            raise PlanError(f"request {run.request} has folded its first {folded} tokens, which a layer reads")

    def check_blocks(self, request: str, kv: KvForm, tokens: int) -> None:
        if tokens > kv.room(self._block_size):
            raise PlanError(f"request {request} has {len(kv.blocks)} blocks, too few for {tokens} tokens")
        least = 0 if kv.form or kv.dropped else -self._num_blocks  # ~block
        if not _within(kv.blocks, self._num_blocks, least):
            raise PlanError(f"request {request} names a block outside 0..{self._num_blocks - 1}")


def _within(numbers: Sequence[int], end: int, least: int = 0) -> bool:
    """Return whether all are in least..end - 1; by min and max, as a step may have tens of thousands of tokens."""
    return not numbers or (min(numbers) >= least and max(numbers) < end)
