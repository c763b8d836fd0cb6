"""Pages that the pool keeps for prompts of this worker, because other prompts began alike."""

from __future__ import annotations

from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt, Release
from alignedserve.worker.notes import Notes
from alignedserve.worker.parts.pool_link import PoolLink
from alignedserve.worker.step.running import Running


class KnownPages:
    def __init__(self, pool: PoolLink, notes: Notes) -> None:
        self._pool, self._notes = pool, notes

    def release(self, attempt: Attempt, pages: tuple[int, ...]) -> list[Command]:
        """Tell the pool that it need not keep these pages for this attempt."""
        return self.let_go(attempt) if pages else []

    def let_go(self, attempt: Attempt) -> list[Command]:
        """Tell the pool that it need not keep any page for this attempt."""
        return self._pool.send(Release(*attempt))

    def leave(self, running: Running) -> list[Command]:
        """Release the pages of a prompt that is dropped: from now on there is less to run."""
        self._notes.has_less_to_run = True
        return self.release(running.key, running.known)
