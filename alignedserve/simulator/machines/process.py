"""One life of a member, done virtually.

A `Process` does for its core what the shell does: it delivers what arrives, performs what comes of
that, and does one piece of work between two looks at its inbox. A killed one takes with it what lies there.

Each has its own clock, which may be ahead of the agenda's; what a core says and hears is in its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

from alignedserve.core import StepFailure, StepResult
from alignedserve.errors import CastOut
from alignedserve.protocol.commands import (
    Command,
    CompressPage,
    CopyIn,
    CopyOut,
    CopySlots,
    Deliver,
    End,
    ProjectKv,
    ReceiveKv,
    RunStep,
    Send,
    SendKv,
    SetTimer,
)
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, Received, StepDone, TimerFired
from alignedserve.protocol.membership import Heard, Membership
from alignedserve.protocol.messages import ROUTER, Heartbeat, Member, Members, Message
from alignedserve.protocol.wire import Envelope, decode
from alignedserve.simulator.machines.clock import Priority
from alignedserve.simulator.machines.transfers import SimulatedTransfers

if TYPE_CHECKING:
    from alignedserve.simulator.machines.world import World

_MOST_BYTES = 1 << 26
Frame = bytes | Envelope  # the latter where nobody asks for bytes
_CAST_OUT_S = 0.5  # until a process that was taken for dead, and ends itself, is back


class Core(Protocol):
    def handle(self, event: Event, now: float) -> list[Command]: ...


class Hands(Protocol):
    def meet(self, member: Member) -> None:
        """A member has joined; the core hears of it next."""

    def part_from(self, member: Member) -> None:
        """A member has gone; the core hears of it next."""

    def begin(self, command: Command) -> float:
        """A piece of work: how long it takes."""

    def finish(self, command: Command, seconds: float) -> Event | None:
        """What came of it, if anybody is to hear of it, and how long it took after all."""

    def perform(self, command: Command) -> None:
        """What takes no time."""

    def transfer(self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, process: Process) -> None:
        """Begin it; it goes on beside what comes after it."""


class NoHands:
    """Of a part that only talks."""

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def begin(self, command: Command) -> float:
        raise TypeError(f"this part cannot begin {command}")

    def finish(self, command: Command, seconds: float) -> Event:
        raise TypeError(f"this part cannot finish {command}")

    def perform(self, command: Command) -> None:
        raise TypeError(f"this part cannot perform {command}")

    def transfer(self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, process: Process) -> None:
        raise TypeError(f"this part cannot begin {command}")


@dataclass(frozen=True)
class Life:
    """What a process starts with."""

    core: Core
    hands: Hands
    first: list[Command]
    hears_while_busy: bool = False  # its work is done by a thread of its own, as with look_ahead


@dataclass
class Link:
    """From one process to another."""

    address: str
    incarnation: int = 0
    sent: int = 0
    last_arrival_at: float = 0.0


class Process:
    """One life of a member: its core, and the shell's part."""

    def __init__(self, world: World, member: Member, life: Life) -> None:
        self.member, self.alive = member, True
        self.core, self.hands, self._first = life.core, life.hands, life.first
        self._world, self._agenda = world, world.agenda
        self._ahead_s = world.trouble.ahead_s(member.name)
        self._membership, self._heard = Membership(member.name, member.incarnation), Heard()
        self._links = {ROUTER: Link(ROUTER)}
        self._ended_links: dict[str, Link] = {}
        self._timers: dict[str, float] = {}  # when they are due, by the agenda's clock
        self._next_timer_at = inf  # none is due before that
        self._work: deque[Command] = deque()
        self._inbox: deque[Frame | Event] = deque()
        self._busy = False
        self._hears_while_busy = life.hears_while_busy
        self._failed_step = 0  # the last one that found too little memory
        self._frozen_until = 0.0
        self._aside_until = 0.0  # copies beside the steps take so long

    def begin(self) -> None:
        self._perform(self._first)
        self._turn()

    def arrive(self, frame: Frame) -> None:
        self._inbox.append(frame)
        self._turn()

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        self._turn()

    @property
    def is_frozen(self) -> bool:
        return self._agenda.now < self._frozen_until

    def freeze(self, until: float) -> None:
        """It does nothing, its heart does not beat, and it does not know: as after SIGSTOP."""
        self._frozen_until = until
        self._agenda.at(until, Priority.FAULT, self._turn)

    def _turn(self) -> None:
        """What has arrived, then timers, then one piece of work: as in `Shell.run`."""
        if (self._busy and not self._hears_while_busy) or not self.alive or self._agenda.now < self._frozen_until:
            return
        try:
            while self._inbox and self.alive:
                arrived = self._inbox.popleft()
                for event in self._read(arrived):
                    self._arrived(event)
        except CastOut:
            self._world.end(self.member.name, _CAST_OUT_S, seen=True)
            return
        if not self.alive:
            return  # it has ended by itself
        if self._agenda.now >= self._next_timer_at:
            self._fire_timers()
        # What goes aside may fail at once, and what is posted then takes a turn within this one, which may begin work.
        while self._work and not self._busy and self.alive:
            command = self._work.popleft()
            if self._goes_aside(command):  # what is before it has been done
                self._begin_aside(command)
            else:
                self._begin_work(command)

    def _read(self, arrived: Frame | Event) -> Sequence[Event]:
        if isinstance(arrived, bytes):
            arrived = decode(arrived, _MOST_BYTES)
        return self._heard.events(arrived) if isinstance(arrived, Envelope) else [arrived]

    def _begin_work(self, command: Command) -> None:
        self._busy = True
        if self._world.witnesses:
            self._witness_work(command)
        now = self._agenda.now
        seconds, trouble = self.hands.begin(command), self._world.trouble
        if trouble.has_begun:
            seconds *= trouble.work_takes(self.member.name, now)
        self._agenda.at(now + seconds, Priority.WORK, partial(self._finish_work, command, seconds))

    @staticmethod
    def _goes_aside(command: Command) -> bool:
        return isinstance(command, SendKv | ReceiveKv) or (isinstance(command, CopyOut | CopyIn) and command.aside)

    def _begin_aside(self, command: Command) -> None:
        """It goes on beside what comes after it: transfers as the links allow, copies one after the other."""
        if isinstance(command, SendKv | ReceiveKv):
            self.hands.transfer(command, self._world.transfers, self)
            return
        now = max(self._agenda.now, self._aside_until)
        seconds = self.hands.begin(command) * self._world.trouble.work_takes(self.member.name, self._agenda.now)
        self._aside_until = now + seconds
        self._witness_work(command)
        self._agenda.at(self._aside_until, Priority.WORK, lambda: self._finish_aside(command, seconds))

    def _finish_aside(self, command: Command, seconds: float) -> None:
        if not self.alive:
            return
        if self.is_frozen:
            self._agenda.at(self._frozen_until, Priority.WORK, lambda: self._finish_aside(command, seconds))
            return
        self._witness_work(command)
        if (event := self.hands.finish(command, seconds)) is not None:
            self.post(event)

    def _finish_work(self, command: Command, seconds: float) -> None:
        if not self.alive:
            return
        if self.is_frozen:
            self._agenda.at(self._frozen_until, Priority.WORK, lambda: self._finish_work(command, seconds))
            return
        self._busy = False
        if self._world.witnesses:
            self._witness_work(command)
        if (event := self._outcome(command, seconds)) is not None:
            self._inbox.append(event)  # behind what came meanwhile, which is then known to whoever decides what is next
        self._turn()

    def _outcome(self, command: Command, seconds: float) -> Event | None:
        trouble = self._world.trouble
        if trouble.has_begun and isinstance(command, RunStep):
            plan = command.plan
            goes_on = any(one.token is None for one in plan.decodes) and self._failed_step == plan.number - 1
            if goes_on or not trouble.has_memory(self.member.name, plan.num_tokens, self._agenda.now):
                self._failed_step = plan.number
                return StepDone(StepResult(plan.number, (), failure=StepFailure("a fault")), seconds)
        return self.hands.finish(command, seconds)

    def _witness_work(self, command: Command) -> None:
        for witness in self._world.witnesses:
            witness.works(self, command)

    def _fire_timers(self) -> None:
        now = self._agenda.now
        for _, name in sorted((at, name) for name, at in self._timers.items() if at <= now):
            del self._timers[name]
            self._deliver(TimerFired(name))
            if not self.alive:
                return
        self._next_timer_at = min(self._timers.values(), default=inf)

    def _arrived(self, event: Event) -> None:
        match event:
            case Received(message=Heartbeat(member)):
                self._connect(member)
                self._deliver(event)
            case Received(sender, Members(members)) if sender == ROUTER:
                self._meet(members)
            case Received() if not self._membership.admits(event):
                pass
            case _:
                self._deliver(event)

    def _meet(self, members: tuple[Member, ...]) -> None:
        for event in self._membership.announced(members):
            match event:
                case MemberLost(member):
                    if member.name != ROUTER:
                        self._disconnect(member.name)
                    self.hands.part_from(member)
                case MemberJoined(member):
                    self._connect(member)
                    self.hands.meet(member)
            self._deliver(event)

    def _connect(self, member: Member) -> None:
        known = self._links.get(member.name)
        if known is None or (known.address != member.address and known.incarnation <= member.incarnation):
            self._disconnect(member.name)
            before = self._ended_links.pop(member.name, None)
            sent = before.sent if before is not None and before.address == member.address else 0
            self._links[member.name] = Link(member.address, member.incarnation, sent)

    def _disconnect(self, name: str) -> None:
        """A link that is made anew counts on, but is another connection: its frames may overtake those before."""
        if (link := self._links.pop(name, None)) is not None:
            self._ended_links[name] = link

    def _deliver(self, event: Event) -> None:
        if not self.alive:
            return  # it has ended by itself, at another event of the same frame
        self._perform(self.core.handle(event, self._agenda.now + self._ahead_s))
        for witness in self._world.witnesses:
            witness.handled(self)

    def _perform(self, commands: Iterable[Command]) -> None:
        note, perform = self._world.is_noted, self.hands.perform
        for command in commands:
            if note:
                self._world.note(self.member, command)
            match command:
                case Deliver():  # one for each token
                    perform(command)
                case Send(to, message):
                    self._send(to, message)
                case End():
                    self._world.end(self.member.name, 0.0, seen=True)
                    return
                case SetTimer(name, at):
                    self._timers[name] = due_at = at - self._ahead_s
                    self._next_timer_at = min(self._next_timer_at, due_at)
                    self._agenda.at(due_at, Priority.TIMER, self._turn)
                case (
                    RunStep()
                    | CopyOut()
                    | CopyIn()
                    | CopySlots()
                    | ProjectKv()
                    | CompressPage()
                    | SendKv()
                    | ReceiveKv()
                ):
                    self._work.append(command)
                case _:
                    perform(command)

    def _send(self, to: str, message: Message) -> None:
        link = self._links.get(to)
        if link is None:
            return
        link.sent += 1
        envelope = Envelope(self.member.name, self.member.incarnation, link.sent, message)
        self._world.transmit(self.member, to, link, self._world.frame(envelope))
