"""Run each request alone that may be ending its workers, and charge the ends of silent workers to their requests.

    suspect waits ── no other runs ──▶ a decode worker is reserved ── says what it holds ──▶ the suspect runs alone
                                       (nothing is placed or joins there)

A request with one death may run among others, but few of those run at a time: so a second death makes few suspects.
Suspects run one at a time and on one worker, so that all other workers go on with the rest. An empty worker is taken
before anything else is placed there: as a rule the worker that has started again. Where none is empty and none is to
come back, the worker with the fewest requests gives them up. Nothing is placed on a worker whose step is late, either.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from alignedserve.core import WORKERS, Request, Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Attempt, AttemptLost, Member, Reserve, StepLate
from alignedserve.router.lifecycle import OpenRequest, OpenRequests
from alignedserve.router.members import MemberList
from alignedserve.router.placing.placement import Placement

TRIED_TOGETHER = 16  # requests of a class with one death, for each worker: a new death would charge them again
SUSPECT_WAITS_S = 2.0  # for an empty worker; then a worker is emptied ...
UNCERTAIN_S = 60.0  # by default a launcher ends silent workers sooner, and hears of their ends
BACK_S = 120.0  # ... but not before this time after a decode worker was lost, which comes back empty


class Suspects:
    def __init__(self, roll: MemberList, opened: OpenRequests, placement: Placement, retiring: Set[str]) -> None:
        self._roll, self._open, self._placement, self._retiring = roll, opened, placement, retiring
        self._lost_at: dict[str, float] = {}  # decode worker that is gone, and did not retire -> since when
        # For each silent worker: since when it is silent, and the messages, each with the owner that gets it, for the
        # case that its process turns out to have ended.
        self._uncharged: dict[str, tuple[float, list[tuple[str, AttemptLost]]]] = {}
        self._late: set[str] = set()  # workers whose present step is late
        self._reserved: Member | None = None  # the worker that suspects run on
        self._is_ready = False  # whether that worker has said what it holds, and that nothing more joins
        self._told: dict[str, bool] = {}  # worker -> whether it heard last that it is reserved
        self.closed: set[str] = set()  # workers on which nothing is placed: the reserved one and the late ones

    # --- Workers

    def began(self, worker: Member) -> None:
        """Note that the worker has started, for the first time or again."""
        self._lost_at.pop(worker.name, None)
        self.closed.discard(worker.name)

    def lost(self, worker: Member, now: float) -> None:
        if worker.role is Role.DECODE and worker.name not in self._retiring:
            self._lost_at[worker.name] = now

    def ended(self, member: Member, charges: list[tuple[str, AttemptLost]] | None, now: float) -> None:
        """Forget a life of the member. `charges` are what to say if its process, that was only silent, has ended."""
        self._late.discard(member.name)
        self._told.pop(member.name, None)
        if member.role in WORKERS and charges is not None:
            self._uncharged[member.name] = now, charges

    def charge(self, name: str) -> list[Command]:
        """Tell owners that a silent worker has ended: it was not cut off, and its requests have a death."""
        _, charges = self._uncharged.pop(name, (0.0, []))
        return [Send(owner, lost) for owner, lost in charges]

    def forgive(self, name: str) -> list[Command]:
        """Tell owners that a silent worker lives: it was only cut off."""
        _, charges = self._uncharged.pop(name, (0.0, []))
        return [Send(owner, replace(lost, died=False)) for owner, lost in charges]

    def uncertain(self, attempt: Attempt, now: float) -> AttemptLost | None:
        """Return what to say of an attempt on a worker that may still turn out to have ended."""
        recent = (charges for since, charges in self._uncharged.values() if now - since < UNCERTAIN_S)
        found = (lost for charges in recent for _, lost in charges if (lost.request, lost.attempt) == attempt)
        return next((replace(lost, died=False, silent=True) for lost in found), None)

    def hear_late(self, member: Member, late_s: float) -> list[Command]:
        """Place nothing on a worker while its step is late: it ends itself soon, unless the step ends yet."""
        if self._roll.get(member.name) != member or not (late_s or member.name in self._late):
            return []
        if late_s:
            self._late.add(member.name)
        else:
            self._late.discard(member.name)
        told = StepLate(member.name, late_s)
        return [Send(gateway.name, told) for gateway in self._roll.members(Role.GATEWAY)]

    def hear_holding(self, worker: Member, is_reserved: bool) -> None:
        self._is_ready |= is_reserved and worker == self._reserved

    def told(self, worker: str) -> list[Command]:
        """Return what the worker was told last of being reserved, to say it again."""
        return [Send(worker, Reserve(self._told[worker]))] if worker in self._told else []

    def may_run(self, request: Request) -> bool:
        """Return whether a request that is charged with a death may run among others now.

        Requests in pools count: a decode worker that has just started again takes many at once."""
        at_prefill, in_all = self._open.num_tried(request.service)
        num_prefill, num_decode = map(self._placement.num_workers, WORKERS)
        has_place = not num_prefill or at_prefill < TRIED_TOGETHER * num_prefill
        return not request.is_suspect and has_place and in_all < TRIED_TOGETHER * (num_prefill + num_decode)

    # --- The reserved worker

    @property
    def is_needed(self) -> bool:
        """Return whether `reserve` has anything to do."""
        return bool(self._open.suspects or self._late or self.closed)

    def reserve(self, now: float) -> tuple[list[Command], tuple[OpenRequest, Member] | None]:
        """Keep a worker free for suspects where there are any. Return what to say, and which suspect may run where."""
        suspects = self._open.suspects
        running = next((opened for opened in suspects.values() if not opened.is_waiting), None)
        first = next(iter(suspects.values()), None)
        if running is not None:
            worker = self._roll.get(running.at)
        else:
            worker = None if first is None else self._worker_for(first, now)
        commands = self._close(worker)
        if first is None or running is not None or worker is None or not self._is_ready:
            return commands, None
        return commands, (first, worker)

    def _worker_for(self, first: OpenRequest, now: float) -> Member | None:
        if self._reserved is not None and self._roll.get(self._reserved.name) == self._reserved:
            return None if self._reserved.name in self._retiring | self._late else self._reserved
        worker = self._roll.get(self._placement.emptiest or "")
        if worker is None or not self._placement.num_at(worker.name):
            return worker
        is_back_soon = any(now - lost_at < BACK_S for lost_at in self._lost_at.values())
        return None if is_back_soon or now - first.moved_at < SUSPECT_WAITS_S else worker

    def _close(self, worker: Member | None) -> list[Command]:
        """Keep this worker, and those whose step is late, free of all else; place on all others again."""
        closed = self._late if worker is None else {worker.name, *self._late}
        for name in closed - self.closed:
            self._placement.withdraw(name)
        for name in self.closed - closed:
            if (known := self._roll.get(name)) is not None and name not in self._retiring:
                self._placement.add_worker(known)
        self.closed, before, self._reserved = set(closed), self._reserved, worker
        changes = [(before, False), (worker, True)] if before != worker else []
        self._is_ready &= before == worker
        self._told |= {member.name: is_on for member, is_on in changes if member is not None}
        return [Send(member.name, Reserve(is_on)) for member, is_on in changes if member is not None]
