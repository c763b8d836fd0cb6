"""The router's core: knows the members, and which member has each open request (lifecycle.py).

All of this is soft state. A router that has just started first gathers the members from their heartbeats. It announces
no member before it has heard them all, since every part takes a member that is not announced for lost. Then owners
declare their open requests, and the members that hold attempts say so (Holding). When all have answered (members.py),
the router gives up each declared attempt that no member holds: its owner submits the next one. Others may have been
told to drop the present attempt, so the router does not place it again.

The router learns from frames where an attempt is, and any frame may be lost, with its receiver or on the way. So it
inquires: it asks a member whose frames were lost; it asks prefill workers when a pool dies, since that pool may have
been sent what they handed on; and now and then it asks every member about attempts that do not move. An attempt that a
member says it does not have, and that no other member was heard to have, is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

from alignedserve.core import KEEPS_ALL, WORKERS, Request, Retention, Role, ServiceClass, Sketch
from alignedserve.explain.decisions import DecisionRing, Kind
from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import AtWork, Event, LinkGap, Received, TimerFired
from alignedserve.protocol.messages import (
    Acquit,
    AskDecisions,
    Attempt,
    AttemptLost,
    Cancel,
    Decisions,
    Declare,
    Died,
    Figures,
    Heartbeat,
    Holding,
    Infeasible,
    InLine,
    Inquire,
    Member,
    Missed,
    Place,
    Prefill,
    Progress,
    Refused,
    Report,
    Retire,
    Submit,
)
from alignedserve.router.lengths import OutputLengths
from alignedserve.router.lifecycle import PLACES, Fact, OpenRequest, OpenRequests, State
from alignedserve.router.members import GATHER_HEARTBEATS, MemberList, Recovery
from alignedserve.router.placing.admission import NOTHING_AHEAD, PATIENCE_S, Admission, Queues, WorkAhead, is_infeasible
from alignedserve.router.placing.line import NO_TURN, TOLD_S, Turn
from alignedserve.router.placing.placement import Placement
from alignedserve.router.sizing import LOOK_S, Sizes, Sizing, demands
from alignedserve.router.suspects import Suspects
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy
from alignedserve.scheduling.slo import Standing, StepTimes, Work

REFRESH_S = 5.0  # between two announcements, and before the router inquires after an attempt that does not move
_NOTED = MappingProxyType(
    {State.ENDED: Kind.ENDED, State.LOST: Kind.LOST, State.CANCELLED: Kind.CANCELLED, State.REPLACED: Kind.REPLACED}
)
_GATHERED, _RECOVERED, _LIVENESS, _REFRESH, _LOOK = "gathered", "recovered", "liveness", "refresh", "look"  # timers


@dataclass(frozen=True)
class RouterLimits:
    most_open: int  # the router refuses requests beyond this number
    heartbeat_s: float
    death_s: float  # silence after which a member counts as dead
    policy: Policy = DEFAULT_POLICY
    block_size: int = 16  # tokens of a block on the workers' devices
    kv_tokens: int = 0  # tokens that a decode worker's device holds; 0: not known
    queues: Queues = Queues()  # noqa: RUF009  (frozen)
    sizes: Sizes = Sizes()  # noqa: RUF009  (frozen)
    prompts_on: Role = Role.PREFILL  # the role of the workers that run the prompts
    retention: Retention = KEEPS_ALL  # of requests on decode workers
    lends: bool = False  # whether prefill workers decode, too
    patience_s: float = PATIENCE_S  # in which a chat in line gets its first token, or is asked to come again


class RouterCore:
    def __init__(
        self,
        me: Member,
        limits: RouterLimits,
        now: float,
        at_work: AtWork | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        """`lengths` is what is known of outputs at the start: nothing, as a rule."""
        self._limits, self._at_work = limits, at_work or AtWork()
        self._roll = MemberList(me)
        self._heard_at: dict[str, float] = {}
        self._looks_at = now + limits.heartbeat_s  # for silent members
        self._dead: dict[str, int] = {}  # member -> its newest incarnation that was lost
        self._died: dict[str, int] = {}  # member -> its incarnation whose process ended last
        self._retiring: set[str] = set()  # workers that get no new requests
        self._left: set[str] = set()  # nodes with a pool from which no decode worker fetches any more
        self._without_decode: set[str] = set()  # nodes with a pool and no decode worker at the last look
        self._open = OpenRequests()
        self._placement = Placement(
            limits.policy, limits.block_size, limits.kv_tokens, limits.prompts_on, limits.retention, limits.lends
        )
        self._suspects = Suspects(self._roll, self._open, self._placement, self._retiring)
        self._admission = Admission(limits.policy, limits.most_open, limits.queues, limits.retention, limits.patience_s)
        self._lengths = lengths or OutputLengths()
        self._sizing = Sizing(limits.sizes)
        self._decisions = DecisionRing()
        self._me = me
        self._figures: dict[str, Figures] = {}  # member -> what it told last of what it has
        self._recovery, self._started_at = Recovery(now), now

    def start(self) -> list[Command]:
        gathered_at = self._started_at + GATHER_HEARTBEATS * self._limits.heartbeat_s
        refresh = SetTimer(_REFRESH, self._started_at + REFRESH_S)
        look = SetTimer(_LOOK, self._started_at + LOOK_S)
        return [SetTimer(_GATHERED, gathered_at), self._watch_liveness(self._started_at), refresh, look]

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        self._decisions.now = now
        match event:  # the most frequent first
            case Received(sender, Progress() as progress, incarnation) if known := self._alive(sender, incarnation):
                commands += self._hear_progress(known, progress, now)
            case Received(sender, Progress(joined=joined), incarnation) if self._died.get(sender) == incarnation:
                commands += self._hear_last_joined(joined)
            case Received(sender, Submit(request, sketch), incarnation) if self._alive(sender, incarnation):
                commands += self._open_request(request, sketch, now)
            case Received(sender, Report() as report, incarnation) if self._alive(sender, incarnation):
                self._placement.reported(sender, report, now)
            case Received(message=Heartbeat(member, late_s)):
                commands += [*self._hear_heartbeat(member, now), *self._suspects.hear_late(member, late_s)]
            case Received(message=Died(name, incarnation, felled)):
                is_worker = (known := self._roll.get(name)) is not None and known.role in WORKERS
                lost = [] if is_worker else self._charge_all(felled)  # a worker's end is charged to all that it had
                commands += [*lost, *self._declare_dead(name, incarnation, now, died=True), *self._charge_all(felled)]
            case Received(message=Retire() as retire):
                commands += self._retire(retire)
            case Received(message=Cancel(request, attempt)):
                commands += self._cancel(request, attempt)
            case Received(message=Acquit(request, attempt)) if opened := self._open.current((request, attempt)):
                self._open.acquit(opened)
            case Received(sender, Figures() as figures, incarnation) if self._alive(sender, incarnation):
                commands += self._hand_on(replace(figures, member=sender))
            case Received(sender, Declare(requests, is_last), incarnation) if self._alive(sender, incarnation):
                for declared in requests:
                    self._at_work.on(((declared.id, declared.attempt),))
                    commands += self._open_declared(declared, now)
                if is_last:
                    self._recovery.heard_all(sender)
            case Received(sender, Holding(attempts, free_blocks, retires, reserved, waiting), incarnation) if (
                known := self._alive(sender, incarnation)
            ):
                if retires and sender not in self._retiring:
                    commands += self._stop_placing_on(known)
                commands += self._hear_holding(known, attempts, now)
                self._recovery.waiting |= dict.fromkeys(waiting)
                self._placement.note_room(known.name, free_blocks)
                self._recovery.heard_all(sender)
                self._suspects.hear_holding(known, reserved)
            case Received(sender, Inquire(attempts), incarnation) if self._alive(sender, incarnation):
                commands += self._answer_inquiry(sender, attempts, now)
            case Received(sender, Missed()) if known := self._roll.get(sender):
                commands += self._repair_link(known, now)
            case LinkGap(sender) if known := self._roll.get(sender):
                commands += [Send(sender, Missed()), *self._repair_link(known, now)]
            case Received(sender, AskDecisions(number, name)) if self._roll.get(sender) is not None:
                commands.append(Send(sender, Decisions(number, now, self._decisions.about(name))))
            case TimerFired(name) if name == _GATHERED:
                ends_at = self._recovery.gathered(self._roll.others, now)
                commands += [*self._roll.announce_all(), SetTimer(_RECOVERED, ends_at)]
            case TimerFired(name) if name == _RECOVERED and self._recovery.is_on:
                commands += self._finish_recovery(now)
            case TimerFired(name) if name == _LIVENESS:
                commands += [*self._find_silent(now), self._watch_liveness(now)]
            case TimerFired(name) if name == _REFRESH:
                commands += [*self._refresh(now), *self._tell_places(now), SetTimer(_REFRESH, now + REFRESH_S)]
            case TimerFired(name) if name == _LOOK:
                commands += [*self._send_counts(), *self._ask_for_workers(now), SetTimer(_LOOK, now + LOOK_S)]
        if self._recovery.is_on:
            commands += self._recover(now)
        if not self._recovery.is_on:
            commands += self._place(now)
        return commands

    @property
    def held(self) -> dict[str, int]:
        """Return what the router holds now: nothing when no request is open."""
        num_sketches, num_held = self._lengths.num_open, self._recovery.num_held
        return {"requests": len(self._open), "attempts of others": num_held, "sketches": num_sketches}

    # --- Members

    def _hear_heartbeat(self, member: Member, now: float) -> list[Command]:
        if member.incarnation <= self._dead.get(member.name, -1):
            forgiven = self._suspects.forgive(member.name)
            # The member was only frozen: a roll that does not name it tells it that it was given up.
            return forgiven if self._recovery.is_gathering else [*forgiven, self._roll.roll_for(member)]
        known = self._roll.get(member.name)
        if known is not None and known.incarnation > member.incarnation:
            return []
        self._heard_at[member.name] = now
        if known == member:
            return []
        self._roll.add(member)
        self._recovery.announced(member)
        lost = self._suspects.charge(member.name) if known is None else self._give_up_all_of(known, now, died=True)
        if member.role in WORKERS:
            self._retiring.discard(member.name)
            self._suspects.began(member)
            self._placement.add_worker(member)
        if member.role is Role.DECODE:
            self._left.discard(member.node)
        figures = [*self._recovery_time, *self._figures.values()] if member.role is Role.GATEWAY else []
        return [*self._announce_change(member), *(Send(member.name, told) for told in figures), *lost]

    def _declare_dead(self, name: str, incarnation: int, now: float, died: bool = False) -> list[Command]:
        """Give up what the member had. `died` says whether its process has ended: one that is silent may only be cut
        off."""
        known = self._roll.get(name)
        self._dead[name] = max(incarnation, self._dead.get(name, incarnation))
        if died:
            self._died[name] = incarnation
        if known is None or known.incarnation != incarnation or known == self._me:
            return self._suspects.charge(name) if died else []
        self._roll.remove(name)
        self._heard_at.pop(name, None)
        self._figures.pop(name, None)
        self._suspects.lost(known, now)
        self._retiring.discard(name)
        self._placement.remove_worker(name)
        self._recovery.heard_all(name)
        return [*self._announce_change(known), *self._give_up_all_of(known, now, died)]

    def _retire(self, retire: Retire) -> list[Command]:
        """Let the worker finish what it has, and place no new request there."""
        known = self._roll.get(retire.name)
        if known is None or known.incarnation != retire.incarnation or known.role not in WORKERS:
            return []
        return [Send(known.name, retire), *self._stop_placing_on(known)]

    def _stop_placing_on(self, worker: Member) -> list[Command]:
        """Place no more on a worker that retires.

        With the last decode worker of a node, give up the requests in the node's pool: they go on elsewhere.
        """
        self._retiring.add(worker.name)
        self._placement.withdraw(worker.name)
        self._sizing.retires(worker.kind, self._placement.num_workers(worker.kind))
        is_decode = worker.role is Role.DECODE and worker.node in self._roll.pools
        if is_decode and self._placement.decodes_only_elsewhere(worker.node):
            return self._leave_pool(worker.node)
        return []

    def _ask_for_workers(self, now: float) -> list[Command]:
        """Ask the launcher for as many workers as the load needs."""
        if self._recovery.is_on or self._suspects.closed or not self._sizing.is_on:
            return []
        wanted = demands(self._open, self._placement, self._admission, self._limits.sizes.be_wait_s, now)
        scale = self._sizing.look(wanted, now)
        return [] if scale is None else [scale]

    def _find_silent(self, now: float) -> list[Command]:
        """Declare dead that was silent for too long. Time in which the router itself stood still counts as no silence:
        what others said meanwhile is still to be heard."""
        late_s = max(0.0, now - self._looks_at)
        self._heard_at = {name: at + late_s for name, at in self._heard_at.items()}
        silent = [name for name, at in self._heard_at.items() if now - at > self._limits.death_s]
        members = [member for name in silent if (member := self._roll.get(name)) is not None]
        return [command for member in members for command in self._declare_dead(member.name, member.incarnation, now)]

    def _watch_liveness(self, now: float) -> SetTimer:
        self._looks_at = now + self._limits.heartbeat_s
        return SetTimer(_LIVENESS, self._looks_at)

    def _alive(self, sender: str, incarnation: int) -> Member | None:
        """Return the member, unless lost: last frames come too late, since the requests were given up."""
        known = self._roll.get(sender)
        return known if known is not None and known.incarnation == incarnation else None

    def _announce_change(self, member: Member) -> list[Command]:
        return [] if self._recovery.is_gathering else self._roll.announce_change(member)

    def _give_up_all_of(self, member: Member, now: float, died: bool) -> list[Command]:
        """Give up the requests of a lost worker or pool, and cancel those of a lost owner."""
        commands: list[Command] = []
        is_worker, alone = member.role in WORKERS, self._placement.num_at(member.name) == 1
        charges: list[tuple[str, AttemptLost]] = []
        self._placement.forget_kv(member.name)
        self._recovery.lost(member.name)
        for opened in list(self._open):
            if opened.request.owner == member.name:
                commands += self._cancel_open(opened)
            elif opened.at == member.name:
                request = opened.request
                charges.append((request.owner, AttemptLost(request.id, request.attempt, died=True, alone=alone)))
                commands += self._give_up(opened, died, alone, not died) if is_worker else self._give_up(opened)
        self._suspects.ended(member, None if died else charges, now)
        if member.role is Role.POOL:  # prefill workers may have sent it requests that were never reported
            commands += self._inquire([opened for opened in self._open if opened.state is State.PREFILL], now)
        return commands

    # --- Requests

    def _open_request(self, request: Request, sketch: Sketch | None, now: float) -> list[Command]:
        if (request.id, request.attempt) in self._at_work.left:
            return [self._charge(request)]
        told: list[Command] = []
        known, ahead = self._open.get(request.id), NOTHING_AHEAD
        if known is not None and known.request.attempt >= request.attempt:
            return []
        stated, is_line = request.estimate, self._is_line(request)
        request = self._with_length(request, sketch)
        if known is None and request.attempt == 0:
            ahead = self._placement.ahead_of(request, self._roll.pools, now)
            if (refusal := self._admission.refusal(request, ahead, now, is_line)) is not None:
                again_s, tokens = refusal.retry_after_s, len(request.prompt)
                self._decisions.note(
                    Kind.REFUSED, request, refusal.reason.value, tokens=tokens, expected_s=again_s, why=refusal.why
                )
                refused = Refused(request.id, 0, refusal.reason, refusal.why, refusal.retry_after_s)
                self._lengths.closed(request.id)
                return [Send(request.owner, refused)]
            if request.slo.is_asked and is_infeasible(request, ahead):
                told.append(Send(request.owner, Infeasible(request.id, 0)))
        opened = self._add(OpenRequest(request, now))
        self._note_arrival(request, ahead.prompts_s, now)
        if request.estimate is not None and request.estimate != stated:
            mean, upper = request.estimate.mean, request.estimate.upper
            self._decisions.note(Kind.PREDICTED, request, tokens=mean, number=upper)
        if not is_line:
            self._admission.queued(request)
        earlier = self._cancel_everywhere(request.id, request.attempt - 1) if request.attempt else []
        return [*told, *earlier, *self._place_at_once(opened, ahead, now)]

    def _tell_places(self, now: float) -> list[Command]:
        """Tell owners where their chats in line are."""
        owners: dict[str, list[Place]] = {}
        for request, turn in self._admission.lines.turns(now):
            place = Place(request.id, request.attempt, turn.num_before, turn.first_s)
            owners.setdefault(request.owner, []).append(place)
        return [Send(owner, InLine(tuple(places))) for owner, places in owners.items()]

    def _is_line(self, request: Request) -> bool:
        owner = self._roll.get(request.owner)
        return owner is not None and owner.role is Role.JOBS

    def _with_length(self, request: Request, sketch: Sketch | None) -> Request:
        """Return the request with the length that its output will probably have. What its client has said stays."""
        found = None if sketch is None else self._lengths.opened(request, sketch)
        return request if found is None or request.estimate is not None else replace(request, estimate=found)

    def _charge(self, request: Request) -> Command:
        """Charge an attempt at which the life before this one ended."""
        alone = len(self._at_work.left) == 1
        return Send(request.owner, AttemptLost(request.id, request.attempt, died=True, alone=alone))

    def _open_declared(self, request: Request, now: float) -> list[Command]:
        if (request.id, request.attempt) in self._at_work.left:
            return [self._charge(request)]
        known = self._open.get(request.id)
        if known is not None and known.request.attempt >= request.attempt:
            return []
        self._decisions.note(Kind.DECLARED, request)
        opened = self._add(OpenRequest(request, now, is_declared=True))
        if not self._recovery.is_on:
            return self._give_up(opened)
        holder = self._recovery.holder((request.id, request.attempt))
        return self._arrive(opened, holder, Fact.HELD, now) if holder is not None else []

    def _hear_holding(self, member: Member, attempts: tuple[Attempt, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        for key in attempts:
            opened = self._open.current(key)
            if opened is None:
                self._recovery.hold(key, member)
            elif opened.state.value < PLACES[member.role].value:
                commands += self._arrive(opened, member, Fact.HELD, now)
        return commands

    def _recover(self, now: float) -> list[Command]:
        """End the recovery as soon as every member has answered and nothing more can turn up."""
        if not self._recovery.have_all_spoken:
            return []
        if not self._nowhere:
            return self._finish_recovery(now)
        ends_at = self._recovery.settle(now)
        return [] if ends_at is None else [SetTimer(_RECOVERED, ends_at)]

    def _finish_recovery(self, now: float) -> list[Command]:
        held = [key for key in self._recovery.end(now) if self._open.is_unknown(key)]
        unwanted = [command for key in held for command in self._cancel_everywhere(*key)]
        lost = self._give_up_all(self._nowhere)
        self._line_up(now)
        return [*unwanted, *lost, *self._to_gateways(*self._recovery_time)]

    def _line_up(self, now: float) -> None:
        """Put the chats that wait on workers in line again, in the order in which their owners declared them."""
        waiting, self._recovery.waiting = self._recovery.waiting, {}
        for opened in self._open:
            request = opened.request
            if request.slo.is_asked or opened.key not in waiting or opened.at is None:
                continue
            ahead = self._placement.ahead_of(request, self._roll.pools, now)
            turn = self._admission.lines.of(opened.at).turn(request, ahead.takes_s, now)
            self._admission.lines.join(opened.at, request, ahead.takes_s, turn.first_s, now)

    @property
    def _nowhere(self) -> list[OpenRequest]:
        """Return the requests that owners declared and that no member holds."""
        return [opened for opened in self._open.waiting.values() if opened.is_declared]

    @property
    def _recovery_time(self) -> list[Figures]:
        """Return how long the recovery took, once that is known."""
        took_s = self._recovery.took_s
        return [] if took_s is None else [Figures(rebuilt_s=took_s, member=self._me.name)]

    def _to_gateways(self, *figures: Figures) -> list[Command]:
        return [Send(gateway.name, told) for gateway in self._roll.members(Role.GATEWAY) for told in figures]

    def _hand_on(self, figures: Figures) -> list[Command]:
        """Hand figures of a member to every gateway, and keep what it has now for gateways that come later."""
        if figures.worker is not None or figures.usage is not None:
            self._figures[figures.member] = figures
        return self._to_gateways(figures)

    def _send_counts(self) -> list[Command]:
        """Tell every gateway how many requests are where. It says so every second: a router that is silent is away."""
        rt, be = (self._open.stages(service) for service in ServiceClass)
        returned, lost = self._open.num_given_up(Fact.RETURNED), self._open.num_given_up(Fact.LOST)
        return self._to_gateways(
            *(replace(told, rt=rt, be=be, returned=returned, lost=lost) for told in self._recovery_time)
        )

    def _cancel(self, request: str, attempt: int) -> list[Command]:
        opened = self._open.get(request)
        return [] if opened is None or opened.request.attempt > attempt else self._cancel_open(opened)

    def _cancel_open(self, opened: OpenRequest) -> list[Command]:
        self._remove(opened, State.CANCELLED, Fact.CANCELLED)
        return self._cancel_everywhere(opened.request.id, opened.request.attempt)

    def _give_up(
        self, opened: OpenRequest, died: bool = False, alone: bool = False, silent: bool = False
    ) -> list[Command]:
        """Give up the attempt: the owner hears of that and submits the next attempt."""
        self._remove(opened, State.LOST, Fact.LOST)
        request = opened.request
        lost = Send(request.owner, AttemptLost(request.id, request.attempt, died, alone, silent))
        return [*self._cancel_everywhere(request.id, request.attempt), lost]

    def _give_up_all(self, requests: Iterable[OpenRequest], died: bool = False) -> list[Command]:
        return [command for opened in requests for command in self._give_up(opened, died)]

    def _cancel_everywhere(self, request: str, attempt: int) -> list[Command]:
        """Cancel at every member that may hold the request, which may have gone further than the router has heard."""
        return [Send(member.name, Cancel(request, attempt)) for member in self._roll.members(*PLACES)]

    def _hear_progress(self, member: Member, progress: Progress, now: float) -> list[Command]:
        commands: list[Command] = []
        if member.role in WORKERS:
            self._placement.progressed(member.name, progress.backlog, progress.free_blocks, now)
        for key in (*progress.committed, *progress.joined):
            opened = self._open.current(key)
            if opened is None:
                commands += self._answer_unknown(key, member)
            elif opened.state.value <= PLACES[member.role].value:  # `joined` may be heard before `committed`
                self._admission.lines.begin(opened.request.id, now)
                self._admission.began(opened.request)
                self._recovery.waiting.pop(key, None)
                commands += self._arrive(opened, member, Fact.ARRIVED, now)
        for key in progress.returned:
            commands += self._hear_returned(key, member, now)
        if progress.ended:
            self._hear_ended(progress, now)
        for key in (*progress.lost, *progress.unknown):
            opened = self._open.current(key)
            # A request that is unknown to a member may have moved on from there meanwhile.
            if opened is not None and (opened.at == member.name or key in progress.lost):
                commands += self._give_up(opened)
        for key in progress.cut:
            if (opened := self._open.current(key)) is not None:
                commands += self._give_up(opened, silent=True)
        return [*commands, *self._charge_all(progress.felled)]

    def _charge_all(self, felled: tuple[Attempt, ...]) -> list[Command]:
        """Charge attempts at which another part has ended."""
        commands, alone = list[Command](), len(felled) == 1
        for request, attempt in felled:
            opened = self._open.get(request)
            if opened is not None and opened.request.attempt == attempt:
                commands += self._give_up(opened, died=True, alone=alone)
            elif opened is not None:  # the part had more than its core was working on: a later attempt has begun
                commands.append(Send(opened.request.owner, AttemptLost(request, attempt, died=True, alone=alone)))
        return commands

    def _hear_ended(self, progress: Progress, now: float) -> None:
        lengths = dict(zip(progress.ended, progress.lengths, strict=False))
        for key in progress.ended:
            self._recovery.ended(key)
            if (opened := self._open.current(key)) is not None:
                self._lengths.ended(opened.request, lengths.get(key, 0))
                self._admission.ends.add(1, now)
                self._remove(opened, State.ENDED, Fact.ENDED)

    def _hear_last_joined(self, attempts: Iterable[Attempt]) -> list[Command]:
        """Give up requests that had joined a worker that ended at once, before the router heard: one may be the cause.
        The pool has put them back, and would hand them to the next worker."""
        known = [opened for key in attempts if (opened := self._open.current(key)) is not None]
        return self._give_up_all([opened for opened in known if opened.state is State.POOL], died=True)

    def _hear_returned(self, key: Attempt, worker: Member, now: float) -> list[Command]:
        """Record that the request waits in the node's pool again.

        The request may have joined another worker since; and where the pool has died meanwhile, the attempt is lost.
        """
        self._recovery.returned(key, worker)
        opened = self._open.current(key)
        if opened is None or opened.at != worker.name:
            return []
        pool = self._roll.get(self._roll.pools.get(worker.node, ""))
        if pool is None:
            return self._give_up(opened)
        return self._arrive(opened, pool, Fact.RETURNED, now)

    def _answer_unknown(self, key: Attempt, member: Member) -> list[Command]:
        """Answer a member that has a request which is not open here.

        During recovery the owner may still declare the request; otherwise a Cancel was lost, and the router repeats it.
        A prefill worker may have the request, too, and offers the KV while no decode worker has it. Where the request
        has ended meanwhile, a decode worker has the output, which the owner may still lack.
        """
        if self._recovery.is_on:
            self._recovery.hold(key, member)
            return []
        workers = self._roll.members(*WORKERS)
        others = (worker.name for worker in workers if worker.kind is Role.PREFILL and worker != member)
        return [Send(name, Cancel(*key)) for name in (member.name, *others)]

    # --- Inquiries

    def _answer_inquiry(self, owner: str, attempts: tuple[Attempt, ...], now: float) -> list[Command]:
        """Answer an owner that has heard nothing of these attempts for long.

        Attempts that are not open here are lost; for the others the router asks the members that have them.
        """
        if self._recovery.is_on:
            return []  # the owner will declare them
        here = [opened for key in attempts if (opened := self._open.current(key)) is not None]
        lost = [key for key in attempts if self._open.is_unknown(key)]
        told = [Send(owner, self._suspects.uncertain(key, now) or AttemptLost(*key)) for key in lost]
        return [*told, *self._inquire(here, now)]

    def _repair_link(self, member: Member, now: float) -> list[Command]:
        """Make up for frames to or from a member that were lost: send the roll again, and ask where requests are."""
        told: list[Command] = [] if self._recovery.is_gathering else [self._roll.roll_for(member)]
        if member.name in self._retiring:
            told.append(Send(member.name, Retire(member.name, member.incarnation)))
        return [*told, *self._suspects.told(member.name), *self._inquire(self._open, now)]

    def _refresh(self, now: float) -> list[Command]:
        still = [opened for opened in self._open if now - opened.moved_at >= REFRESH_S]
        told = [] if self._recovery.is_gathering else self._roll.announce_all()
        return [*told, *self._inquire(still, now), *self._leave_pools()]

    def _leave_pools(self) -> list[Command]:
        """Give up what is in the pools of nodes that had no decode workers at the last look, too."""
        if self._suspects.closed:
            return []
        bare = {node for node in self._roll.pools if self._placement.decodes_only_elsewhere(node)}
        again, self._without_decode = bare & self._without_decode, bare
        return [command for node in sorted(again) for command in self._leave_pool(node)]

    def _leave_pool(self, node: str) -> list[Command]:
        """Give up the requests in the pool of this node, also future ones: they go on elsewhere."""
        self._left.add(node)
        pool = self._roll.pools[node]
        return self._give_up_all([opened for opened in self._open if opened.at == pool])

    def _inquire(self, requests: Iterable[OpenRequest], now: float) -> list[Command]:
        """Ask the members that should have these requests whether that still holds."""
        at: dict[str, list[Attempt]] = {}
        for opened in requests:
            if not opened.is_waiting:
                opened.moved_at = now
                at.setdefault(opened.at, []).append(opened.key)
        return [Send(name, Inquire(tuple(keys))) for name, keys in at.items()]

    # --- Placement

    def _place(self, now: float) -> list[Command]:
        """Place every prompt that waits, the most urgent first.

        The router places none before hearing which requests members hold already.
        """
        commands = self._place_suspect(now) if self._suspects.is_needed else []
        if not self._open.waiting or not self._placement.num_for_prompts:
            return commands
        for opened in self._most_urgent_first(now):
            if opened.request.deaths and not self._suspects.may_run(opened.request):
                continue
            self._at_work.on((opened.key,))
            ahead = self._placement.ahead_of(opened.request, self._roll.pools, now)
            if ahead.worker is None or (worker := self._roll.get(ahead.worker)) is None:
                break
            commands += self._place_on(worker, opened, ahead, now)
        return commands

    def _place_at_once(self, opened: OpenRequest, ahead: WorkAhead, now: float) -> list[Command]:
        """Place a new request on the worker that was found for it: then no other waits for a worker."""
        worker = None if ahead.worker is None else self._roll.get(ahead.worker)
        if worker is None or self._suspects.is_needed or self._recovery.is_on:
            return []
        return self._place_on(worker, opened, ahead, now)

    def _place_on(self, worker: Member, opened: OpenRequest, ahead: WorkAhead, now: float) -> list[Command]:
        decode, request = self._placement.placed(worker.name, opened.request, ahead.loaded_s, now), opened.request
        if request.slo.is_asked or request.service is ServiceClass.BE or request.emitted or request.pooling is not None:
            self._move(opened, worker, Fact.PLACED, now)
            return [Send(worker.name, Prefill(request, decode))]
        turn = self._admission.turn(request, ahead, now)
        planned_s = self._admission.lines.join(worker.name, request, ahead.takes_s, turn.first_s, now)
        self._move(opened, worker, Fact.PLACED, now, turn)
        if turn.wait_s > 0.0 or planned_s > turn.first_s:
            request = _with_due(request, planned_s, now)
        commands: list[Command] = [Send(worker.name, Prefill(request, decode))]
        if turn.wait_s >= TOLD_S:
            place = Place(request.id, request.attempt, turn.num_before, turn.first_s)
            commands.append(Send(request.owner, InLine((place,))))
        return commands

    def _place_suspect(self, now: float) -> list[Command]:
        """Run the next suspect alone: the reserved worker gives up what it still has."""
        commands, run = self._suspects.reserve(now)
        if run is None:
            return commands
        suspect, worker = run
        commands += self._give_up_all([opened for opened in self._open if opened.at == worker.name])
        self._at_work.on((suspect.key,))
        self._move(suspect, worker, Fact.PLACED, now)
        return [*commands, Send(worker.name, Prefill(suspect.request))]

    def _most_urgent_first(self, now: float) -> list[OpenRequest]:
        """Return the waiting requests in the order of the policy."""
        waiting = self._open.waiting
        if len(waiting) < 2:
            return list(waiting.values())
        policy, times = self._limits.policy, StepTimes()

        def standing_of(opened: OpenRequest) -> Standing:
            return promise(opened.request, policy).standing(now, Work(len(opened.request.prompt)), times)

        return list(policy.ordering.sort(waiting.values(), standing_of, times, policy.late))

    # --- The open requests

    def _add(self, opened: OpenRequest) -> OpenRequest:
        """Open the request in place of the attempt before."""
        if (known := self._open.get(opened.request.id)) is not None:
            self._remove(known, State.REPLACED, Fact.REPLACED)
        self._open.add(opened)
        self._admission.opened(opened.request)
        return opened

    def _move(self, opened: OpenRequest, to: Member, fact: Fact, now: float, turn: Turn = NO_TURN) -> None:
        kind, number = Kind.PLACED if fact is Fact.PLACED else Kind.MOVED, turn.num_before
        self._decisions.note(kind, opened.request, to.name, number=number, expected_s=turn.first_s)
        if opened.is_waiting:
            held, is_placed = self._admission.holdings.held_by(opened.request.id), fact is Fact.PLACED
            self._placement.add_request(to.name, opened.request, now, held, has_prompt=is_placed)
        else:
            self._placement.moved(opened.at, to.name, opened.request, now)
        self._open.move(opened, to, fact, now)

    def _arrive(self, opened: OpenRequest, to: Member, fact: Fact, now: float) -> list[Command]:
        """Record that a member has the request.

        In a pool from which no worker decodes any more the attempt is lost: the next attempt runs elsewhere. So it is
        where it is a suspect: the pool might hand it to a worker that has others.
        """
        if to.role is not Role.PREFILL and opened.state is not State.POOL:
            self._placement.note_prefix(opened.request, to.node, self._roll.pools)
        self._move(opened, to, fact, now)
        runs_on = to.role is not Role.POOL or not (to.node in self._left or opened.request.is_suspect)
        return [] if runs_on else self._give_up(opened)

    def _remove(self, opened: OpenRequest, end: State, fact: Fact) -> None:
        self._decisions.note(_NOTED[end], opened.request, opened.at)
        if not opened.is_waiting:
            self._placement.remove_request(opened.at, opened.request)
        self._lengths.closed(opened.request.id)
        self._admission.closed(opened.request)
        self._open.remove(opened, end, fact)

    # --- What is noted for those who ask later

    def _note_arrival(self, request: Request, ahead_s: float, now: float) -> None:
        since_s = now - (request.arrival_at if request.emitted_at is None else request.emitted_at)
        slo, is_rt = request.slo, request.service is ServiceClass.RT
        promised = f"a ttft of {slo.ttft_s:g} s" if is_rt else f"its end within {slo.jct_s:g} s"
        tokens = len(request.prompt)
        self._decisions.note(Kind.ARRIVED, request, tokens=tokens, seconds=since_s, expected_s=ahead_s, why=promised)


def _with_due(request: Request, planned_s: float, now: float) -> Request:
    """Return the request as its worker plans it: a chat in line is due when its turn comes, later by its ttft.

    So chats in line have their dues in the order in which they came, and none is late as long as the line moves as
    predicted. What counts as kept, for metrics and for the number of workers, is the request's own slo."""
    ttft_s = max(0.0, now - request.arrival_at) + planned_s + request.slo.ttft_s
    return replace(request, slo=replace(request.slo, ttft_s=ttft_s))
