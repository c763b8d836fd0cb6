"""The router's core: who is there, and on which worker each open request is (open.py).

All of it is soft state. A router that has just started first gathers the members from their heartbeats:
it announces nobody before it has heard everybody, since all others take who is not announced for lost.
Then owners declare the open requests, and those who hold attempts say so (Holding). As soon as all have (recovery.py),
what was declared and nobody holds starts again with its next attempt, as others may have been told to
drop the present one.

Where an attempt is, the router knows from the frames that reach it, and any may be lost, with its receiver or
on the way. So it inquires: of a holder whose frames were lost, of prefill workers when the pool dies, which may
have been sent what they handed on, and now and then of everybody after attempts that do not move. What
a member says it does not have, and no other has been heard to have, is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alignedserve.core import WORKERS, Request, Role, ServiceClass, Sketch
from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import Event, LinkGap, Predicted, Received, TimerFired
from alignedserve.protocol.messages import (
    Attempt,
    AttemptLost,
    Cancel,
    Declare,
    Died,
    Expect,
    Figures,
    Heartbeat,
    Holding,
    Inquire,
    Member,
    Missed,
    Prefill,
    Progress,
    Refused,
    Report,
    Retire,
    Stages,
    Submit,
)
from alignedserve.router.demand import Waiting, demands
from alignedserve.router.open import STAGE_AT, OpenRequest, OpenRequests, Stage
from alignedserve.router.placing.admission import Admission, Queues
from alignedserve.router.placing.placement import Placement, Pools
from alignedserve.router.prediction.length import Lengths
from alignedserve.router.recovery import GATHER_HEARTBEATS, Recovery
from alignedserve.router.roll import Roll
from alignedserve.router.sizing import LOOK_S, Sizes, Sizing
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy
from alignedserve.scheduling.promise import promise
from alignedserve.scheduling.slo import Standing, StepTimes, Work

REFRESH_S = 5.0  # between two announcements, and before an attempt that does not move is inquired after
_GATHERED, _RECOVERED, _LIVENESS, _REFRESH, _LOOK = "gathered", "recovered", "liveness", "refresh", "look"  # timers


@dataclass(frozen=True)
class RouterLimits:
    most_open: int  # requests; more are refused
    heartbeat_s: float
    death_s: float  # silence after which a member counts as dead
    policy: Policy = DEFAULT_POLICY
    block_size: int = 16  # tokens of a pair on the workers' devices
    kv_tokens: int = 0  # that a decode worker's device holds; 0: not known
    queues: Queues = Queues()  # noqa: RUF009  (frozen)
    sizes: Sizes = Sizes()  # noqa: RUF009  (frozen)


class RouterCore:
    def __init__(self, me: Member, limits: RouterLimits, now: float) -> None:
        self._limits = limits
        self._roll = Roll(me)
        self._heard_at: dict[str, float] = {}
        self._dead: dict[str, int] = {}  # name -> the incarnation that was lost last
        self._retiring: set[str] = set()  # workers that get nothing new
        self._left: set[str] = set()  # nodes without a decode worker for what is in their pool, nor one that is to come
        self._open = OpenRequests()
        self._placement = Placement(limits.policy, limits.block_size, limits.kv_tokens)
        self._admission = Admission(limits.policy, limits.most_open, limits.queues)
        self._lengths = Lengths(limits.policy)
        self._sizing = Sizing(limits.sizes)
        self._me = me
        self._shown: list[Stages] = []  # the stages of each class that gateways know of
        self._recovery, self._started_at = Recovery(now), now

    def start(self) -> list[Command]:
        gathered_at = self._started_at + GATHER_HEARTBEATS * self._limits.heartbeat_s
        refresh = SetTimer(_REFRESH, self._started_at + REFRESH_S)
        look = SetTimer(_LOOK, self._started_at + LOOK_S)
        return [SetTimer(_GATHERED, gathered_at), self._watch(self._started_at), refresh, look]

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Received(message=Heartbeat(member)):
                commands += self._heard(member, now)
            case Received(message=Died(name, incarnation)):
                commands += self._died(name, incarnation, now)
            case Received(message=Retire() as retire):
                commands += self._retire(retire)
            case Received(sender, Submit(request, sketch), incarnation) if self._member(sender, incarnation):
                commands += self._submit(request, sketch, now)
            case Received(message=Cancel(request, attempt)):
                commands += self._cancel(request, attempt)
            case Received(sender, Progress() as progress, incarnation) if known := self._member(sender, incarnation):
                commands += self._progress(known, progress, now)
            case Received(sender, Report() as report, incarnation) if self._member(sender, incarnation):
                self._placement.reported(sender, report)
            case Received(sender, Figures() as figures, incarnation) if self._member(sender, incarnation):
                named = replace(figures, member=sender)
                commands += [Send(gateway.name, named) for gateway in self._roll.of(Role.GATEWAY)]
            case Received(sender, Declare(requests, is_last), incarnation) if self._member(sender, incarnation):
                for declared in requests:
                    commands += self._declared(declared, now)
                if is_last:
                    self._recovery.heard_all(sender)
            case Received(sender, Holding(attempts, free_pairs, goes), incarnation) if known := self._member(
                sender, incarnation
            ):
                commands += self._goes(known) if goes and sender not in self._retiring else []
                commands += self._hold(known, attempts, now)
                self._placement.has_room(known.name, free_pairs)
                self._recovery.heard_all(sender)
            case Received(sender, Inquire(attempts), incarnation) if self._member(sender, incarnation):
                commands += self._inquired(sender, attempts, now)
            case Received(sender, Missed()) if known := self._roll.get(sender):
                commands += self._put_right(known, now)
            case LinkGap(sender) if known := self._roll.get(sender):
                commands += [Send(sender, Missed()), *self._put_right(known, now)]
            case Predicted() as answer:
                commands += self._predicted(answer)
            case TimerFired(name) if name == _GATHERED:
                ends_at = self._recovery.gathered(self._roll.others, now)
                commands += [*self._roll.all_told(), SetTimer(_RECOVERED, ends_at)]
            case TimerFired(name) if name == _RECOVERED and self._recovery.is_on:
                commands += self._recovered(now)
            case TimerFired(name) if name == _LIVENESS:
                commands += [*self._silent(now), self._watch(now)]
            case TimerFired(name) if name == _REFRESH:
                commands += [*self._refresh(now), SetTimer(_REFRESH, now + REFRESH_S)]
            case TimerFired(name) if name == _LOOK:
                commands += [*self._show(), *self._size(now), SetTimer(_LOOK, now + LOOK_S)]
        return commands + self._recover(now) + self._place(now)

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        num_sketches = self._lengths.num_open
        return {"requests": len(self._open), "attempts of others": self._recovery.num_held, "sketches": num_sketches}

    # --- Members

    def _heard(self, member: Member, now: float) -> list[Command]:
        if member.incarnation <= self._dead.get(member.name, -1):
            # It was only frozen: that the roll does not name it tells it.
            return [] if self._recovery.is_gathering else [self._roll.told(member)]
        known = self._roll.get(member.name)
        if known is not None and known.incarnation > member.incarnation:
            return []
        self._heard_at[member.name] = now
        if known == member:
            return []
        self._roll.add(member)
        self._recovery.announced(member)
        lost = [] if known is None else self._lost(known, now)
        if member.role in WORKERS:
            self._retiring.discard(member.name)
            self._placement.met(member)
        if member.role is Role.DECODE:
            self._left.discard(member.node)
        return [*self._news(member), *self._shown_to([member]), *lost]

    def _died(self, name: str, incarnation: int, now: float) -> list[Command]:
        known = self._roll.get(name)
        self._dead[name] = max(incarnation, self._dead.get(name, incarnation))
        if known is None or known.incarnation != incarnation or known == self._me:
            return []
        self._roll.remove(name)
        self._heard_at.pop(name, None)
        self._retiring.discard(name)
        self._placement.lost(name)
        self._recovery.heard_all(name)
        return [*self._news(known), *self._lost(known, now)]

    def _retire(self, retire: Retire) -> list[Command]:
        """What it has it may finish; nothing new is placed there."""
        known = self._roll.get(retire.name)
        if known is None or known.incarnation != retire.incarnation or known.role not in WORKERS:
            return []
        return [Send(known.name, retire), *self._goes(known)]

    def _goes(self, worker: Member) -> list[Command]:
        """What is in the pool of its node goes on elsewhere, if it is the last one there that decodes."""
        self._retiring.add(worker.name)
        self._placement.lost(worker.name)
        self._sizing.retires(worker.role, self._placement.num_workers(worker.role))
        pool = self._pools.get(worker.node)
        if worker.role is not Role.DECODE or pool is None or not self._placement.decodes_only_elsewhere(worker.node):
            return []
        self._left.add(worker.node)
        return [command for one in list(self._open) if one.at == pool for command in self._lose(one)]

    def _size(self, now: float) -> list[Command]:
        """As many workers as the load takes."""
        if self._recovery.is_on or not self._sizing.is_on:
            return []
        waiting = (
            Waiting(one.request, one.stage is Stage.POOL, one.moved_at)
            for one in self._open
            if one.stage is not Stage.DECODE
        )
        wanted = demands(waiting, self._placement, self._admission, self._limits.sizes.be_wait_s, now)
        scale = self._sizing.look(wanted, now)
        return [] if scale is None else [scale]

    def _silent(self, now: float) -> list[Command]:
        silent = [name for name, at in self._heard_at.items() if now - at > self._limits.death_s]
        members = [member for name in silent if (member := self._roll.get(name)) is not None]
        return [command for one in members for command in self._died(one.name, one.incarnation, now)]

    def _watch(self, now: float) -> SetTimer:
        return SetTimer(_LIVENESS, now + self._limits.heartbeat_s)

    def _member(self, sender: str, incarnation: int) -> Member | None:
        """What a lost member said last comes too late: what it had has been given up."""
        known = self._roll.get(sender)
        return known if known is not None and known.incarnation == incarnation else None

    def _news(self, of: Member) -> list[Command]:
        return [] if self._recovery.is_gathering else self._roll.news(of)

    def _lost(self, member: Member, now: float) -> list[Command]:
        """What was on a lost worker or in a lost pool starts again; what a lost owner opened ends."""
        commands: list[Command] = []
        self._placement.renewed(member.name)
        for one in list(self._open):
            if one.request.owner == member.name:
                commands += self._drop(one)
            elif one.at == member.name:
                commands += self._lose(one)
        if member.role is Role.POOL:  # it may have been sent what it never told of
            self._placement.pool_lost(member.node)
            commands += self._inquire([one for one in self._open if one.stage is Stage.PREFILL], now)
        return commands

    # --- Requests

    def _submit(self, request: Request, sketch: Sketch | None, now: float) -> list[Command]:
        known = self._open.get(request.id)
        if known is not None:
            if known.request.attempt >= request.attempt:
                return []
        elif request.attempt == 0:
            ahead = self._placement.ahead_of(request, self._pools)
            if (refusal := self._admission.refusal(request, ahead, now, self._is_line(request))) is not None:
                return [Send(request.owner, Refused(request.id, 0, refusal.why, refusal.retry_after_s))]
        self._add(OpenRequest(request, now))
        if not self._is_line(request):
            self._admission.queued(request)
        asked = self._lengths.opened(request, sketch)
        return [*(self._cancel_everywhere(request.id, request.attempt - 1) if request.attempt else []), *asked]

    def _is_line(self, request: Request) -> bool:
        """Of a batch job."""
        owner = self._roll.get(request.owner)
        return owner is not None and owner.role is Role.JOBS

    def _predicted(self, answer: Predicted) -> list[Command]:
        """It is placed already, or waits for a worker: nobody waits for this."""
        one = self._open.current((answer.request, answer.attempt))
        if one is None:
            return []
        one.request = replace(one.request, estimate=answer.estimate)
        self._admission.opened(one.request)
        told = Expect(answer.request, answer.attempt, answer.estimate)
        return [] if one.stage is Stage.UNPLACED else [Send(one.at, told)]

    def _declared(self, request: Request, now: float) -> list[Command]:
        known = self._open.get(request.id)
        if known is not None and known.request.attempt >= request.attempt:
            return []
        one = self._add(OpenRequest(request, now, declared=True))
        if not self._recovery.is_on:
            return self._lose(one)
        holder = self._recovery.holder((request.id, request.attempt))
        return self._came(one, holder, now) if holder is not None else []

    def _hold(self, member: Member, attempts: tuple[Attempt, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        for key in attempts:
            one = self._open.current(key)
            if one is None:
                self._recovery.hold(key, member)
            elif one.stage.value < STAGE_AT[member.role].value:
                commands += self._came(one, member, now)
        return commands

    def _recover(self, now: float) -> list[Command]:
        """Without waiting longer than for what may still be found."""
        if not self._recovery.have_all_spoken:
            return []
        if not self._nowhere:
            return self._recovered(now)
        ends_at = self._recovery.settle(now)
        return [] if ends_at is None else [SetTimer(_RECOVERED, ends_at)]

    def _recovered(self, now: float) -> list[Command]:
        self._recovery.end(now)
        lost = [command for one in self._nowhere for command in self._lose(one)]
        return [*lost, *self._shown_to(self._roll.of(Role.GATEWAY))]

    @property
    def _nowhere(self) -> list[OpenRequest]:
        """What its owner has declared, and nobody holds."""
        return [one for one in self._open.unplaced.values() if one.declared]

    def _shown_to(self, members: Iterable[Member]) -> list[Command]:
        """How long it took, to those gateways among them."""
        self._shown = []
        if self._recovery.took_s is None:
            return []
        figures = Figures(rebuilt_s=self._recovery.took_s, member=self._me.name)
        return [Send(one.name, figures) for one in members if one.role is Role.GATEWAY]

    def _show(self) -> list[Command]:
        """To all gateways where the open requests are, unless they know."""
        stages = [self._open.stages(service) for service in ServiceClass]
        if self._recovery.is_on or stages == self._shown:
            return []
        self._shown = stages
        figures = Figures(rt=stages[0], be=stages[1], member=self._me.name)
        return [Send(gateway.name, figures) for gateway in self._roll.of(Role.GATEWAY)]

    def _cancel(self, request: str, attempt: int) -> list[Command]:
        one = self._open.get(request)
        if one is None or one.request.attempt > attempt:
            return []
        return self._drop(one)

    def _drop(self, one: OpenRequest) -> list[Command]:
        self._remove(one)
        return self._cancel_everywhere(one.request.id, one.request.attempt)

    def _lose(self, one: OpenRequest) -> list[Command]:
        """The attempt is lost; its owner submits the next one."""
        self._remove(one)
        request = one.request
        lost = Send(request.owner, AttemptLost(request.id, request.attempt))
        return [*self._cancel_everywhere(request.id, request.attempt), lost]

    def _cancel_everywhere(self, request: str, attempt: int) -> list[Command]:
        """To all that may hold it: it may have gone a stage further than we have heard."""
        return [Send(member.name, Cancel(request, attempt)) for member in self._roll.of(*STAGE_AT)]

    def _progress(self, member: Member, progress: Progress, now: float) -> list[Command]:
        commands: list[Command] = []
        if member.role in WORKERS:
            self._placement.progressed(member.name, progress.backlog, progress.free_pairs)
        for key in (*progress.committed, *progress.joined):
            one = self._open.current(key)
            if one is None:
                commands += self._not_wanted(key, member)
            elif one.stage.value <= STAGE_AT[member.role].value:  # `joined` may be heard before `committed`
                self._admission.began(one.request.id)
                commands += self._came(one, member, now)
        for key in progress.returned:
            commands += self._returned(key, member, now)
        lengths = dict(zip(progress.ended, progress.lengths, strict=False))
        for key in progress.ended:
            self._recovery.ended(key)
            if (one := self._open.current(key)) is not None:
                commands += self._lengths.ended(one.request, lengths.get(key, 0))
                self._admission.ended(one.request, now)
                self._remove(one)
        for key in (*progress.lost, *progress.unknown):
            one = self._open.current(key)
            if one is not None and (one.at == member.name or key in progress.lost):  # it may have gone on meanwhile
                commands += self._lose(one)
        return commands

    def _returned(self, key: Attempt, worker: Member, now: float) -> list[Command]:
        """It waits in its node's pool again, unless it has joined elsewhere since, or the pool has died."""
        self._recovery.returned(key, worker)
        one = self._open.current(key)
        if one is None or one.at != worker.name:
            return []
        pool = self._roll.get(self._pools.get(worker.node, ""))
        if pool is None:
            return self._lose(one)
        return self._came(one, pool, now)

    def _not_wanted(self, key: Attempt, member: Member) -> list[Command]:
        """Its owner may declare it yet; otherwise a Cancel was lost."""
        if self._recovery.is_on:
            self._recovery.hold(key, member)
            return []
        return [Send(member.name, Cancel(*key))]

    # --- Inquiries

    def _inquired(self, owner: str, attempts: tuple[Attempt, ...], now: float) -> list[Command]:
        """An owner has heard nothing for long: of what is not known here, or of what is said to be somewhere."""
        here = [one for key in attempts if (one := self._open.current(key)) is not None]
        if self._recovery.is_on:
            return []  # it will be declared
        lost = [key for key in attempts if self._open.is_unknown(key)]
        return [*(Send(owner, AttemptLost(*key)) for key in lost), *self._inquire(here, now)]

    def _put_right(self, member: Member, now: float) -> list[Command]:
        """Frames to or from a member were lost: of those to it, the roll; of those from it, where things are."""
        told: list[Command] = [] if self._recovery.is_gathering else [self._roll.told(member)]
        if member.name in self._retiring:
            told.append(Send(member.name, Retire(member.name, member.incarnation)))
        return [*told, *self._inquire(self._open, now)]

    def _refresh(self, now: float) -> list[Command]:
        still = [one for one in self._open if now - one.moved_at >= REFRESH_S]
        told = [] if self._recovery.is_gathering else self._roll.all_told()
        return [*told, *self._inquire(still, now)]

    def _inquire(self, these: Iterable[OpenRequest], now: float) -> list[Command]:
        """Of whoever is said to have them."""
        at: dict[str, list[Attempt]] = {}
        for one in these:
            if one.stage is not Stage.UNPLACED:
                one.moved_at = now
                at.setdefault(one.at, []).append(one.key)
        return [Send(name, Inquire(tuple(keys))) for name, keys in at.items()]

    # --- Placement

    def _place(self, now: float) -> list[Command]:
        """Every unplaced prompt, the most urgent first; none before we know what is held already."""
        if self._recovery.is_on or not self._open.unplaced:
            return []
        commands: list[Command] = []
        pools = self._pools
        if not self._placement.runs_prompts(pools):
            return []
        for one in self._most_urgent_first(now):
            name = self._placement.worker_for(one.request, pools)
            if name is None or (worker := self._roll.get(name)) is None:
                break
            decode = self._placement.placed(name, one.request, pools)
            self._move(one, worker, now)
            commands.append(Send(name, Prefill(one.request, decode)))
        return commands

    @property
    def _pools(self) -> Pools:
        return {pool.node: pool.name for pool in self._roll.of(Role.POOL)}

    def _most_urgent_first(self, now: float) -> list[OpenRequest]:
        """They have waited for a worker, all of them as long as there was none."""
        unplaced = self._open.unplaced
        if len(unplaced) < 2:
            return list(unplaced.values())
        policy, times = self._limits.policy, StepTimes()

        def standing(one: OpenRequest) -> Standing:
            return promise(one.request, policy).standing(now, Work(len(one.request.prompt)), times)

        return list(policy.ordering.sort(unplaced.values(), standing, times, policy.late))

    # --- The open requests

    def _add(self, one: OpenRequest) -> OpenRequest:
        """In the place of its attempt before."""
        if (known := self._open.get(one.request.id)) is not None:
            self._remove(known)
        self._open.add(one)
        self._admission.opened(one.request)
        return one

    def _move(self, one: OpenRequest, to: Member, now: float) -> None:
        self._leave(one)
        self._placement.came(to.name)
        self._open.move(one, to, now)

    def _came(self, one: OpenRequest, to: Member, now: float) -> list[Command]:
        """To a pool from which nobody decodes: then it starts again elsewhere."""
        if STAGE_AT[to.role] is not Stage.PREFILL and one.stage in (Stage.UNPLACED, Stage.PREFILL):
            self._placement.kept(one.request, to.node, self._pools)
        self._move(one, to, now)
        return self._lose(one) if to.role is Role.POOL and to.node in self._left else []

    def _remove(self, one: OpenRequest) -> None:
        self._leave(one)
        self._lengths.closed(one.request.id)
        self._admission.closed(one.request)
        self._open.remove(one)

    def _leave(self, one: OpenRequest) -> None:
        """Where it is now."""
        if one.stage is not Stage.UNPLACED:
            self._placement.left(one.at)
