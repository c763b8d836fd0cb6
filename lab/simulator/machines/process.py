"""One life of a simulated member: the turn loop of `Shell` in virtual time.

A `Process` takes its turns as the shell does (shell/turn.py). In place of sockets and threads it has an inbox that the
world fills, links whose frames arrive by the agenda, and work that takes the time its hands say. A process that is
killed takes its inbox with it.

Each process has a clock of its own, which may be ahead of the agenda's; its core reads and sets only that clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, ulp
from typing import Protocol

from alignedserve.core import StepFailure, StepPlan, StepResult
from alignedserve.errors import CastOut
from alignedserve.lab.simulator.machines.clock import Agenda, Priority
from alignedserve.lab.simulator.machines.transfers import SimulatedTransfers
from alignedserve.lab.simulator.machines.trouble import Trouble
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, ReceiveKv, RunAmid, RunStep, SendKv
from alignedserve.protocol.events import Event, StepDone
from alignedserve.protocol.membership import Heard, membership_of
from alignedserve.protocol.messages import ROUTER, Life, Member, Message
from alignedserve.protocol.wire import Envelope, decode
from alignedserve.shell.turn import Core, Hands, TurnLoop

_MOST_BYTES = 1 << 26
Frame = bytes | Envelope  # an envelope where no witness asks for bytes
_CAST_OUT_S = 0.5  # until a process that ended itself, because it was taken for dead, is back


class WorkHands(Hands, Protocol):
    """The hands of a worker, whose commands take virtual time."""

    def begin(self, command: Command) -> float:
        """Begin the work and return how many seconds it takes."""

    def finish(self, command: Command, seconds: float) -> Event | None:
        """Return the result of work that took so long, if the core is to hear one."""

    def transfer(
        self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, me: str, post: Callable[[Event], None]
    ) -> None:
        """Begin a transfer of the holder `me`; it goes on beside later work."""


@dataclass(frozen=True)
class ProcessSetup:
    """The core, the hands and the commands that a process starts with."""

    core: Core
    hands: Hands
    first: list[Command]  # commands to perform before the first event
    work: WorkHands | None = None  # the hands again, where the part is a worker
    hears_while_busy: bool = False  # a thread does its work, as with look_ahead
    layers: int = 0  # between which a step can pause


@dataclass
class VirtualLink:
    """A link from one process to another."""

    address: str
    incarnation: int = 0
    sent: int = 0
    last_arrival_at: float = 0.0


class ProcessClock:
    """The agenda's time, plus how far the clock of this machine is ahead of it."""

    def __init__(self, agenda: Agenda, ahead_s: float) -> None:
        self._agenda, self.ahead_s = agenda, ahead_s

    def now(self) -> float:
        return self._agenda.now + self.ahead_s

    def until(self, due_at: float) -> float:
        return due_at - self._agenda.now

    def agenda_time(self, at: float) -> float:
        """Return the agenda's time when this clock says `at` for the first time.

        A difference that is rounded down would be too early: a timer would fire, be set again, and fire for ever."""
        due_at = at - self.ahead_s
        while due_at + self.ahead_s < at:
            due_at += max(ulp(due_at), ulp(at))
        return due_at


class Witness:
    """Sees the commands, events and work of a world; this base class ignores them."""

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        """Note a command of a core; `frame` is the same in bytes."""

    def handled(self, process: Process) -> None:
        """Note that the process's core has handled an event, and that the commands from it are performed."""

    def works(self, process: Process, command: Command) -> None:
        """Note that a piece of work begins or ends."""


class AroundProcess(Protocol):
    """What a process needs of the world that it lives in (world.py)."""

    agenda: Agenda
    trouble: Trouble
    transfers: SimulatedTransfers
    witnesses: list[Witness]
    is_noted: bool

    @property
    def lives(self) -> Iterable[Life]: ...

    def note(self, member: Member, command: Command) -> None: ...

    def end(self, name: str, back_after_s: float, seen: bool) -> None: ...

    def frame(self, envelope: Envelope) -> Frame: ...

    def transmit(self, sender: Member, to: str, link: VirtualLink, frame: Frame) -> None: ...


class Process(TurnLoop):
    """One life of a member: its core, its hands, and what the shell does for both."""

    def __init__(self, world: AroundProcess, member: Member, setup: ProcessSetup) -> None:
        self._own_clock = ProcessClock(world.agenda, world.trouble.ahead_s(member.name))
        membership = membership_of(member.name, member.incarnation, world.lives)
        super().__init__(setup.core, setup.hands, membership, self._own_clock)
        self.member = member
        self._first, self._work_hands = setup.first, setup.work
        self._world, self._agenda = world, world.agenda
        self._heard = Heard(member.name)
        self._links = {ROUTER: VirtualLink(ROUTER)}
        self._ended_links: dict[str, VirtualLink] = {}
        self._inbox: deque[Frame | Event] = deque()
        self.is_working = False  # whether a step, or a copy before one, runs
        self._hears_while_busy, self._layers = setup.hears_while_busy, setup.layers
        self._began_at = self._ends_at = 0.0  # the work that runs; both move by the time of its pauses
        self._runs: Command | None = None
        self._is_paused = False
        self._failed_step: StepPlan | None = None  # the last step, if it had too little memory
        self.frozen_until = 0.0
        self._loop_hangs = self._work_hangs = False
        self._aside_until = 0.0  # when the copies that go on beside the steps are done

    def begin(self) -> None:
        self.perform(self._first)
        self._take_turn()

    def arrive(self, frame: Frame) -> None:
        self._inbox.append(frame)
        self._take_turn()

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        self._take_turn()

    @property
    def is_frozen(self) -> bool:
        return self._agenda.now < self.frozen_until

    @property
    def num_refused(self) -> int:
        """Return the number of frames that were dropped because their senders may not say such things."""
        return self._membership.refusals.count + self._heard.refusals.count

    def freeze(self, until: float) -> None:
        """Stop the process until then, as SIGSTOP does: it sends no heartbeats, and does not know of the pause."""
        self.frozen_until = until
        self._agenda.at(until, Priority.FAULT, self._take_turn)

    def hang_loop(self) -> None:
        """Let the process take no turn any more; its heartbeats go on."""
        self._loop_hangs = True

    def hang_work(self) -> None:
        """Let the work that runs never end; the process goes on to hear what it is told, if it does so meanwhile."""
        self._work_hangs = True

    # --- Turns

    def _take_turn(self) -> None:
        if (self.is_working and not self._hears_while_busy) or not self.alive or self._agenda.now < self.frozen_until:
            return
        if self._loop_hangs:
            return
        try:
            self.turn(self._arrived() if self._inbox else ())
        except CastOut:
            self._world.end(self.member.name, _CAST_OUT_S, seen=True)
        # Work that runs beside the process leaves it free. It may fail at once: that event takes a turn within this
        # one, which may begin work too.
        while self._work and self._may_begin():
            self._begin(self._work.popleft())
        if self._layers and isinstance(self._runs, RunStep) and not self._is_paused and self._work_hands is not None:
            for work in [work for work in self._work if isinstance(work, RunAmid)]:
                self._begin_amid(work, self._work_hands)

    def _arrived(self) -> Iterator[Event]:
        while self._inbox and self.alive:
            arrived = self._inbox.popleft()
            if isinstance(arrived, bytes):
                arrived = decode(arrived, _MOST_BYTES)
            yield from self._heard.events(arrived) if isinstance(arrived, Envelope) else [arrived]

    def _deliver(self, event: Event) -> None:
        if not self.alive:
            return
        self.perform(self.core.handle(event, self._own_clock.now()))
        for witness in self._world.witnesses:
            witness.handled(self)

    def perform(self, commands: Iterable[Command]) -> None:
        if self._world.is_noted:
            commands = self._noted(commands)
        super().perform(commands)

    def _noted(self, commands: Iterable[Command]) -> Iterator[Command]:
        """Yield the commands and note each just before it is performed."""
        for command in commands:
            self._world.note(self.member, command)
            yield command

    def _wake_at(self, at: float) -> float:
        due_at = self._own_clock.agenda_time(at)
        self._agenda.at(due_at, Priority.TIMER, self._take_turn)
        return due_at

    def _end(self) -> None:
        self._world.end(self.member.name, 0.0, seen=True)

    # --- Work

    def _may_begin(self) -> bool:
        return self.alive and not self.is_working

    def _begin(self, work: Command) -> None:
        if self._work_hands is None:
            self.hands.perform(work)  # raises: this part does no work
        elif isinstance(work, SendKv | ReceiveKv):
            self._work_hands.transfer(work, self._world.transfers, self.member.holder, self.post)
        elif isinstance(work, CopyOut | CopyIn) and work.aside:
            self._begin_aside(work, self._work_hands)
        else:
            self._begin_work(work, self._work_hands)

    def _begin_work(self, work: Command, hands: WorkHands) -> None:
        """Begin work that occupies the process until it is done."""
        self.is_working = True
        if self._is_poisoned(work, at_end=False):
            return
        if self._world.witnesses:
            self._witness_work(work)
        now = self._agenda.now
        seconds, trouble = hands.begin(work), self._world.trouble
        if trouble.has_begun:
            seconds *= trouble.work_takes(self.member.name, now)
        self._runs, self._began_at, self._ends_at = work, now, now + seconds
        self._agenda.at(self._ends_at, Priority.WORK, partial(self._finish_work, work, hands, seconds))

    def _begin_amid(self, work: RunAmid, hands: WorkHands) -> None:
        """Run this step in a pause at the end of the present layer of the step that runs; after its last layer the
        step waits in the queue."""
        layer_s = (self._ends_at - self._began_at) / self._layers
        pause_at = self._began_at + ceil((self._agenda.now - self._began_at) / layer_s) * layer_s if layer_s else inf
        if pause_at >= self._ends_at:
            return
        self._work.remove(work)
        if self._is_poisoned(work, at_end=False):
            return
        self._witness_work(work)
        self._is_paused = True
        seconds = hands.begin(work) * self._world.trouble.work_takes(self.member.name, self._agenda.now)
        self._began_at, self._ends_at = self._began_at + seconds, self._ends_at + seconds
        self._agenda.at(pause_at + seconds, Priority.WORK, partial(self._finish_amid, work, hands, seconds))

    def _finish_amid(self, work: RunAmid, hands: WorkHands, seconds: float) -> None:
        if not self.alive or self._work_hangs:
            return
        if self.is_frozen:
            self._agenda.at(self.frozen_until, Priority.WORK, partial(self._finish_amid, work, hands, seconds))
            return
        if self._is_poisoned(work, at_end=True):
            return
        self._is_paused = False
        self._witness_work(work)
        if (event := self._outcome(work, hands, seconds)) is not None:
            self._inbox.append(event)
        self._take_turn()

    def _finish_work(self, work: Command, hands: WorkHands, seconds: float) -> None:
        if not self.alive or self._work_hangs:
            return
        if self.is_frozen:
            again = partial(self._finish_work, work, hands, seconds)
            self._agenda.at(self.frozen_until, Priority.WORK, again)
            return
        if self._is_paused or self._agenda.now < self._ends_at:  # it has paused
            again = partial(self._finish_work, work, hands, seconds)
            self._agenda.at(self._ends_at, Priority.WORK, again)
            return
        if self._is_poisoned(work, at_end=True):
            return
        self.is_working, self._runs = False, None
        if self._world.witnesses:
            self._witness_work(work)
        if (event := self._outcome(work, hands, seconds)) is not None:
            self._inbox.append(event)  # behind the messages that arrived during the work, as in the shell
        self._take_turn()

    def _is_poisoned(self, work: Command, at_end: bool) -> bool:
        """Return whether a request of the step ends this process."""
        trouble = self._world.trouble
        poison = trouble.poison_in(work.plan, at_end) if trouble.has_begun and isinstance(work, RunStep) else None
        if poison is not None:
            self._world.end(self.member.name, poison.back_after_s, seen=True)
        return poison is not None

    def _begin_aside(self, copy: CopyOut | CopyIn, hands: WorkHands) -> None:
        """Begin a copy that goes on beside later work; such copies run one after the other."""
        now = max(self._agenda.now, self._aside_until)
        seconds = hands.begin(copy) * self._world.trouble.work_takes(self.member.name, self._agenda.now)
        self._aside_until = now + seconds
        self._witness_work(copy)
        self._agenda.at(self._aside_until, Priority.WORK, partial(self._finish_aside, copy, hands, seconds))

    def _finish_aside(self, copy: CopyOut | CopyIn, hands: WorkHands, seconds: float) -> None:
        if not self.alive:
            return
        if self.is_frozen:
            again = partial(self._finish_aside, copy, hands, seconds)
            self._agenda.at(self.frozen_until, Priority.WORK, again)
            return
        self._witness_work(copy)
        if (event := hands.finish(copy, seconds)) is not None:
            self.post(event)

    def _outcome(self, work: Command, hands: WorkHands, seconds: float) -> Event | None:
        """Return the result of the work: a failed step where a fault leaves too little memory for it."""
        trouble = self._world.trouble
        if trouble.has_begun and isinstance(work, RunStep):
            plan = work.plan
            failed, self._failed_step = self._failed_step, None
            if failed is not None and plan.continues(failed):
                return StepDone(StepResult(plan.number, (), failure=StepFailure("a fault")), seconds)
            if not trouble.has_memory(self.member.name, plan.num_tokens, self._agenda.now):
                self._failed_step = plan
                return StepDone(StepResult(plan.number, (), failure=StepFailure("a fault")), seconds)
        return hands.finish(work, seconds)

    def _witness_work(self, work: Command) -> None:
        for witness in self._world.witnesses:
            witness.works(self, work)

    # --- Links

    def _connect(self, member: Member) -> None:
        self._heard.meet(member.name, member.incarnation)
        known = self._links.get(member.name)
        if known is None or (known.address != member.address and known.incarnation <= member.incarnation):
            self._disconnect(member.name)
            before = self._ended_links.pop(member.name, None)
            sent = before.sent if before is not None and before.address == member.address else 0
            self._links[member.name] = VirtualLink(member.address, member.incarnation, sent)

    def _disconnect(self, name: str) -> None:
        """End a link. A new link to the same address goes on counting, but its frames may overtake earlier frames."""
        if (link := self._links.pop(name, None)) is not None:
            self._ended_links[name] = link

    def _send(self, to: str, message: Message) -> None:
        link = self._links.get(to)
        if link is None:
            return
        link.sent += 1
        envelope = Envelope(self.member.name, self.member.incarnation, link.sent, message)
        self._world.transmit(self.member, to, link, self._world.frame(envelope))
