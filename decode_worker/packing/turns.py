"""Packings in which decodes take turns with something: real-time with best-effort requests, or decodes with prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from alignedserve.decode_worker.packing.packer import MaySeat, Packer, PackingSetup, Runnable
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.waiting import Waiting

MOST_WAITING = 20  # steps of decodes that a prompt waits for at most (TGI: max_waiting_tokens)


class RoundRobin(Packer):
    """Real-time and best-effort requests run in alternate steps, each by arrival; a class without requests passes."""

    def __init__(self, setup: PackingSetup) -> None:
        super().__init__(setup)
        self._is_rt = True  # whether it is the turn of the real-time class
        self._runs_rt = True  # whether real-time requests run in this turn

    def first(self, waiting: Waiting, may_seat: MaySeat) -> Running | None:
        its_turn, others = waiting.real_time, waiting.best_effort
        if not self._is_rt:
            its_turn, others = others, its_turn
        return next(filter(may_seat, chain(its_turn, others)), None)

    def runnable(self, decodes: Sequence[Running], prompts: Sequence[Running]) -> Runnable:
        for is_rt in (self._is_rt, not self._is_rt):
            of_class = [[seat for seat in seats if seat.promise.is_rt is is_rt] for seats in (decodes, prompts)]
            if any(of_class):
                self._runs_rt = is_rt
                return of_class[0], of_class[1]
        return (), ()

    def planned(self, selection: Selection) -> None:
        if not selection.is_empty:
            self._is_rt = not self._runs_rt


class Ratio(Packer):
    """Whole prompts interrupt decodes once enough of them wait, or decodes have run for long (TGI's router)."""

    def __init__(self, setup: PackingSetup) -> None:
        super().__init__(setup)
        self._ratio = setup.policy.waiting_ratio
        self._num_steps = 0  # of decodes since the last prompt

    def runnable(self, decodes: Sequence[Running], prompts: Sequence[Running]) -> Runnable:
        waits = bool(decodes) and len(prompts) < self._ratio * len(decodes) and self._num_steps < MOST_WAITING
        return decodes, () if waits else prompts

    def planned(self, selection: Selection) -> None:
        if not selection.is_empty:
            self._num_steps = 0 if selection.chunks else self._num_steps + 1
