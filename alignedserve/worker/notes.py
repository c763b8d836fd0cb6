"""Collect what a worker has to tell the router: requests that moved on, lengths of outputs, the work left, faults."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import ROUTER, Attempt, Backlog, Figures, Progress
from alignedserve.worker.step.running import Running


class Notes:
    def __init__(self) -> None:
        self._moved: dict[str, list[Attempt]] = {}  # field of Progress -> attempts
        self._lengths: list[int] = []  # of the outputs of requests that ended
        self._backlog_reported = Backlog()
        self.has_less_to_run = False  # than was reported: the router hears from others of prompts that are through

    def note(self, stage: str, attempt: Attempt) -> None:
        """Note that a request has reached a stage, which is a field of Progress."""
        self._moved.setdefault(stage, []).append(attempt)

    def note_end(self, running: Running) -> None:
        """Note that a request has ended, and how long its output was."""
        self.note("ended", running.key)
        self._lengths.append(len(running.output))

    def report(self, backlog: Callable[[], Backlog], free_pairs: int) -> Progress | None:
        """Return what has not been reported yet, if anything. `backlog` is called only where it may be wanted."""
        if not self._moved and not self.has_less_to_run:
            return None
        ahead, self.has_less_to_run = backlog(), False
        if not self._moved and ahead == self._backlog_reported:
            return None
        self._backlog_reported = ahead
        stages, lengths = {stage: tuple(attempts) for stage, attempts in self._moved.items()}, tuple(self._lengths)
        self._moved.clear()
        self._lengths.clear()
        return Progress(**stages, lengths=lengths, free_pairs=free_pairs, backlog=ahead)


class Faults:
    """Copies and transfers that went wrong on a worker, as it counts them for the router."""

    def __init__(self) -> None:
        self.num_refused = 0  # copies from the pool that were not intact
        self.num_failed_transfers = 0  # of KV from device to device

    def count_refused(self) -> Command:
        """Count a copy from the pool that failed its check, and tell the router."""
        self.num_refused += 1
        return self._figures

    def count_failed_transfer(self) -> Command:
        """Count a transfer that failed, and tell the router."""
        self.num_failed_transfers += 1
        return self._figures

    @property
    def _figures(self) -> Command:
        """Both numbers each time: the router goes by the last message."""
        return Send(ROUTER, Figures(num_refused=self.num_refused, num_failed_transfers=self.num_failed_transfers))
