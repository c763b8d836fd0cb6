"""Watch that steps end: a worker whose step goes on far beyond its prediction ends itself, and starts again.

The thread of the heartbeats looks, since it depends on no step. A step that has run for half of its limit is late: the
heartbeats say so, the router places nothing on this worker, and `/ready` is no longer 200 where no other worker does
the same. At its limit the process ends, and its requests go on as after any death. Rank 0 looks for all ranks: none of
its steps ends before those of the others.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections import deque
from time import monotonic

from alignedserve.core import StepPlan
from alignedserve.shell.exit_code import ExitCode

log = logging.getLogger("alignedserve.engine")

LEAST_S = 10.0  # the limit of a step that should take no time ...
ON_GPU_S = 60.0  # ... that of one on a GPU, where a kernel may have to be compiled ...
UNKNOWN_S = 120.0  # ... and where it is not known what steps take, and of the first one on a GPU
_TIMES = 20  # the prediction
FORM_S = 0.3  # for each request with a grammar: to find which tokens it allows may take this long
_NUM_CORES = len(os.sched_getaffinity(0))
_MOST_PASSED_S = 2.0  # between two looks: in more than that this process stood still, and its step with it


class StepWatch:
    """Notes which steps run, and for how long. Other threads begin and end steps than the one that looks."""

    def __init__(self, least_s: float = LEAST_S, first_s: float = LEAST_S, still_s: float = LEAST_S) -> None:
        """`least_s` is the limit of a step that should take no time, `first_s` the same until a step has ended, and
        `still_s` that of a thread that keeps Python's lock."""
        self._least_s, self._after_first_s, self._still_s = first_s, least_s, still_s
        self._steps: deque[StepPlan] = deque()  # under way or next, in their order
        self._seen: StepPlan | None = None  # the step that ran at the last look ...
        self._ran_s = 0.0  # ... and how long it had run then
        self._looked_at = monotonic()
        faulthandler.register(signal.SIGPROF, chain=True)  # says where it stood, and lets the signal end the process

    def begins(self, plan: StepPlan) -> None:
        self._steps.append(plan)

    def ends(self) -> None:
        """Note that the first step of those under way has ended."""
        self._steps.popleft()
        self._least_s = self._after_first_s

    def look(self, now: float) -> tuple[StepPlan, float] | None:
        """Return the present step and how long it has run, where it is late."""
        passed_s, self._looked_at = min(now - self._looked_at, _MOST_PASSED_S), now
        step = next(iter(self._steps.copy()), None)
        if step is None or step is not self._seen:
            self._seen, self._ran_s = step, 0.0
            return None
        self._ran_s += passed_s
        return (step, self._ran_s) if self._ran_s > self.limit_s(step) / 2 else None

    def limit_s(self, step: StepPlan) -> float:
        num_forms = sum(part.sampling is not None and bool(part.sampling.syntax) for part in step.parts)
        return max(self._least_s, _TIMES * step.predicted_s) + FORM_S * num_forms

    def late_s(self) -> float:
        """Return for how long a late step has run, or 0; end the process where that is too long.

        A step that keeps Python's lock stops this thread too. So the kernel ends the process by SIGPROF once it has
        computed for long without another look. Time in which it stood still, frozen, does not count.
        """
        limit_s = max(self._still_s, self._least_s) * _NUM_CORES if self._steps else 0.0
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        late = self.look(monotonic())
        if late is None:
            return 0.0
        step, ran_s = late
        if ran_s > self.limit_s(step):
            _end(step, ran_s)
        return ran_s


def _end(step: StepPlan, ran_s: float) -> None:
    names = ", ".join([part.request for part in step.parts[:3]]) + (", ..." if len(step.parts) > 3 else "")
    what = f"step {step.number} of {len(step.parts)} requests ({names})"
    ends = "this process ends, and starts again"
    log.error("%s has run for %.1f s, predicted %.3f s: %s", what, ran_s, step.predicted_s, ends)
    os._exit(ExitCode.STEP_HUNG)
