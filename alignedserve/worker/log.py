"""What happens on a worker, noted for the router, for the metrics, and for users who ask for a story."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from alignedserve.core import PreemptionCause, ServiceClass, StepPlan
from alignedserve.explain.decisions import DecisionRing
from alignedserve.protocol.figures import RATIOS, SPREADS, STEP_S, STEP_TOKENS, Preempted, Tally
from alignedserve.protocol.messages import Attempt, Backlog, Progress
from alignedserve.worker.step.request import WorkerRequest

_LOOKS_S = 0.1  # how often the backlog is looked at where nothing has moved on
_DRIFT_S = 0.25  # between the wait and the wait that the router believes


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
    """Counts steps, requests that had to leave, what went wrong, and how predictions came out, for the metrics."""

    def __init__(self) -> None:
        self.by_batches = [0, 0, 0]  # steps of members of no batch (guests alone), of one batch, of two or more
        self.num_grouped = 0  # steps that documents of other lengths sat out
        self.spread = Buckets(SPREADS)  # of the prefixes of a step's decodes
        self.num_held_back = 0  # best-effort requests that could decode, once for each step with real-time requests
        self.num_pauses = 0  # of steps, for prompts of chats
        self.num_switches = 0  # batches with a member that has joined
        self.num_refused = 0  # copies from the pool that were not intact
        self.num_failed_transfers = 0  # of KV from device to device
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

    def count_decodes(self, decodes: Sequence[WorkerRequest], is_grouped: bool = False) -> None:
        """Count a step by its members' batches, and by how far the prefixes of its decodes lie apart."""
        if not decodes:
            return
        batches, prefixes = {running.batch for running in decodes}, [running.prefix for running in decodes]
        self.by_batches[min(len(batches - {0}), 2)] += 1
        self.spread.count(max(prefixes) - min(prefixes))
        self.num_grouped += is_grouped

    def count_held_back(self, residents: Iterable[WorkerRequest], chosen: Sequence[WorkerRequest]) -> None:
        """Count the best-effort residents that a step with real-time requests leaves out."""
        if any(running.promise.is_rt for running in chosen):
            self.num_held_back += sum(not running.promise.is_rt for running in set(residents).difference(chosen))

    def count_end(self, running: WorkerRequest) -> None:
        """Count a request that has ended by the ratio of its length to the predicted length."""
        estimate = running.request.estimate
        if estimate is not None:
            self.length_ratio.count(len(running.output) / estimate.mean)

    def count_preempted(self, running: WorkerRequest, cause: PreemptionCause, keeps_kv: bool = False) -> None:
        self._preempted[cause, running.request.service, keeps_kv] += 1

    @property
    def preempted(self) -> tuple[Preempted, ...]:
        return tuple(Preempted(*kind, number) for kind, number in self._preempted.items())


class Notes:
    """What the router is to hear with the next Progress: requests that moved on, lengths of outputs, the work left."""

    def __init__(self) -> None:
        self._moved: dict[str, list[Attempt]] = {}  # field of Progress -> attempts
        self._lengths: list[int] = []  # of the outputs of requests that ended
        self._backlog_reported, self._reported_at = Backlog(), 0.0
        self._looks_at = 0.0
        self.has_less_to_run = False  # than was reported: others tell the router of prompts that have ended

    def renew(self) -> None:
        """Report the backlog next time in any case: this is a new router."""
        self._backlog_reported, self.has_less_to_run = Backlog(), True

    def note(self, stage: str, attempt: Attempt) -> None:
        """Note that a request has reached a stage, which is a field of Progress."""
        self._moved.setdefault(stage, []).append(attempt)

    def note_end(self, running: WorkerRequest) -> None:
        """Note that a request has ended, and the length of the output."""
        self.note("ended", running.key)
        self._lengths.append(len(running.output))

    def report(self, backlog: Callable[[], Backlog], free_blocks: int, now: float) -> Progress | None:
        """Return what has not been reported yet, if anything. `backlog` is called only where needed."""
        if not self._moved and not self.has_less_to_run and now < self._looks_at:
            return None
        ahead, has_less, self.has_less_to_run = backlog(), self.has_less_to_run, False
        self._looks_at = now + _LOOKS_S
        if not self._moved and not self._has_drifted(ahead, now) and not (has_less and ahead != self._backlog_reported):
            return None
        self._backlog_reported, self._reported_at = ahead, now
        stages, lengths = {stage: tuple(attempts) for stage, attempts in self._moved.items()}, tuple(self._lengths)
        self._moved.clear()
        self._lengths.clear()
        return Progress(**stages, lengths=lengths, free_blocks=free_blocks, backlog=ahead)

    def _has_drifted(self, ahead: Backlog, now: float) -> bool:
        """Return whether the wait differs from what the router believes: the reported wait less the time since."""
        passed_s, before = now - self._reported_at, self._backlog_reported
        all_s, rt_s = max(0.0, before.prompts_s - passed_s), max(0.0, before.rt_prompts_s - passed_s)
        return max(abs(ahead.prompts_s - all_s), abs(ahead.rt_prompts_s - rt_s)) > _DRIFT_S


class WorkerLog:
    """The notes of a worker, by kind. Each part takes the kind that it writes."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.counts = WorkerCounts()
        self.decisions = DecisionRing()
