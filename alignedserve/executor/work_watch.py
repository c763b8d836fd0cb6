"""Watch that work ends: a worker whose step or copy goes on far beyond its prediction ends itself, and starts again.

The thread of the heartbeats looks, since it depends on no work. Work that has run for half of its limit is late: the
heartbeats say so, the router places nothing on this worker, and `/ready` is no longer 200 where no other worker does
the same. At its limit the process ends, and its requests go on as after any death. Rank 0 looks for all ranks: none of
its steps ends before those of the others.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from alignedserve.core import FREE_COPIES, CopyCost, StepPlan
from alignedserve.signs import ExitCode

log = logging.getLogger("alignedserve.engine")

LEAST_S = 10.0  # the limit of work that should take no time ...
ON_GPU_S = 60.0  # ... that of work on a GPU, where a kernel may have to be compiled, and of a page beside steps ...
UNKNOWN_S = 120.0  # ... and where it is not known what work takes, and of the first step on a GPU
_TIMES = 20  # the prediction
FORM_S = 0.3  # for each request with a grammar: to find the allowed tokens may take this long
_NUM_CORES = len(os.sched_getaffinity(0))
_MOST_PASSED_S = 2.0  # between two looks: in more than that this process stood still, and its work with it


@dataclass(eq=False)
class _Other:
    """Work that is no step."""

    what: str
    limit_s: float


class WorkWatch:
    """Notes which work runs, and for how long. Other threads begin and end work than the one that looks."""

    def __init__(
        self,
        least_s: float = LEAST_S,
        first_s: float = LEAST_S,
        still_s: float = LEAST_S,
        copying: CopyCost = FREE_COPIES,
    ) -> None:
        """`least_s` is the limit of work that should take no time, `first_s` the same until a step has ended, and
        `still_s` that of a thread that keeps Python's lock; `copying` says what copies take."""
        self._least_s, self._after_first_s, self._still_s, self._copying = first_s, least_s, still_s, copying
        self._steps: dict[int, StepPlan] = {}  # under way or next, in their order, by number
        self._between: _Other | None = None  # work for which the steps wait
        self._beside: _Other | None = None  # the piece of a copy beside the steps
        self._seen: list[tuple[StepPlan | _Other, float]] = []  # at the last look: what ran, and for how long
        self._looked_at = monotonic()
        faulthandler.register(signal.SIGPROF, chain=True)  # says where it stood, and lets the signal end the process

    @property
    def is_busy(self) -> bool:
        return bool(self._steps) or self._between is not None

    def begins(self, plan: StepPlan) -> None:
        self._steps[plan.number] = plan

    def ends(self, number: int) -> None:
        """Note that the step of this number has ended: the first of those under way, or one in its pause.

        Both threads may say so at once: plans are found by number, as comparing them would let the other thread in."""
        del self._steps[number]
        self._least_s = self._after_first_s

    @contextmanager
    def between(self, what: str, tokens: int | None = None) -> Iterator[None]:
        """Watch work that steps wait for: a copy of this number of tokens, or work of unknown duration."""
        limit_s = UNKNOWN_S if tokens is None else max(self._least_s, _TIMES * self._copying.seconds(tokens))
        self._between = _Other(what, limit_s)
        try:
            yield
        finally:
            self._between = None

    @contextmanager
    def beside(self, what: str) -> Iterator[None]:
        """Watch a piece of a copy beside the steps, which waits for its turn among them."""
        self._beside = _Other(what, max(ON_GPU_S, self._least_s))
        try:
            yield
        finally:
            self._beside = None

    def look(self, now: float) -> tuple[StepPlan | _Other, float] | None:
        """Return the work that is late, and how long it has run; of several the one that is most so."""
        passed_s, self._looked_at = min(now - self._looked_at, _MOST_PASSED_S), now
        before = {id(work): ran_s for work, ran_s in self._seen}
        first = self._between or next(iter(self._steps.copy().values()), None)
        running = [work for work in (first, self._beside) if work is not None]
        self._seen = [(work, before[id(work)] + passed_s if id(work) in before else 0.0) for work in running]
        late = [(work, ran_s) for work, ran_s in self._seen if ran_s > self.limit_s(work) / 2]
        return max(late, key=lambda seen: seen[1] / self.limit_s(seen[0]), default=None)

    def limit_s(self, work: StepPlan | _Other) -> float:
        if isinstance(work, _Other):
            return work.limit_s
        num_forms = sum(part.sampling is not None and bool(part.sampling.syntax) for part in work.parts)
        return max(self._least_s, _TIMES * work.predicted_s) + FORM_S * num_forms

    def late_s(self) -> float:
        """Return for how long late work has run, or 0; end the process where that is too long.

        Work that keeps Python's lock stops this thread too. So the kernel ends the process by SIGPROF once it has
        computed for long without another look. Time in which it stood still, frozen, does not count.
        """
        limit_s = max(self._still_s, self._least_s) * _NUM_CORES if self.is_busy else 0.0
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        late = self.look(monotonic())
        if late is None:
            return 0.0
        work, ran_s = late
        if ran_s > self.limit_s(work):
            what, predicted = _what(work)
            log.error("%s has run for %.1f s%s: this process ends, and starts again", what, ran_s, predicted)
            os._exit(ExitCode.WORK_HUNG)
        return ran_s


def _what(work: StepPlan | _Other) -> tuple[str, str]:
    if isinstance(work, _Other):
        return work.what, f", {work.limit_s:.0f} s at most"
    names = ", ".join([part.request for part in work.parts[:3]]) + (", ..." if len(work.parts) > 3 else "")
    return f"step {work.number} of {len(work.parts)} requests ({names})", f", predicted {work.predicted_s:.3f} s"
