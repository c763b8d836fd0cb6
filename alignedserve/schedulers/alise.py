"""ALISE (Algorithm 2): a request takes memory from requests of lower levels, which are swapped out for it.

As many requests are on the device as its memory and its seats hold: that is the paper's limit M. What is beyond it lies
in the pool, where the request with the longest expected wait goes first (EWT, ALISE §3.2), and comes back when its turn
is before that of a request on the device. Requests of one level take nothing from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.schedulers.in_order import InOrder
from alignedserve.schedulers.scheduler import MaySeat, SchedulerSetup
from alignedserve.scheduling.expected_wait import InLine, shortest_wait_first
from alignedserve.scheduling.levels import level_of
from alignedserve.scheduling.slo import Standing
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class Alise(InOrder):
    """Requests run by level; the one with the longest expected wait leaves."""

    def __init__(self, setup: SchedulerSetup) -> None:
        super().__init__(setup)
        self._times = setup.times

    def first(self, waiting: WaitingPrompts, may_seat: MaySeat) -> Running | None:
        return next((prompt for _, prompt in waiting.line.in_order(0.0, 0.0) if may_seat(prompt)), None)

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        return self._by_wait((*prompts, *decodes), now)[-1]

    def level(self, running: Running, now: float) -> int:
        return self._standing(running, now).level

    def gives_way(self, seated: Sequence[Running], to: Running, now: float) -> list[Running]:
        level = self.level(to, now)
        return [seat for seat in self._by_wait(seated, now) if self.level(seat, now) > level]

    def _by_wait(self, seated: Sequence[Running], now: float) -> list[Running]:
        """Return seated requests by how long they would wait for their next step if they were in line."""
        policy, times = self.policy, self._times()
        line = list(policy.ordering.sort(seated, lambda seat: self._standing(seat, now), times, policy.late))

        def in_line(seat: Running) -> InLine:
            steps = int(self._standing(seat, now).remaining)
            return InLine(steps * times.mean_s, now - seat.request.arrival_at, level_of(steps))

        return shortest_wait_first(line, in_line, max(1, len(line)), policy.age_s)

    def _standing(self, running: Running, now: float) -> Standing:
        return running.promise.standing(now, running.work(1), self._times())
