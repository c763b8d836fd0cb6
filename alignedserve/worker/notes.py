"""What a worker has to tell the router: which requests have moved on, how long outputs were, what is left to run."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import Attempt, Backlog, Progress
from alignedserve.worker.step.running import Running


class Notes:
    def __init__(self) -> None:
        self._moved: dict[str, list[Attempt]] = {}  # field of Progress -> who has
        self._lengths: list[int] = []  # of the outputs of those that ended
        self._backlog_told = Backlog()
        self.has_less_to_run = False  # than was told: of prompts that are through the router hears from others

    def moved(self, stage: str, attempt: Attempt) -> None:
        self._moved.setdefault(stage, []).append(attempt)

    def ended(self, running: Running) -> None:
        self.moved("ended", running.key)
        self._lengths.append(len(running.output))

    def told(self, backlog: Callable[[], Backlog], free_pairs: int) -> Progress | None:
        """What has not been told yet, if anything. The backlog is made only where it may be wanted."""
        if not self._moved and not self.has_less_to_run:
            return None
        ahead, self.has_less_to_run = backlog(), False
        if not self._moved and ahead == self._backlog_told:
            return None
        self._backlog_told = ahead
        stages, lengths = {stage: tuple(attempts) for stage, attempts in self._moved.items()}, tuple(self._lengths)
        self._moved.clear()
        self._lengths.clear()
        return Progress(**stages, lengths=lengths, free_pairs=free_pairs, backlog=ahead)
