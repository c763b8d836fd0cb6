"""The memory that a choice may take where real-time requests displace best-effort ones (BROS §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.worker.step.ranks import as_they_leave
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import Seating, StepContext

RECALL_S = 30.0  # in which what real-time requests needed counts half: to recompute others costs more than free memory


class RecentNeed:
    """The memory that real-time requests needed of a device lately: more of them will come."""

    def __init__(self) -> None:
        self._pairs, self._at = 0.0, 0.0

    def spare_pairs(self, held: int, now: float, more_expected: bool = True) -> int:
        """Return how many free pairs to hold back from best-effort requests: the recent real-time peak, less `held`.

        Where no more real-time requests are expected, there are none: what was needed before is forgotten.
        """
        self._pairs = max(held, self._pairs * 0.5 ** ((now - self._at) / RECALL_S)) if more_expected else held
        self._at = now
        return int(self._pairs) - held


@dataclass(slots=True)
class PackedSeating(Seating):
    """Offers real-time requests also the memory and the seats of best-effort ones."""

    best_effort: Sequence[WorkerRequest] = ()  # that are seated
    spare: int = 0  # free pairs that best-effort requests are not seated on, beside others of them
    is_open: bool = True  # to real-time requests, however many are seated
    at: StepContext = field(kw_only=True)
    _yielding: list[WorkerRequest] | None = None  # best-effort requests that have not left, the first to leave last
    _can_yield: int | None = None  # pairs

    def left_for(self, running: WorkerRequest) -> int:
        pairs = self.blocks.num_free
        if running.promise.is_rt:
            if self._can_yield is None:
                self._can_yield = sum(self.blocks.num_freed(seat.pairs) for seat in self._left())
            pairs += max(0, self._can_yield - self.pages.num_read_once(running))
        elif not running.pairs and self.best_effort:
            pairs = max(0, pairs - self.spare)
        return pairs * self.block_size

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return how many of these tokens of a request there is memory for: none of one that left in this choice.

        Its `pairs` are others' by now. Where it gets pairs chunk by chunk it would take more, which it loses with them.
        """
        if self.by_chunk and any(left is running for left in self.unseated):
            return 0
        return Seating.most(self, running, size)

    def take(self, running: WorkerRequest, size: int) -> None:
        Seating.take(self, running, size)
        self._can_yield = None  # it may share pairs now with those that would leave

    def _left(self) -> Sequence[WorkerRequest]:
        return self.best_effort if self._yielding is None else self._yielding

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free:
            if self._yielding is None:
                self._yielding = as_they_leave(self.best_effort, self.at)
            leaving, self._can_yield = self._yielding.pop(), None
            self.blocks.give(leaving.pairs)  # its `pairs` say where its KV is until it is copied
            self.unseated.append(leaving)
        return Seating._taken(self, count)
