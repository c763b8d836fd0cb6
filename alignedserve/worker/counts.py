"""Count what a worker does, for metrics: its steps, requests that had to leave them, how predictions came out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from alignedserve.core import PreemptionCause, ServiceClass, StepPlan
from alignedserve.protocol.figures import RATIOS, STEP_S, STEP_TOKENS, Preempted, Tally
from alignedserve.worker.step.running import Running


class Buckets:
    """Counts values up to each of some bounds, and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def count(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def tally(self) -> Tally:
        return Tally(tuple(self._counts), self._total)


class WorkerCounts:
    def __init__(self) -> None:
        self.step_tokens, self.step_s = Buckets(STEP_TOKENS), Buckets(STEP_S)
        self.step_ratio, self.length_ratio = Buckets(RATIOS), Buckets(RATIOS)
        self._preempted: Counter[tuple[PreemptionCause, ServiceClass, bool]] = Counter()  # ... and whether KV is kept

    def count_step(self, plan: StepPlan, seconds: float) -> None:
        """Count a step that went well, but no trial: nothing runs in that."""
        tokens = plan.num_tokens
        if not tokens:
            return
        self.step_tokens.count(tokens)
        self.step_s.count(seconds)
        if plan.predicted_s > 0:
            self.step_ratio.count(seconds / plan.predicted_s)

    def count_end(self, running: Running) -> None:
        """Count a request that has ended by how much longer its output is than predicted."""
        estimate = running.request.estimate
        if estimate is not None:
            self.length_ratio.count(len(running.output) / estimate.mean)

    def count_preempted(self, running: Running, cause: PreemptionCause, keeps_kv: bool = False) -> None:
        self._preempted[cause, running.request.service, keeps_kv] += 1

    @property
    def preempted(self) -> tuple[Preempted, ...]:
        return tuple(Preempted(*kind, number) for kind, number in self._preempted.items())

    @property
    def num_preemptions(self) -> int:
        """Return how many requests have left for others."""
        return self._preempted.total()

    @property
    def num_evictions(self) -> int:
        """Return how many of them did not lose their KV."""
        return sum(number for (_, _, keeps_kv), number in self._preempted.items() if keeps_kv)
