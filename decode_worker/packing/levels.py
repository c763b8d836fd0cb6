"""Packings by levels of service: the requests that were served least run first, and nothing is predicted.

A request that has used up the bound of a level goes on in the next lower one.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.decode_worker.packing.packer import MaySeat, MemoryGiver, Packer, Runnable
from alignedserve.protocol.commands import Command
from alignedserve.scheduling.levels import STEP_PROMPT, level_served
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.waiting import Waiting


class ByLevels(Packer):
    """Requests run by level and, within each level, by arrival; the request that was served most leaves."""

    def has_seat(self, num_seated: int) -> bool:
        return True  # a new prompt is in the highest level, and pauses other requests

    def first(self, waiting: Waiting, may_seat: MaySeat) -> Running | None:
        return min(filter(may_seat, waiting), key=self._level, default=None)

    def runnable(self, decodes: Sequence[Running], prompts: Sequence[Running]) -> Runnable:
        if len(decodes) + len(prompts) <= self._most:
            return sorted(decodes, key=self._level), sorted(prompts, key=self._level)
        first = sorted((*decodes, *prompts), key=self._rank)[: self._most]
        return [seat for seat in first if seat.decodes], [seat for seat in first if not seat.decodes]

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        return max((*prompts, *decodes), key=self._rank)

    def _level(self, running: Running) -> int:
        return level_served(len(running.output))

    def _rank(self, running: Running) -> tuple[int, float, str]:
        return self._level(running), running.request.arrival_at, running.request.id


class SkipJoin(ByLevels):
    """A prompt that would use up a level's bound with its first token alone starts below it (FastServe §4.1).

    For lack of memory requests of lower levels are swapped out for it (FastServe §4.2)."""

    def prepare(self, room: MemoryGiver, now: float) -> list[Command]:
        return room.swap(now)

    def level(self, running: Running, now: float) -> int:
        return self._level(running)

    def gives_way(self, seated: Sequence[Running], to: Running, now: float) -> list[Running]:
        level = self._level(to)
        return [seat for seat in sorted(seated, key=self._rank) if self._level(seat) > level]

    def _level(self, running: Running) -> int:
        return level_served(len(running.output) + len(running.request.prompt) // STEP_PROMPT)
