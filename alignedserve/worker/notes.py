"""Collect what a worker has to tell the router: requests that moved on, lengths of outputs, the work left, faults."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import Attempt, Backlog, Progress
from alignedserve.worker.step.running import Running

_LOOKS_S = 0.1  # how often the backlog is looked at where nothing has moved on
_DRIFT_S = 0.25  # between the wait and what the router believes of it


class Notes:
    def __init__(self) -> None:
        self._moved: dict[str, list[Attempt]] = {}  # field of Progress -> attempts
        self._lengths: list[int] = []  # of the outputs of requests that ended
        self._backlog_reported, self._reported_at = Backlog(), 0.0
        self._looks_at = 0.0
        self.has_less_to_run = False  # than was reported: the router hears from others of prompts that are through

    def renew(self) -> None:
        """Report the backlog next time, whatever was reported: this router knows nothing of it."""
        self._backlog_reported, self.has_less_to_run = Backlog(), True

    def note(self, stage: str, attempt: Attempt) -> None:
        """Note that a request has reached a stage, which is a field of Progress."""
        self._moved.setdefault(stage, []).append(attempt)

    def note_end(self, running: Running) -> None:
        """Note that a request has ended, and how long its output was."""
        self.note("ended", running.key)
        self._lengths.append(len(running.output))

    def report(self, backlog: Callable[[], Backlog], free_pairs: int, now: float) -> Progress | None:
        """Return what has not been reported yet, if anything. `backlog` is called only where it may be wanted."""
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
        return Progress(**stages, lengths=lengths, free_pairs=free_pairs, backlog=ahead)

    def _has_drifted(self, ahead: Backlog, now: float) -> bool:
        """Return whether the wait is another than the router believes, which takes it to pass with the time."""
        passed_s, before = now - self._reported_at, self._backlog_reported
        all_s, rt_s = max(0.0, before.prompts_s - passed_s), max(0.0, before.rt_prompts_s - passed_s)
        return max(abs(ahead.prompts_s - all_s), abs(ahead.rt_prompts_s - rt_s)) > _DRIFT_S


class Faults:
    """Copies and transfers that went wrong in a worker's life."""

    def __init__(self) -> None:
        self.num_refused = 0  # copies from the pool that were not intact
        self.num_failed_transfers = 0  # of KV from device to device
