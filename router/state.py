"""The router's core: who is there, and on which worker each open request is.

    Submit ─▶ unplaced ─▶ PREFILL ─▶ POOL ─▶ DECODE ─▶ ended
              (no worker)    │         │        │
                             └─────────┴────────┴──▶ AttemptLost to the owner, which submits the next

All of it is soft state. A router that has just started first gathers the members from their heartbeats:
it announces nobody before it has heard everybody, since all others take who is not announced for lost.
Then owners declare the open requests, and those who hold attempts say so (Holding); after RECOVERY_S,
what was declared and nobody holds starts again with its next attempt, as others may have been told to
drop the present one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from alignedserve.core import Request, Role
from alignedserve.messages import (
    AttemptLost,
    Cancel,
    Command,
    Declare,
    Died,
    Event,
    Heartbeat,
    Holding,
    Member,
    Members,
    Prefill,
    Progress,
    Received,
    Refused,
    Send,
    SetTimer,
    Submit,
    TimerFired,
)

GATHER_HEARTBEATS = 2  # intervals
RECOVERY_S = 1.0
_GATHERED, _RECOVERED, _LIVENESS = "gathered", "recovered", "liveness"  # timers


class Stage(Enum):
    UNPLACED = "unplaced"
    PREFILL = "prefill"
    POOL = "pool"
    DECODE = "decode"


_STAGE_AT = {Role.PREFILL: Stage.PREFILL, Role.POOL: Stage.POOL, Role.DECODE: Stage.DECODE}


@dataclass
class _Open:
    request: Request
    stage: Stage = Stage.UNPLACED
    at: str = ""  # the member that has it, when it is placed
    declared: bool = False  # by an owner that has seen an earlier router


@dataclass(frozen=True)
class RouterLimits:
    most_open: int  # requests; more are refused
    heartbeat_s: float
    death_s: float  # silence after which a member counts as dead


class RouterCore:
    def __init__(self, me: Member, limits: RouterLimits, now: float) -> None:
        self._limits = limits
        self._members: dict[str, Member] = {me.name: me}
        self._heard_at: dict[str, float] = {}
        self._open: dict[str, _Open] = {}
        self._held: dict[tuple[str, int], Member] = {}  # attempts that were declared held before their request was
        self._me = me
        self._gathering = True
        self._recovering = True
        self._started_at = now

    def start(self) -> list[Command]:
        gathered_at = self._started_at + GATHER_HEARTBEATS * self._limits.heartbeat_s
        return [SetTimer(_GATHERED, gathered_at), self._watch(self._started_at)]

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Received(message=Heartbeat(member)):
                commands += self._heard(member, now)
            case Received(message=Died(name, incarnation)):
                commands += self._died(name, incarnation)
            case Received(sender, Submit(request), incarnation) if self._counts(sender, incarnation):
                commands += self._submit(request)
            case Received(message=Cancel(request, attempt)):
                commands += self._cancel(request, attempt)
            case Received(sender, Progress() as progress, incarnation) if self._counts(sender, incarnation):
                commands += self._progress(sender, progress)
            case Received(sender, Declare(requests), incarnation) if self._counts(sender, incarnation):
                for declared in requests:
                    commands += self._declared(declared)
            case Received(sender, Holding(attempts), incarnation) if self._counts(sender, incarnation):
                self._hold(self._members[sender], attempts)
            case TimerFired(name) if name == _GATHERED:
                self._gathering = False
                commands += [*self._announce(), SetTimer(_RECOVERED, now + RECOVERY_S)]
            case TimerFired(name) if name == _RECOVERED:
                commands += self._recovered()
            case TimerFired(name) if name == _LIVENESS:
                commands += [*self._silent(now), self._watch(now)]
        return commands + self._place()

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {"requests": len(self._open), "attempts of others": len(self._held)}

    # --- Members

    def _heard(self, member: Member, now: float) -> list[Command]:
        known = self._members.get(member.name)
        if known is not None and known.incarnation > member.incarnation:
            return []
        self._heard_at[member.name] = now
        if known == member:
            return []
        commands = [] if known is None else self._lose_requests_of(known)
        self._members[member.name] = member
        return commands + self._announce()

    def _died(self, name: str, incarnation: int) -> list[Command]:
        known = self._members.get(name)
        if known is None or known.incarnation != incarnation or known == self._me:
            return []
        del self._members[name]
        self._heard_at.pop(name, None)
        return self._announce() + self._lose_requests_of(known)

    def _silent(self, now: float) -> list[Command]:
        silent = [name for name, at in self._heard_at.items() if now - at > self._limits.death_s]
        return [command for name in silent for command in self._died(name, self._members[name].incarnation)]

    def _watch(self, now: float) -> SetTimer:
        return SetTimer(_LIVENESS, now + self._limits.heartbeat_s)

    def _counts(self, sender: str, incarnation: int) -> bool:
        """What a lost member said last comes too late: what it had has been given up."""
        known = self._members.get(sender)
        return known is not None and known.incarnation == incarnation

    def _announce(self) -> list[Command]:
        if self._gathering:
            return []
        message = Members(tuple(self._members.values()))
        return [Send(member.name, message) for member in self._members.values() if member != self._me]

    def _lose_requests_of(self, member: Member) -> list[Command]:
        """What was on a lost worker or in a lost pool starts again; what a lost owner opened ends."""
        commands: list[Command] = []
        for one in list(self._open.values()):
            if one.request.owner == member.name:
                commands += self._drop(one)
            elif one.at == member.name:
                commands += self._lose(one)
        return commands

    # --- Requests

    def _submit(self, request: Request) -> list[Command]:
        known = self._open.get(request.id)
        if known is not None:
            if known.request.attempt >= request.attempt:
                return []
        elif request.attempt == 0 and len(self._open) >= self._limits.most_open:
            why = f"{len(self._open)} requests are open, the limit is {self._limits.most_open}"
            return [Send(request.owner, Refused(request.id, 0, why, retry_after_s=1.0))]
        self._open[request.id] = _Open(request)
        return self._cancel_everywhere(request.id, request.attempt - 1) if request.attempt else []

    def _declared(self, request: Request) -> list[Command]:
        known = self._open.get(request.id)
        if known is not None and known.request.attempt >= request.attempt:
            return []
        self._open[request.id] = one = _Open(request, declared=True)
        if not self._recovering:
            return self._lose(one)
        holder = self._held.get((request.id, request.attempt))
        if holder is not None:
            one.stage, one.at = _STAGE_AT[holder.role], holder.name
        return []

    def _hold(self, member: Member, attempts: tuple[tuple[str, int], ...]) -> None:
        for request, attempt in attempts:
            one = self._open.get(request)
            if one is not None and one.request.attempt == attempt and one.stage is Stage.UNPLACED:
                one.stage, one.at = _STAGE_AT[member.role], member.name
            elif one is None:
                self._held_before((request, attempt), member)

    def _held_before(self, key: tuple[str, int], member: Member) -> None:
        """Its owner may declare it yet. A decode worker's word is the later one."""
        held = self._held.get(key)
        if self._recovering and (held is None or held.role is not Role.DECODE):
            self._held[key] = member

    def _recovered(self) -> list[Command]:
        self._recovering = False
        self._held.clear()
        nowhere = [one for one in self._open.values() if one.declared and one.stage is Stage.UNPLACED]
        return [command for one in nowhere for command in self._lose(one)]

    def _cancel(self, request: str, attempt: int) -> list[Command]:
        one = self._open.get(request)
        if one is None or one.request.attempt > attempt:
            return []
        return self._drop(one)

    def _drop(self, one: _Open) -> list[Command]:
        del self._open[one.request.id]
        return self._cancel_everywhere(one.request.id, one.request.attempt)

    def _lose(self, one: _Open) -> list[Command]:
        """The attempt is lost; its owner submits the next one."""
        del self._open[one.request.id]
        request = one.request
        lost = Send(request.owner, AttemptLost(request.id, request.attempt))
        return [*self._cancel_everywhere(request.id, request.attempt), lost]

    def _cancel_everywhere(self, request: str, attempt: int) -> list[Command]:
        """To all that may hold it: it may have gone a stage further than we have heard."""
        holders = [member for member in self._members.values() if member.role in _STAGE_AT]
        return [Send(member.name, Cancel(request, attempt)) for member in holders]

    def _progress(self, sender: str, progress: Progress) -> list[Command]:
        member = self._members[sender]
        for key in progress.committed:
            one = self._current(key)
            if one is None:
                self._held_before(key, member)
            elif one.stage is not Stage.DECODE:  # a worker may have said `joined` before we hear of the commit
                one.stage, one.at = Stage.POOL, sender
        for key in progress.joined:
            one = self._current(key)
            if one is None:
                self._held_before(key, member)
            else:
                one.stage, one.at = Stage.DECODE, sender
        for key in progress.ended:
            self._held.pop(key, None)
            if self._current(key) is not None:
                del self._open[key[0]]
        lost = [one for key in progress.lost if (one := self._current(key)) is not None]
        return [command for one in lost for command in self._lose(one)]

    def _current(self, key: tuple[str, int]) -> _Open | None:
        one = self._open.get(key[0])
        return one if one is not None and one.request.attempt == key[1] else None

    # --- Placement

    def _place(self) -> list[Command]:
        """Every unplaced prompt, to the worker with fewest; none before we know what is held already."""
        if self._recovering:
            return []
        commands: list[Command] = []
        for one in self._open.values():
            if one.stage is not Stage.UNPLACED:
                continue
            worker = self._least_loaded()
            if worker is None:
                break
            one.stage, one.at = _STAGE_AT[worker.role], worker.name
            commands.append(Send(worker.name, Prefill(one.request)))
        return commands

    def _least_loaded(self) -> Member | None:
        members = self._members.values()
        workers = [member for member in members if member.role is Role.PREFILL]
        if not workers and not any(member.role is Role.POOL for member in members):
            workers = [member for member in members if member.role is Role.DECODE]
        at = [one.at for one in self._open.values()]
        return min(workers, key=lambda worker: (at.count(worker.name), worker.name), default=None)
