"""What a choice of prompts may take of a prefill worker's device, and of the pages that are at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import Seating


@dataclass(slots=True)
class PoolSeating(Seating):
    """Seating of prompts whose KV goes to the pool.

    A best-effort prompt is seated when the pages for all its KV are at hand. A real-time prompt may take the place of
    best-effort ones that are through and wait for pages. Where there is no pool no prompt needs pages.
    """

    spare_pages: int = 0  # at hand for best-effort prompts that wait
    pages_for: Callable[[Running], int] = field(kw_only=True)
    idle: list[Running] = field(default_factory=list)  # best-effort prompts that are through, the newest last
    needs_pages: bool = True

    def left_for(self, running: Running) -> int:
        pairs = self.blocks.num_free
        if self.idle and running.promise.is_rt:
            pairs += sum(len(running.pairs) for running in self.idle)
        return pairs * self.block_size

    def may_seat(self, waiting: Running) -> bool:
        if waiting.promise.is_rt or not self.needs_pages:
            return True
        return self.spare_pages > 0 and self.pages_for(waiting) <= self.spare_pages

    @property
    def takes_best_effort(self) -> bool:
        return self.spare_pages > 0 or not self.needs_pages

    def take(self, running: Running, size: int) -> None:
        if not running.pairs and not running.promise.is_rt:
            self.spare_pages -= self.pages_for(running)
        Seating.take(self, running, size)

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free and self.idle:
            leaving = self.idle.pop()
            self.blocks.give(leaving.pairs)
            leaving.pairs = ()
            self.unseated.append(leaving)
        return Seating._taken(self, count)
